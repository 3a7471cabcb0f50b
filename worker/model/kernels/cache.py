"""Compiled and tuned kernels, kept in one folder between processes.

Triton, torch.compile and fla's tuning each keep what they made in a folder of their own, two of them below /tmp or the
home of a container that is gone after it. Made anew they cost a worker's start about a minute. All workers of a node may
share the folder: its files are written aside and renamed.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path


def keep_kernels(folder: Path, environment: MutableMapping[str, str] | None = None) -> None:
    """Point the compilers at the folder, before any of them is imported; what the operator has set stays."""
    environment = os.environ if environment is None else environment
    environment.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    # fla keeps what it tunes beside Triton's kernels. Its faster convolution must be asked for.
    environment.setdefault("FLA_CONV_GLUON", "1")
