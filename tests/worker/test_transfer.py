"""Host buffers are few, waited for, and given back once; batches are copied in as few pieces as possible."""

import threading
import time

import pytest
import torch

from worker.engine.transfer import Copier, HostRing, Run, contiguous_runs


def test_taking_waits_until_a_buffer_is_given_back():
    ring = HostRing(2, pinned=False)
    first, waited_s = ring.take(64)
    place = first.tensor(torch.uint8, (64,)).data_ptr()
    ring.take(64)
    assert waited_s < 0.1
    threading.Timer(0.2, first.release).start()
    started = time.monotonic()
    again, waited_s = ring.take(64)
    assert again.tensor(torch.uint8, (64,)).data_ptr() == place
    assert 0.15 < waited_s <= time.monotonic() - started


def test_a_second_release_does_not_double_a_buffer():
    ring = HostRing(1, pinned=False)
    buffer, _ = ring.take(8)
    buffer.release()
    buffer.release()
    assert ring.free == 1


def test_a_late_second_release_does_not_take_the_memory_from_its_next_owner():
    ring = HostRing(1, pinned=False)
    earlier, _ = ring.take(8)
    earlier.release()
    ring.take(8)
    earlier.release()
    assert ring.free == 0


def test_a_buffer_grows_and_keeps_its_size():
    ring = HostRing(1, pinned=False)
    buffer, _ = ring.take(16)
    tensor = buffer.tensor(torch.bfloat16, (2, 3))
    tensor.copy_(torch.arange(6).view(2, 3))
    assert buffer.tensor(torch.bfloat16, (3,), offset_bytes=6).tolist() == [3, 4, 5]
    buffer.release()
    bigger, _ = ring.take(1 << 20)
    place = bigger.tensor(torch.uint8, (1 << 20,)).data_ptr()
    bigger.release()
    smaller, _ = ring.take(10)
    assert smaller.tensor(torch.uint8, (10,)).data_ptr() == place


def test_neighbours_are_one_run():
    offsets = [0, 5, 9, 12, 20]
    assert contiguous_runs([0, 1, 2, 3], [5, 4, 3, 8], offsets) == [Run(0, 0, 20)]
    assert contiguous_runs([1, 3, 4], [4, 8, 2], offsets) == [Run(0, 5, 4), Run(4, 12, 10)]


def test_a_copy_on_the_cpu_is_done_at_once():
    source, destination = torch.randn(4, 2), torch.zeros(4, 2)
    copy = Copier(torch.device("cpu")).copy([(source, destination)])
    assert torch.equal(source, destination)
    assert copy.wait() >= 0
    assert copy.sources == ()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_many_copies_from_a_gpu_arrive_whole():
    """A destination read before its copy is done holds garbage."""
    device = torch.device("cuda")
    copier, ring = Copier(device), HostRing(3, pinned=True)
    for step in range(200):
        source = torch.randn(1 << 18, device=device) + step
        buffer, _ = ring.take(4 << 18)
        destination = buffer.tensor(torch.float32, source.shape)
        copy = copier.copy([(source, destination)])
        torch.randn(1 << 18, device=device)
        copy.wait()
        assert torch.equal(destination, source.cpu())
        buffer.release()
