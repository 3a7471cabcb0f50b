"""What a run is, as frozen values: run.json, a range's record, a failure marker, a job's payload.

These are the only shapes that cross a boundary (disk, Redis, process). They hold plain data, carry a version, and
are read with validation: unknown fields of the same version are ignored, a newer version is refused by name.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NewType, TypeVar

from pydantic import TypeAdapter, ValidationError

from swathe.errors import FormatError, NewerFormatError

FORMAT_VERSION: Final = 1
PAYLOAD_VERSION: Final = 1

RunId = NewType("RunId", str)
"""Random, made once by ``plan``; tells two runs with the same content apart."""
RangeId = NewType("RangeId", int)
"""A range's place in the plan, from 0."""

Layer = int | Literal["final"]
"""A decoder block (its output, 0-based) or ``final``: the last block's output before the final norm."""
BatchForm = Literal["packed", "padded"]
Order = Literal["user", "length"]
Content = Literal["input_ids", "messages", "text"]
Overlong = Literal["reject", "truncate"]
StoredDtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]
ComputeDtype = Literal["bfloat16", "float16", "float32"]
FLOAT8: Final = "float8_e4m3fn"
"""The one stored dtype that is never computed in, and that has scales."""

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One input file; ``xxh3`` is the hash of its whole content."""

    name: str
    size_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """The user's data set as it was read."""

    location: str
    format: Literal["jsonl", "parquet", "arrow"]
    content: Content
    columns: dict[str, str] = field(default_factory=dict)
    """What the user said about columns: our name -> theirs."""
    files: tuple[DataFile, ...] = ()
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One weight file; ``header_xxh3`` is the hash of its safetensors header (names, shapes, offsets)."""

    name: str
    size_bytes: int
    header_xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The frozen model, by where it was found and by what it is."""

    source: str
    revision: str | None = None
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_rows: int
    """Rows of the embedding table: an input id must be smaller."""
    max_positions: int | None = None
    checkpoint_dtype: ComputeDtype
    config_sha256: str
    weights: tuple[WeightFile, ...] = ()
    random_weights: bool = False
    """True for ``random:CONFIG.json``: nothing may be trained on such states."""
    trust_remote_code: bool = False

    @property
    def identity(self) -> str:
        """Hash of config and weight files: two nodes must agree on it, wherever the files lie."""
        return sha256_json(
            [self.config_sha256, [dataclasses.asdict(file) for file in self.weights]]
        )

    @property
    def key(self) -> str:
        """Short form of the identity; names the model's queue."""
        return self.identity[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """What turned text into ids; absent for data sets that were tokenized already."""

    sha256: str
    chat_template_sha256: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlot:
    """Meaning of index ``slot`` in the K axis of ``hidden_states``, in words too."""

    slot: int
    layer: Layer
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How samples are ordered, cut into ranges and put through the model."""

    form: BatchForm
    order: Order
    window_rows: int
    """Rows inside which ``length`` order sorts; meaningless for ``user`` order."""
    range_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What happens to samples that do not fit, and how many failures a complete run may hold."""

    max_length: int | None = None
    overlong: Overlong = "reject"
    min_length: int = 1
    min_supervised: int = 1
    """Rows with fewer tokens under the loss mask are rejected: a drafter learns nothing from them."""
    min_supervised_ratio: float = 0.0
    """The same as a share of the row's tokens."""
    max_quarantined_ratio: float = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """One file of planned tokens; it holds whole ranges."""

    name: str
    size_bytes: int
    xxh3: str
    first_sample: int
    samples: int
    tokens: int
    first_range: int
    ranges: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the plan found. ``rows`` = samples + rejected."""

    rows: int
    samples: int
    tokens: int
    rejected: int
    ranges: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """run.json: all that a worker or a reader must know. Everything but ``run_id`` is a function of the inputs."""

    format_version: int = FORMAT_VERSION
    run_id: RunId
    fingerprint: str
    dataset: DatasetSpec
    model: ModelSpec
    tokenizer: TokenizerSpec | None = None
    layers: tuple[LayerSlot, ...]
    compute_dtype: ComputeDtype
    stored_dtype: StoredDtype
    batching: Batching
    policies: Policies
    totals: Totals
    token_files: tuple[TokenFile, ...]

    @property
    def range_ids(self) -> range:
        """All ranges of the plan, in order."""
        return range(self.totals.ranges)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of ``hidden_states`` (and fp8 scales) that one token costs."""
        slots = len(self.layers)
        scales = 4 * slots if self.stored_dtype == FLOAT8 else 0
        return slots * self.model.hidden_size * ITEM_BYTES[self.stored_dtype] + scales

    @property
    def state_bytes(self) -> int:
        """Bytes that the run's shards will hold."""
        return self.shard_bytes(self.totals.tokens, self.totals.samples)

    def shard_bytes(self, tokens: int, samples: int) -> int:
        """Bytes that shards of so many tokens hold (states, ids, masks, offsets, rows; without headers)."""
        return tokens * (self.bytes_per_token + 5) + samples * 16

    def token_file_of(self, range_id: RangeId) -> TokenFile:
        """The token file that holds a range. Raises FormatError for a range outside the plan."""
        for file in self.token_files:
            if file.first_range <= range_id < file.first_range + file.ranges:
                return file
        msg = f"range {range_id} is not in the plan: run {self.run_id} has {self.totals.ranges} ranges"
        raise FormatError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A sample that could not be computed, alone, on the reference path."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRecord:
    """states/000042.json: its existence commits the range; it names the one shard that counts.

    ``shard`` is None when every sample of the range is quarantined.
    """

    format_version: int = FORMAT_VERSION
    run_id: RunId
    range_id: RangeId
    shard: str | None
    size_bytes: int
    xxh3: str
    samples: int
    tokens: int
    quarantined: tuple[Quarantined, ...] = ()
    worker: str
    device: str
    finished_at: str
    stage_seconds: dict[str, float] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMarker:
    """states/000042.failed.json: the range was set aside; ``retry`` deletes it."""

    format_version: int = FORMAT_VERSION
    run_id: RunId
    range_id: RangeId
    reason: str
    history: tuple[str, ...] = ()
    worker: str = ""
    failed_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRecord:
    """canaries/000042.json: one stored sample computed again, alone, on the reference path.

    ``errors`` are medians over its tokens, ``bounds`` what they may be, both by layer. ``stored_as_computed``: the bytes
    to be stored are those that the host makes of the computed states.
    """

    format_version: int = FORMAT_VERSION
    run_id: RunId
    range_id: RangeId
    row: int
    tokens: int
    errors: dict[str, float]
    bounds: dict[str, float]
    stored_as_computed: bool = True
    passed: bool
    worker: str
    device: str
    taken_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """moved.json, where a run was: the run is at ``url`` now. Its creation is the moment of the move."""

    format_version: int = FORMAT_VERSION
    run_id: RunId
    move_id: str
    url: str
    moved_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """moving.json, where a run will be: until the departure of the same move is in ``source``, the run is there."""

    format_version: int = FORMAT_VERSION
    run_id: RunId
    move_id: str
    source: str
    started_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeJob:
    """The payload of one rq job: data, never code."""

    version: int = PAYLOAD_VERSION
    run_url: str
    run_id: RunId
    fingerprint: str
    range_id: RangeId


def sha256_json(value: Any) -> str:
    """Hash of a JSON value that does not depend on key order or white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(spec: RunSpec) -> str:
    """What the run is made of: options, contents of inputs, planned tokens; not where they lie nor run_id."""
    value = dataclasses.asdict(spec)
    del (
        value["run_id"],
        value["fingerprint"],
        value["dataset"]["location"],
        value["model"]["source"],
    )
    return sha256_json(value)


_Value = TypeVar("_Value")


_ADAPTERS: Final[dict[Any, TypeAdapter[Any]]] = {}


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """A frozen value of this module as UTF-8 JSON, deterministic, with a final newline."""
    text = json.dumps(dataclasses.asdict(value), indent=indent, ensure_ascii=False)
    return text.encode() + b"\n"


def from_json(kind: type[_Value], data: bytes | str, *, origin: str) -> _Value:
    """Read a frozen value; ``origin`` names the file in errors.

    Raises FormatError when the bytes are no such value, NewerFormatError when they are of a newer format version.
    """
    try:
        raw = json.loads(data)
    except ValueError as error:
        msg = f"{origin}: not JSON ({error}); the file is damaged or not one of swathe's"
        raise FormatError(msg) from error
    version = raw.get("format_version", FORMAT_VERSION) if isinstance(raw, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        msg = f"{origin}: format version {version}, this swathe reads up to {FORMAT_VERSION}; upgrade swathe"
        raise NewerFormatError(msg)
    try:
        if kind not in _ADAPTERS:
            _ADAPTERS[kind] = TypeAdapter(kind)
        value: _Value = _ADAPTERS[kind].validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        msg = f"{origin}: not a valid {kind.__name__} ({where}: {first['msg']})"
        raise FormatError(msg) from error
    return value
