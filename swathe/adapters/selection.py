"""Which layers of a run a trainer gets, and the refusal of a run that cannot serve it.

Layer numbers here are the run's own: k is the output of block k. Trainers that count hidden states of transformers
(entry 0 is the embedding) read k + 1; see docs/layers.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swathe.errors import ConfigError
from swathe.reader.slots import canonical
from swathe.spec import Layer, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a trainer reads. ``aux`` is how many layers, None for one or more; ``usual`` its defaults by depth."""

    trainer: str
    aux: int | None
    final: bool
    usual: Callable[[int], list[int]]
    id_offset: int = 0
    """The trainer's id of our layer k is k + ``id_offset``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The layers to read, in the order of the trainer's tensors; ``final`` comes after them if it is wanted."""

    aux: tuple[int, ...]
    final: bool

    @property
    def layers(self) -> list[Layer]:
        """For ``HiddenStates(layers=...)``."""
        return [*self.aux, "final"] if self.final else list(self.aux)


def eagle3_layers(depth: int) -> list[int]:
    """Defaults of SpecForge and ModelOpt (and, counted from the embedding, of vLLM): low, middle, high."""
    return [1, depth // 2 - 1, depth - 4]


def dflash_layers(depth: int) -> list[int]:
    """Five layers spread evenly from 1 to depth - 3, z-lab DFlash's rule for a five-layer drafter."""
    first, last = min(1, depth - 1), max(1, depth - 3)
    return [round(first + i * (last - first) / 4) for i in range(5)]


def select(spec: RunSpec, needs: Needs, layers: Sequence[int] | None, *, run: str) -> Selection:
    """The layers for a trainer: those asked for, or all blocks that the run stores, in its order.

    Raises ConfigError, saying what would be needed, when the run cannot serve the trainer.
    """
    stored = [canonical(spec, slot.layer) for slot in spec.layers]
    aux: list[Layer] = list(layers if layers is not None else [n for n in stored if n != "final"])
    missing = [layer for layer in aux if canonical(spec, layer) not in stored]
    if missing:
        raise _refused(spec, needs, run, f"layers {_words(missing)} are not stored")
    numbers = tuple(int(layer) for layer in aux if layer != "final")
    if len(numbers) != len(aux) or len(set(aux)) != len(aux):
        raise _refused(spec, needs, run, f"layers {_words(aux)} are not different block numbers")
    if not numbers or (needs.aux is not None and len(numbers) != needs.aux):
        raise _refused(spec, needs, run, f"{len(numbers)} layers are chosen: {_words(numbers)}")
    if needs.final and "final" not in stored:
        raise _refused(spec, needs, run, "the final state is not stored")
    return Selection(aux=numbers, final=needs.final)


def _refused(spec: RunSpec, needs: Needs, run: str, why: str) -> ConfigError:
    count = "one or more layers" if needs.aux is None else f"exactly {needs.aux} layers"
    final = " and the final state" if needs.final else ""
    usual = ",".join(map(str, needs.usual(spec.model.num_layers)))
    flag = " --final" if needs.final else ""
    msg = (
        f"{run}: {needs.trainer} needs {count}{final}, but {why}. The run stores "
        f"{_words([slot.layer for slot in spec.layers])}. Choose among them with --layers, or make a run with "
        f"--layers {usual}{flag} (the trainer's defaults for {spec.model.num_layers} blocks)"
    )
    return ConfigError(msg)


def _words(layers: Sequence[Layer]) -> str:
    return ", ".join(map(str, layers)) or "none"
