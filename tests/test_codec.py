"""The container is what the reference reader reads, and a slice of it is a byte range."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from swathe import codec
from swathe.errors import FormatError


def written(tensors: dict[str, codec.TensorView], metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(codec.encode(tensors, metadata or {}))


def test_the_reference_reader_gets_every_dtype_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = {
        "bfloat16": torch.randn(3, 2, 5).to(torch.bfloat16),
        "float16": torch.randn(7).to(torch.float16),
        "float32": torch.randn(2, 3),
        "float8_e4m3fn": torch.randn(9).to(torch.float8_e4m3fn),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "int32": torch.arange(4, dtype=torch.int32),
        "int64": torch.arange(3, dtype=torch.int64),
    }
    views = {
        name: codec.TensorView(
            dtype=name, shape=tuple(t.shape), data=t.contiguous().view(torch.uint8).numpy().data
        )
        for name, t in wanted.items()
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(written(views, {"k": "v"}))
    read = safetensors.torch.load_file(path)
    assert read.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))


def test_we_read_what_the_reference_writer_wrote() -> None:
    array = np.arange(24, dtype="f4").reshape(4, 2, 3)
    data = safetensors.numpy.save({"a": array, "b": np.ones(2, "i8")}, metadata={"m": "1"})
    header = codec.read_header(lambda at, size: data[at : at + size], origin="x")
    assert header.size_bytes == len(data)
    assert header.metadata == {"m": "1"}
    part = codec.slice_rows(header.tensors["a"], 1, 3)
    raw = data[part.offset : part.offset + part.size_bytes]
    assert np.array_equal(codec.to_array(part, raw), array[1:3])


def test_every_tensor_starts_at_a_multiple_of_its_item_size() -> None:
    data = written({
        "a": codec.view(np.ones(3, "u1")),
        "b": codec.view(np.ones(5, "i8")),
        "c": codec.view(np.ones(3, "f4")),
    })  # fmt: skip
    header = codec.read_header(lambda at, size: data[at : at + size], origin="x")
    assert [
        header.tensors[name].offset % size for name, size in (("a", 1), ("b", 8), ("c", 4))
    ] == [0, 0, 0]
    assert header.size_bytes == len(data)


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    view = codec.TensorView(dtype="bfloat16", shape=(2, 3), data=b"12345678")
    with pytest.raises(FormatError, match="tensor x"):
        written({"x": view})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1\0\0",
        b"\xff" * 64,
        b"\x10" + b"\0" * 7 + b"no json at all !",
        b"\0" * 64,
        *(
            len(header).to_bytes(8, "little") + header + bytes(24)
            for header in (
                b'{"x":{"dtype":"F32","shape":[3,2],"data_offsets":[0,20]}}',
                b'{"x":{"dtype":"F32","shape":[6,2],"data_offsets":[0,24]}}',
                b'{"x":{"dtype":"F32","shape":[-3,-2],"data_offsets":[0,24]}}',
                b'{"x":{"dtype":"F32","shape":[6],"data_offsets":[24]}}',
                b'{"x":{"dtype":"F32","shape":[6.0],"data_offsets":[0,24]}}',
                b'{"x":{"dtype":["F32"],"shape":[6],"data_offsets":[0,24]}}',
            )
        ),
    ],
)
def test_what_is_no_container_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"states/1\.safetensors"):
        codec.read_header(lambda at, size: data[at : at + size], origin="states/1.safetensors")
