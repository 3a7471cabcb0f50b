"""Checkpoints of tiny models, written once for all tests."""

from pathlib import Path

import pytest
import torch

from tests.worker import tiny
from worker.model.hidden_states import HiddenStateModel, load_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from threads, and spinning threads lose a lot on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folder of a tiny model's checkpoint, by name; ``nested`` is qwen3_5 inside its multimodal wrapper."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            model = tiny.build_nested() if name == "nested" else tiny.build(name)
            folders[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(folders[name])
        return folders[name]

    return get


@pytest.fixture(scope="session")
def load(checkpoint):
    """Load a tiny model for some layers, on the CPU in fp32."""

    def get(name: str, layers=(0, 2), **options) -> HiddenStateModel:
        options = {"dtype": "float32", "device": torch.device("cpu")} | options
        return load_model(checkpoint(name), layers=layers, **options)

    return get
