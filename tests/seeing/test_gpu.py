"""On a machine with a GPU only: what is exported of a card is what nvidia-smi says of that UUID."""

import shutil
import subprocess

import pytest
import torch
from fleet import wait_for

from worker.host.devices import present_devices
from worker.telemetry.nvml import GpuReader

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or shutil.which("nvidia-smi") is None, reason="needs a GPU"
)


def smi(uuid: str) -> dict[str, float]:
    fields = ("utilization.gpu", "memory.total", "power.draw", "temperature.gpu", "clocks.sm")
    done = subprocess.run(
        ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(fields, map(float, done.stdout.split(",")), strict=True))


def test_the_exported_values_agree_with_nvidia_smi_while_the_card_works() -> None:
    devices = present_devices()
    assert devices
    uuid = devices[0].uuid
    reader = GpuReader([uuid])
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def agree() -> bool:
        for _ in range(200):
            torch.mm(matrix, matrix)
        ours, theirs = reader.read()[uuid], smi(uuid)
        torch.cuda.synchronize()
        assert ours.utilization is not None
        close = abs(ours.utilization * 100 - theirs["utilization.gpu"]) <= 10
        return close and theirs["utilization.gpu"] >= 50

    wait_for(agree, 60.0, "utilization agrees under load")
    ours, theirs = reader.read()[uuid], smi(uuid)
    assert ours.memory_total_bytes == pytest.approx(theirs["memory.total"] * 2**20, rel=0.01)
    assert ours.temperature_c == pytest.approx(theirs["temperature.gpu"], abs=5)
    assert ours.power_w == pytest.approx(theirs["power.draw"], rel=0.5)
    assert ours.sm_clock_hz == pytest.approx(theirs["clocks.sm"] * 1e6, rel=0.3)
    assert reader.errors == 0
