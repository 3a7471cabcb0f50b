"""What docs/trainers.md shows works, and its commands carry the ids that the adapters give."""

import re
from pathlib import Path

import pytest

from swathe.adapters import ModelOpt, SpecForge, Speculators
from tests.support.runs import Recipe, make_run

TEXT = Path("docs/trainers.md").read_text()
RECIPE = Recipe(
    layers=(1, 16, 31, 46, 60, 61, "final"), num_layers=64, hidden=8, samples=20, longest=30
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_run(tmp_path / "runs" / "qwen", RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "qwen"


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_the_python_examples_run(run: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        local = code.replace("s3://bucket/qwen", str(run))
        exec(compile(local, "docs/trainers.md", "exec"), {})  # noqa: S102


def test_the_ids_in_the_commands_are_those_of_the_adapters(run: Path) -> None:
    eagle, dflash = [1, 31, 60], [1, 16, 31, 46, 61]

    def flag(layers: list[int]) -> str:
        return " ".join(map(str, Speculators(run, layers=layers).trainer_ids))

    assert f"--target-layer-ids {flag(eagle)} " in TEXT
    assert f"--target-layer-ids {flag(dflash)} " in TEXT
    assert f"aux_hidden_state_layer_ids: {SpecForge(run, layers=eagle).trainer_ids}" in TEXT
    forged = SpecForge(run, layers=dflash, algorithm="dflash").trainer_ids
    assert f'{{"target_layer_ids": {forged}}}' in TEXT
    assert ModelOpt(run, layers=dflash).trainer_ids == dflash
