"""Break the code where it matters most, one place at a time, and demand that the test suite notices.

Each mutant is one edit in a copy of the tree: states of the wrong layer, samples that see their neighbour, samples that
change places, a torn hash, a record that is not exclusive. `make mutants` takes a few minutes.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    """Replace ``old`` by ``new`` in ``file``; ``tests`` must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "the capture takes the block before",
        "worker/model/capture.py",
        "blocks[block].register_forward_hook",
        "blocks[max(block - 1, 0)].register_forward_hook",
        ("tests/worker/test_exact_padded.py", "tests/worker/test_model.py"),
    ),
    Mutant(
        "the first boundary of a packed row is dropped",
        "worker/model/kernels/packing.py",
        "return list(pairwise(self.offsets))",
        "return list(pairwise((0, *self.offsets[2:])))",
        ("tests/worker/test_exact_packed.py",),
    ),
    Mutant(
        "samples come out in another order",
        "worker/engine/transfer.py",
        "runs.append(Run(first, ",
        "runs.append(Run(0, ",
        ("tests/worker/test_engine.py",),
    ),
    Mutant(
        "a failed create passes for a won one",
        "swathe/store/memory.py",
        "            if key in self._objects:\n                return False\n            self._objects[key] = (bytes(data)",
        "            self._objects[key] = (bytes(data)",
        ("tests/store/test_protocol.py",),
    ),
    Mutant(
        "the row index forgets quarantined samples",
        "swathe/manifest.py",
        '    kept &= ~np.isin(rows, np.array(bad, dtype="i8"))\n',
        "",
        ("tests/test_manifest.py",),
    ),
)


def main() -> None:
    """Try every mutant; exit 1 when one lives."""
    survivors = [mutant.name for mutant in MUTANTS if not killed(mutant)]
    if survivors:
        sys.exit(f"alive: {', '.join(survivors)}")
    print(f"all {len(MUTANTS)} mutants were noticed")


def killed(mutant: Mutant) -> bool:
    """Whether the tests fail on a copy with the edit."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "build"), symlinks=True
        )
        path = copy / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"{mutant.file}: the place of mutant '{mutant.name}' has moved")
        path.write_text(text.replace(mutant.old, mutant.new))
        # -m puts the copy first on the path, before an editable install of the original.
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests],
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
        )
    noticed = done.returncode == 1
    print(f"{'noticed' if noticed else 'ALIVE  '}  {mutant.name}", flush=True)
    return noticed


if __name__ == "__main__":
    main()
