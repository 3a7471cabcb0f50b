"""`swathe run` as a user runs it: real processes, a real server, a real (tiny) model, real kills."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Command, assert_states_are_right, run_arguments, status


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for a condition; a process that ends before it is met has failed."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if condition():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)
    pytest.fail("it did not come")


def wait_for_records(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: len(list(out.glob("states/[0-9]*[0-9].json"))) >= count, process)


def test_run_ends_complete_and_right_and_a_second_run_does_nothing(
    swathe: Command, dataset: Path, model: Path, finished: tuple[Path, str]
) -> None:
    out, text = finished
    assert "relative error" in text
    assert "HiddenStates" in text
    assert_states_are_right(out, dataset, model)

    found = status(swathe, out)
    assert found["complete"]
    assert found["sealed"]
    assert (found["stored"], found["rejected"], found["quarantined"], found["rows"]) == (
        398,
        2,
        0,
        400,
    )
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(item["row"], item["id"]) for item in rejected] == [(7, "chat-7"), (11, "chat-11")]
    assert all(item["reason"] for item in rejected)

    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    swathe(*run_arguments(dataset, model, out))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == times
    assert json.loads(swathe("verify", out, "--full", "--json"))["damaged"] == {}


def test_killed_as_a_whole_it_resumes_and_every_sample_is_there_once(
    swathe: Command, dataset: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = swathe.popen(*run_arguments(dataset, model, out))
    wait_for_records(out, 5, process)
    process.kill()  # only the parent: server and workers must die by themselves
    process.communicate()
    deadline = time.monotonic() + 30
    while survivors(out):
        assert time.monotonic() < deadline, survivors(out)
        time.sleep(0.05)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("states/*.json")}
    assert len(before) < 125, "the run ended before it was killed: the test shows nothing"
    assert not (out / "manifest.json").exists()

    swathe(*run_arguments(dataset, model, out))
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("states/*.json")}
    assert {name: after[name] for name in before} == before, "finished ranges were computed again"
    assert_states_are_right(out, dataset, model)
    assert status(swathe, out)["stored"] == 398


def test_interrupted_it_stops_in_order_and_resumes(
    swathe: Command, dataset: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = swathe.popen(*run_arguments(dataset, model, out))
    wait_for_records(out, 3, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "resume" in err
    assert not survivors(out)
    swathe(*run_arguments(dataset, model, out))
    assert status(swathe, out)["complete"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--layers", "0,9"], "9"),
        (["--layers", "0,3", "--final"], "final"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--columns", "input_ids=tokens"], "tokens"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line_and_leaves_nothing(
    swathe: Command, dataset: Path, model: Path, tmp_path: Path, change: list[str], says: str
) -> None:
    out = tmp_path / "run"
    text = swathe(*run_arguments(dataset, model, out), *change, code=2)
    assert says in text
    assert "Traceback" not in text
    assert not out.exists()


def test_a_folder_of_another_run_is_refused_and_kept(
    swathe: Command, dataset: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    plan = ["plan", *run_arguments(dataset, model, out)[1:-2]]
    swathe(*plan)
    before = (out / "run.json").read_bytes()
    text = swathe(*plan, "--layers", "1", code=2)
    assert "layers" in text
    assert (out / "run.json").read_bytes() == before


def survivors(out: Path | str) -> list[str]:
    """Processes that still name this run's folder or its state, in their command line or environment."""
    return list(_survivors(str(out)))


def _survivors(needle: str) -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue  # gone, or not ours
        if int(folder.name) != os.getpid() and f"SWATHE_STORE_ROOTS={needle}".encode() in text:
            yield text.replace(b"\0", b" ")[:200].decode(errors="replace")


def test_a_rehearsal_with_random_weights_ends_well(
    swathe: Command, dataset: Path, model: Path, tmp_path: Path
) -> None:
    """There is no checkpoint to compare its states with; once that was a traceback and "do not train on them"."""
    source = f"random:{model / 'config.json'}"
    text = swathe(*run_arguments(dataset, source, tmp_path / "run"), "--limit", "20")
    assert "no checkpoint to compare" in text
