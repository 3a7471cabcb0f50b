"""Each trainer's own view of a run: data sets that read the run directly, with nothing exported.

``adapter[i]`` is what the trainer's own data set class would give for sample i, ``adapter.file(i)`` what its offline
file would hold. The exporters write what ``file`` gives, so both ways train on the same tensors.
"""

from swathe.adapters.base import Adapter
from swathe.adapters.modelopt import ModelOpt
from swathe.adapters.specforge import SpecForge
from swathe.adapters.speculators import Speculators

__all__ = ["Adapter", "ModelOpt", "SpecForge", "Speculators"]
