"""Exports judged by the trainers' own loading code: ``python tests/judges/run.py [--environments DIR]``.

Each trainer is installed without its dependencies in an environment of its own, which borrows torch, transformers,
datasets and the like from the environment that runs this; only what the loaders import and that one lacks is added.
Nothing is stubbed. Then tiny real models (a Llama, and a Gemma with its (1 + w) norm) are run by transformers alone,
their states are stored as runs, exported, and every judge must find its export right, and each sabotaged one wrong.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from swathe.export import ExportOptions, export
from tests.support.runs import Recipe, ids_of, make_run, mask_of, write_norm

HERE = Path(__file__).parent
PACKAGES = {
    "speculators": [
        "speculators==0.9.0",
        "hs-connectors==0.9.0",
        *("openai>=2", "sniffio", "distro", "jiter", "httpx", "httpcore", "anyio", "h11", "idna"),
        "certifi",
    ],
    "specforge": ["specforge==0.2.0"],
    "modelopt": [
        "nvidia-modelopt==0.47.0",
        *("omegaconf", "antlr4-python3-runtime==4.9.3", "pulp<4", "scipy", "ninja"),
    ],
}
LAYERS = (1, 3, 5)
DEPTH, HIDDEN, VOCAB, SAMPLES = 8, 32, 97, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".judges"))
    environments = parser.parse_args().environments.absolute()
    for name, packages in PACKAGES.items():
        make_environment(environments / name, packages)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for model in ("llama", "gemma"):
            make_truth(Path(folder, model), model)
            for what, name, path, wanted in cases(Path(folder, model)):
                done = judge(environments / name, name, path)
                ok = done.returncode == (1 if wanted else 0) and (wanted or "") in done.stdout
                verdict = done.stdout.strip().replace("\n", "; ")
                print(f"{'ok  ' if ok else 'FAIL'} {model} {name} {what}: {verdict}")  # noqa: T201
                if not ok:
                    failures += 1
                    print(done.stderr[-2000:])  # noqa: T201
    sys.exit(1 if failures else 0)


def make_environment(folder: Path, packages: list[str]) -> None:
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == "\n".join(packages):
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "-q", "--no-deps", *packages]
    subprocess.run(command, check=True)
    ours = sysconfig.get_paths()["purelib"]
    (target,) = folder.glob("lib/python*/site-packages")
    (target / "borrowed.pth").write_text(ours + "\n")
    ready.write_text("\n".join(packages))


def judge(environment: Path, name: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [environment / "bin" / "python", HERE / f"judge_{name}.py", path],
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def make_truth(folder: Path, kind: str) -> None:
    """A run of a tiny model in bfloat16, the same in float8, and what transformers alone says about its samples."""
    folder.mkdir()
    torch.manual_seed(1)
    model = tiny(kind).eval().bfloat16()
    norm = model.model.norm
    torch.nn.init.normal_(norm.weight, mean=0.5, std=0.5)
    recipe = Recipe(samples=SAMPLES, hidden=HIDDEN, vocab=VOCAB, num_layers=DEPTH)
    outputs = {row: forward(model, torch.tensor(ids_of(row, recipe))) for row in range(SAMPLES)}

    def states(row: int) -> torch.Tensor:
        found = outputs[row]
        layers = [found["hidden_states"][layer + 1] for layer in LAYERS]
        return torch.stack([*layers, found["before_norm"]], dim=1)

    recipe = Recipe(
        samples=SAMPLES, hidden=HIDDEN, vocab=VOCAB, num_layers=DEPTH, states=states, norm=None
    )
    store = make_run(folder / "run", recipe)
    make_run(folder / "run8", replace(recipe, dtype="float8_e4m3fn"))
    eps = norm.eps if kind == "gemma" else norm.variance_epsilon
    norm_kind = "rms_1p" if kind == "gemma" else "rms"
    write_norm(store, norm_kind, HIDDEN, norm.weight.detach())
    kept = [row for row in range(SAMPLES) if row not in recipe.rejected]
    truth = {
        "kind": norm_kind,
        "eps": eps,
        "norm": norm.weight.detach(),
        "head": model.lm_head.weight.detach(),
        "samples": [
            outputs[row] | {"loss_mask": torch.tensor(mask_of(row, recipe)).long()} for row in kept
        ],
    }
    torch.save(truth, folder / "truth.pt")


def tiny(kind: str) -> transformers.PreTrainedModel:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "gemma":
        return transformers.GemmaForCausalLM(transformers.GemmaConfig(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


@torch.inference_mode()
def forward(model: transformers.PreTrainedModel, ids: torch.Tensor) -> dict:
    before: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    out = model(ids[None].long(), output_hidden_states=True, use_cache=False)
    hook.remove()
    return {
        "input_ids": ids.long(),
        "hidden_states": [one[0].clone() for one in out.hidden_states],
        "before_norm": before[0][0].clone(),
        "logits": out.logits[0].clone(),
    }


def cases(folder: Path) -> Iterator[tuple[str, str, Path, str | None]]:
    """What is exported, who judges it, where it is, and what the judge must find wrong (None: nothing)."""
    run = folder / "run"
    plans = {
        "speculators": ExportOptions(format="speculators"),
        "speculators fp8": ExportOptions(format="speculators", fp8=True),
        "speculators fp8 of a float8 run": ExportOptions(format="speculators", fp8=True),
        "specforge eagle3": ExportOptions(format="specforge"),
        "specforge dflash": ExportOptions(format="specforge", algorithm="dflash"),
        "specforge domino": ExportOptions(format="specforge", algorithm="domino"),
        "specforge dspark": ExportOptions(format="specforge", algorithm="dspark"),
        "modelopt": ExportOptions(format="modelopt"),
    }
    for what, options in plans.items():
        dest = folder / what.replace(" ", "-")
        export(folder / "run8" if "float8 run" in what else run, dest, options)
        yield what, options.format, dest, None
    yield from sabotaged(folder)


def sabotaged(folder: Path) -> Iterator[tuple[str, str, Path, str]]:
    """Wrong ids (shifted by one) for all three, and the state on the wrong side of the norm."""
    for name in ("speculators", "specforge-eagle3", "modelopt"):
        dest = Path(shutil.copytree(folder / name, folder / f"{name}-ids"))
        marker = dest / "swathe-export.json"
        ids = [2, 4, 6] if name == "speculators" else [1, 3, 5]
        text = marker.read_text().replace("\n", "").replace(" ", "")
        shifted = ",".join(str(i - 1) for i in ids)
        marker.write_text(text.replace(",".join(map(str, ids)), shifted))
        yield "ids shifted by one", name.split("-")[0], dest, "WRONG layers"
    truth = torch.load(folder / "truth.pt", weights_only=True)
    dest = Path(shutil.copytree(folder / "speculators", folder / "speculators-norm"))
    for index, sample in enumerate(truth["samples"]):
        path = dest / "hidden_states" / f"hs_{index}.safetensors"
        file = load_file(path)
        file["hidden_states"][:, -1] = sample["hidden_states"][-1]
        save_file(file, path)
    yield "normed state in the pre-norm slot", "speculators", dest, "WRONG teacher logits"
    for name, key in (("specforge-eagle3", "hidden_state"), ("modelopt", "hidden_states")):
        dest = Path(shutil.copytree(folder / name, folder / f"{name}-norm"))
        for path in dest.glob("rows_*/*"):
            file = torch.load(path, weights_only=True)
            sample = truth["samples"][int(path.stem.removeprefix("data_"))]
            file[key] = sample["before_norm"].reshape(file[key].shape)
            torch.save(file, path)
        what = "state before the norm in the post-norm slot"
        yield what, name.split("-")[0], dest, "WRONG teacher logits"


if __name__ == "__main__":
    main()
