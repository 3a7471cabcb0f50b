"""Each trainer's view of a run: right layers, right ids, norm where it is wanted, refusals that say what is needed."""

import itertools
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from swathe import HiddenStates
from swathe.adapters import ModelOpt, SpecForge, Speculators
from swathe.adapters.base import supervised_pairs
from swathe.adapters.norm import read_final_norm
from swathe.adapters.selection import dflash_layers, eagle3_layers
from swathe.adapters.speculators import quantize_fp8, rescale_fp8
from swathe.errors import ConfigError
from tests.support.runs import Recipe, ids_of, make_run, mask_of, stored_states

RECIPE = Recipe()
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, RECIPE)
    return folder


def expected(run: Path, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layers side by side, final before and after the norm, in bfloat16."""
    states = stored_states(row, RECIPE).to(BF16)
    ds = HiddenStates(run)
    norm = read_final_norm(ds.store, ds.spec)
    return states[:, :3].flatten(1), states[:, 3], norm(states[:, 3])


def rows(run: Path) -> list[int]:
    return HiddenStates(run).rows.tolist()


def test_speculators_gets_the_state_before_the_norm(run: Path) -> None:
    adapter = Speculators(run)
    assert adapter.trainer_ids == [2, 4, 6]
    assert adapter.approx_lengths == [len(ids_of(row, RECIPE)) for row in rows(run)]
    for index, row in enumerate(rows(run)):
        aux, before, after = expected(run, row)
        item, file = adapter[index], adapter.file(index)
        assert torch.equal(item["hidden_states"], aux)
        assert torch.equal(item["verifier_last_hidden_states"], before)
        assert not torch.equal(item["verifier_last_hidden_states"], after)
        assert item["input_ids"].tolist() == ids_of(row, RECIPE).tolist()
        assert item["loss_mask"].tolist() == mask_of(row, RECIPE).tolist()
        assert item["loss_mask"].dtype == item["input_ids"].dtype == torch.int64
        assert torch.equal(file["hidden_states"][:, :-1].flatten(1), aux)
        assert torch.equal(file["hidden_states"][:, -1], before)


def test_speculators_float8_has_one_scale_per_token(run: Path) -> None:
    file = Speculators(run, fp8=True).file(4)
    states = stored_states(rows(run)[4], RECIPE)
    assert file["hidden_states"].dtype == torch.float8_e4m3fn
    assert file["hidden_states_scales"].shape == (len(states), 1, 1)
    back = file["hidden_states"].float() * file["hidden_states_scales"]
    assert (back - states).abs().max() <= states.abs().max() / 16


def test_a_float8_run_is_rescaled_for_speculators_without_a_second_rounding(tmp_path: Path) -> None:
    """Slots of magnitudes 1, 2^-5 and 2^-10 apart, and one of zeros, whose scale of 1 must not crush the others."""

    def states(row: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(row)
        values = torch.randn((len(ids_of(row, RECIPE)), 4, 16), generator=generator)
        return values * torch.tensor([2.0**-10, 2.0**-20, 0, 2.0**-15])[:, None]

    recipe = replace(RECIPE, dtype="float8_e4m3fn", states=states)
    make_run(tmp_path, recipe)
    run = HiddenStates(tmp_path)
    for index in (0, 9):
        raw, file = run.as_stored(index), Speculators(tmp_path, fp8=True).file(index)
        scales = file["hidden_states_scales"]
        assert scales.shape == (len(raw["input_ids"]), 1, 1)
        assert torch.equal(scales[:, 0, 0], raw["hidden_states_scales"][:, 0])
        # Their rule, in bfloat16 as their own reader does it: exact, for the scale is a power of two.
        theirs = file["hidden_states"].to(BF16) * scales.to(BF16)
        ours = run[index]["hidden_states"]
        exact = (ours.float().abs() >= scales * 2.0**-6) | (ours == 0)
        assert exact[:, 0].float().mean() > 0.99
        assert torch.equal(theirs[exact], ours[exact])
        assert ((theirs - ours).abs() <= scales * 2.0**-10).all()
        # What quantizing anew would do.
        again, their_scales = quantize_fp8(ours)
        assert (again.float() * their_scales != ours.float())[:, 0].float().mean() > 0.5
    with pytest.raises(ConfigError, match="dequantize"):
        Speculators(tmp_path, dequantize=False)
    few = Speculators(tmp_path, fp8=True, layers=[3], max_length=2).file(0)
    assert few["hidden_states"].shape == (2, 2, 16)
    assert few["hidden_states_scales"].shape == (2, 1, 1)
    zeros, ones = torch.zeros((2, 3, 4)).to(torch.float8_e4m3fn), torch.ones((2, 3))
    assert rescale_fp8(zeros, ones)[1].flatten().tolist() == [1, 1]


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "domino", "dspark"])
def test_specforge_gets_the_state_after_the_norm(run: Path, algorithm: str) -> None:
    adapter = SpecForge(run, algorithm=algorithm)
    assert adapter.trainer_ids == [1, 3, 5]
    for index, member in enumerate(adapter.members):
        row = rows(run)[member]
        aux, _, after = expected(run, row)
        item, file = adapter[index], adapter.file(index)
        assert item["input_ids"][0].tolist() == ids_of(row, RECIPE).tolist()
        if algorithm == "eagle3":
            assert torch.equal(item["hidden_state"][0], aux)
            assert torch.equal(item["target"][0], after)
            assert item["loss_mask"][0].tolist() == [*mask_of(row, RECIPE).tolist()[:-1], 0]
            assert file["loss_mask"].tolist() == mask_of(row, RECIPE).tolist()
            continue
        assert torch.equal(item["hidden_states"][0], aux)
        assert ("target_last_hidden_states" in item) == (algorithm == "dspark")
        if algorithm == "dspark":
            assert torch.equal(item["target_last_hidden_states"][0], after)


@pytest.mark.parametrize("max_length", [None, 6, 12])
def test_the_dflash_family_leaves_out_samples_it_would_refuse(
    run: Path, max_length: int | None
) -> None:
    def has_pair(row: int) -> bool:
        mask = mask_of(row, RECIPE)[:max_length].tolist()
        return any(a and b for a, b in itertools.pairwise(mask))

    adapter = SpecForge(run, algorithm="dflash", max_length=max_length)
    found = supervised_pairs(HiddenStates(run), max_length)
    assert found.tolist() == [has_pair(row) for row in rows(run)]
    assert 0 < len(adapter) < len(rows(run))
    assert [int(i) for i in adapter.members] == found.nonzero()[0].tolist()
    if max_length:
        assert max(adapter.lengths) <= max_length
        assert adapter[0]["hidden_states"].shape[1] <= max_length


def test_modelopt_gets_the_state_after_the_norm_and_says_so(run: Path) -> None:
    adapter, answers = ModelOpt(run), ModelOpt(run, answer_only_loss=True)
    for index, row in enumerate(rows(run)):
        aux, _, after = expected(run, row)
        item, file = adapter[index], adapter.file(index)
        assert torch.equal(item["aux_hidden_states"], aux)
        assert torch.equal(item["base_model_hidden_states"], after)
        assert item["base_hidden_prenorm"] is file["hidden_states_prenorm"] is False
        assert item["labels"].tolist() == [*ids_of(row, RECIPE).tolist()[1:], -100]
        assert item["loss_mask"].all()
        assert answers[index]["loss_mask"].tolist() == mask_of(row, RECIPE).tolist()


def test_layers_come_in_the_order_asked_for_and_in_the_dtype_asked_for(run: Path) -> None:
    adapter = Speculators(run, layers=[5, 1], dtype="float32")
    states = stored_states(rows(run)[2], RECIPE)
    assert adapter.trainer_ids == [6, 2]
    assert torch.equal(adapter.file(2)["hidden_states"], states[:, [2, 0, 3]])


@pytest.mark.parametrize(
    ("change", "adapter", "options", "words"),
    [
        ({"layers": (1, 3, 5)}, Speculators, {}, "the final state is not stored"),
        ({"layers": (1, 3, 5)}, ModelOpt, {}, "--layers 1,3,4 --final"),
        ({"layers": (1, 3, "final")}, SpecForge, {}, "exactly 3 layers"),
        ({"layers": (0, 1, 3, 5, "final")}, SpecForge, {}, "4 layers are chosen"),
        ({}, SpecForge, {"layers": [1, 2, 5]}, "layers 2 are not stored"),
        ({}, Speculators, {"layers": [1, 1]}, "not different"),
        ({"layers": ("final",)}, Speculators, {}, "one or more layers"),
        ({}, SpecForge, {"algorithm": "medusa"}, "medusa"),
        ({"norm": None}, ModelOpt, {}, "final_norm"),
        ({"random_weights": True}, Speculators, {}, "random weights"),
    ],
)
def test_a_run_that_cannot_serve_a_trainer_is_refused_with_what_would_be_needed(
    tmp_path: Path, change: dict, adapter: type, options: dict, words: str
) -> None:
    make_run(tmp_path, replace(RECIPE, **change))
    with pytest.raises(ConfigError, match=words):
        adapter(tmp_path, **options)


def test_what_needs_no_final_state_needs_no_norm(tmp_path: Path) -> None:
    make_run(tmp_path, replace(RECIPE, layers=(1, 3), norm=None, random_weights=True))
    assert len(SpecForge(tmp_path, algorithm="dflash", allow_random=True)) > 0


def test_the_last_block_is_the_final_state(tmp_path: Path) -> None:
    """A run of an 8-block model with layer 7 holds what --final would hold."""
    make_run(tmp_path, replace(RECIPE, layers=(1, 3, 5, 7)))
    assert Speculators(tmp_path).selection.aux == (1, 3, 5)
    assert Speculators(tmp_path, layers=[1, 7]).trainer_ids == [2, 8]


def test_usual_layers_are_those_of_the_trainers() -> None:
    assert eagle3_layers(64) == [1, 31, 60]
    assert dflash_layers(64) == [1, 16, 31, 46, 61]
    assert dflash_layers(36) == [1, 9, 17, 25, 33]


@pytest.mark.parametrize("adapter", [Speculators, SpecForge, ModelOpt])
def test_adapters_work_in_worker_processes(run: Path, adapter: type) -> None:
    data = adapter(run)
    again = pickle.loads(pickle.dumps(data))  # noqa: S301
    first = {name: value for name, value in again[3].items() if torch.is_tensor(value)}
    assert all(torch.equal(value, data[3][name]) for name, value in first.items())
    assert len(list(DataLoader(data, batch_size=None, num_workers=2))) == len(data)


@pytest.mark.parametrize("large", [65_504.0, 98_304.0])
def test_states_that_float16_makes_infinite_are_refused(tmp_path: Path, large: float) -> None:
    def states(row: int) -> torch.Tensor:
        return torch.full((len(ids_of(row, RECIPE)), len(RECIPE.layers), RECIPE.hidden), large)

    url = make_run(tmp_path, replace(RECIPE, dtype="float32", states=states)).url
    assert ModelOpt(url)[2]["aux_hidden_states"].isfinite().all()
    for adapter in (ModelOpt(url, dtype="float16"), Speculators(url, dtype="float16")):
        if large > 65_504:
            with pytest.raises(
                ConfigError, match=r"row 2 has states up to 9\.83e\+04, .* bfloat16"
            ):
                adapter.file(2)
        else:
            assert adapter.file(2)
