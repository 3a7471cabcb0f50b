"""Sealing: the index says where each stored sample lies, and a run that does not add up is not sealed."""

import io
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from producer.cli import app
from producer.verify import verify
from swathe import HiddenStates, names
from swathe.errors import IncompleteRunError, IntegrityError, NewerFormatError
from swathe.manifest import index_rows, seal
from swathe.records import RunWatcher, read_record, read_run
from swathe.spec import Policies, Quarantined, RangeId, to_json
from swathe.store.local import LocalStore
from swathe.store.memory import MemoryStore
from tests.support.synthetic_run import write_run


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    write_run(store)
    return store


def quarantine_first(store: MemoryStore, range_id: int) -> int:
    """Rewrite a range's record as if its first sample had been quarantined; returns the sample's row."""
    spec = read_run(store)
    table = index_rows(store, RunWatcher(store, spec).read()).to_pylist()
    mine = [entry for entry in table if entry["shard"] == range_id]
    first = min(mine, key=lambda entry: entry["offset"])
    record = read_record(store, spec, RangeId(range_id))
    changed = replace(
        record,
        samples=record.samples - 1,
        tokens=record.tokens - first["length"],
        quarantined=(Quarantined(row=first["row"], reason="NaN, alone too"),),
    )
    store.write(names.record(RangeId(range_id)), [to_json(changed)])
    return first["row"]


def allow(store: MemoryStore, ratio: float) -> None:
    spec = read_run(store)
    changed = replace(spec, policies=Policies(max_quarantined_ratio=ratio))
    store.write(names.RUN, [to_json(changed)])


def test_a_quarantined_sample_is_not_in_the_index_and_its_neighbours_move_up(store) -> None:
    before = index_rows(store, RunWatcher(store, read_run(store)).read()).to_pylist()
    row = quarantine_first(store, 1)
    allow(store, 1.0)
    store.delete(names.MANIFEST)
    manifest = seal(store)
    after = index_rows(store, RunWatcher(store, read_run(store)).read()).to_pylist()
    assert [entry["row"] for entry in after] == [e["row"] for e in before if e["row"] != row]
    lost = next(entry for entry in before if entry["row"] == row)
    for entry, old in zip(after, [e for e in before if e["row"] != row], strict=True):
        moved = lost["length"] if old["shard"] == 1 else 0
        assert entry["offset"] == old["offset"] - moved
    accounts = manifest.accounts
    assert accounts.quarantined == 1
    assert accounts.stored + accounts.rejected + accounts.quarantined == accounts.rows


def test_too_many_quarantined_samples_are_not_sealed(store) -> None:
    quarantine_first(store, 1)
    allow(store, 0.0)
    store.delete(names.MANIFEST)
    with pytest.raises(IncompleteRunError, match="quarantined"):
        seal(store)
    assert store.stat(names.MANIFEST) is None


def test_an_open_range_and_one_set_aside_are_not_sealed(store) -> None:
    store.delete(names.MANIFEST)
    store.delete(names.record(RangeId(1)))
    with pytest.raises(IncompleteRunError, match="1 of"):
        seal(store)
    store.write(
        names.failed(RangeId(1)),
        [b'{"run_id": "x", "range_id": 1, "reason": "killed three processes", "history": []}'],
    )
    with pytest.raises(IncompleteRunError, match=r"killed three processes.*swathe retry"):
        seal(store)


def test_a_record_that_contradicts_the_plan_is_named(store) -> None:
    store.delete(names.MANIFEST)
    spec = read_run(store)
    record = read_record(store, spec, RangeId(1))
    store.write(
        names.record(RangeId(1)),
        [to_json(replace(record, tokens=record.tokens - 1))],
    )
    with pytest.raises(IntegrityError, match=r"states/000001\.json"):
        seal(store)


def test_a_record_of_another_run_is_told_and_not_counted(store) -> None:
    record = read_record(store, read_run(store), RangeId(0))
    store.write(names.record(RangeId(0)), [to_json(replace(record, run_id="another"))])
    state = RunWatcher(store, read_run(store)).read()
    assert state.invalid == {0}
    assert 0 in state.missing
    with pytest.raises(IntegrityError, match="verify --repair"):
        seal(store, state)


def flipped(data: bytes, needle: bytes) -> bytes:
    """The data with one bit of the needle's second number flipped."""
    at = data.index(needle) + 8
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_damaged_index_is_found_and_written_anew(tmp_path) -> None:
    store = LocalStore(tmp_path)
    write_run(store)
    sealed = {key: store.read(key) for key in (names.MANIFEST, names.ROWS)}
    offsets = HiddenStates(tmp_path).offsets.tobytes()
    harms = {
        "is not what the plan": (names.ROWS, flipped(sealed[names.ROWS], offsets)),
        "rows.parquet cannot be read": (names.ROWS, sealed[names.ROWS][:100]),
        "manifest.json is not": (names.MANIFEST, sealed[names.MANIFEST].replace(b"-", b"_", 1)),
        "manifest.json: not JSON": (names.MANIFEST, sealed[names.MANIFEST][:100]),
    }  # fmt: skip
    for says, (key, data) in harms.items():
        store.write(key, [data])
        found = CliRunner().invoke(app, ["verify", str(tmp_path), "--full", "--repair"])
        assert found.exit_code == 1
        assert says in found.output
        assert {key: store.read(key) for key in sealed} == sealed
    assert verify(store, full=True).ok


@pytest.mark.parametrize("harm", ["bytes", "rows"])
def test_ids_of_other_rows_are_not_sealed(store, harm) -> None:
    good = store.read(names.TOKEN_ROWS)
    if harm == "bytes":
        store.write(names.TOKEN_ROWS, [good[:-20]])
    else:
        table = pq.read_table(io.BytesIO(good))
        pq.write_table(table.slice(1), buffer := io.BytesIO())
        store.write(names.TOKEN_ROWS, [buffer.getvalue()])
    store.delete(names.MANIFEST)
    with pytest.raises(IntegrityError, match=r"tokens/rows\.parquet.*ids"):
        seal(store)


@pytest.mark.parametrize("change", [{"samples": 4}, {"shard": None, "samples": 0}])
def test_a_record_that_does_not_account_for_its_rows_is_damaged(store, change) -> None:
    record = read_record(store, read_run(store), RangeId(2))
    store.write(names.record(RangeId(2)), [to_json(replace(record, **change))])
    found = verify(store, full=True)
    assert list(found.damaged) == [2]
    assert "recorded, of the plan's 5" in found.damaged[RangeId(2)]


def test_a_record_of_a_newer_swathe_is_not_taken_for_damage(tmp_path) -> None:
    store = LocalStore(tmp_path)
    write_run(store)
    key = names.record(RangeId(1))
    newer = store.read(key).replace(b'"format_version": 1', b'"format_version": 2')
    store.write(key, [newer])
    found = CliRunner().invoke(app, ["verify", str(tmp_path), "--repair"])
    assert isinstance(found.exception, NewerFormatError)
    assert "upgrade swathe" in str(found.exception)
    assert store.read(key) == newer
