"""From a range that kills its processes to the guilty samples: the order of trials, and real processes that die."""

import json
import sys

import pytest

from swathe.errors import ModelError, PoisonRangeError, StoreError, WorkerError
from swathe.spec import RangeId, RangeJob, RunId
from worker.extraction.isolation import Isolation, Outcome, Trials

JOB = RangeJob(run_url="/runs/a", run_id=RunId("run1"), fingerprint="f", range_id=RangeId(3))


class Samples:
    """Processes over rows 0 to 9; ``kills`` die of a row always, ``in_company`` only after another one."""

    def __init__(self, *, kills=(), in_company=(), end=None):
        self.kills, self.in_company, self.end = kills, in_company, end
        self.trials = []

    def __call__(self, _job, guilty=(), only=None):
        left_out = [each.row for each in guilty]
        self.trials.append(only if only is not None else tuple(left_out))
        if self.end is not None:
            return Outcome(end=self.end, row=None, text="said so")
        rows = [only] if only is not None else [row for row in range(10) if row not in left_out]
        for row in rows:
            if row in self.kills or (row in self.in_company and only is None):
                return Outcome(end="died", row=row, text="ended by signal 11 (SIGSEGV)")
        return Outcome(end="done", row=rows[-1])


def test_each_guilty_sample_costs_two_processes():
    samples = Samples(kills={2, 7})
    isolation = Isolation(samples)
    isolation.resolve(JOB)
    assert samples.trials == [(), 2, (2,), 7, (2, 7)]
    assert [(each.row, each.reason) for each in isolation.guilty] == [
        (row, "the process ended by signal 11 (SIGSEGV), alone on the reference path")
        for row in (2, 7)
    ]


def test_a_range_that_kills_nobody_sample_by_sample_is_just_stored():
    samples = Samples()
    Isolation(samples).resolve(JOB)
    assert samples.trials == [()]


@pytest.mark.parametrize("kills", [{"in_company": {4}}, {"kills": set(range(10))}])
def test_what_cannot_be_resolved_ends_with_its_history(kills):
    samples = Samples(**kills)
    with pytest.raises(PoisonRangeError) as caught:
        Isolation(samples).resolve(JOB)
    assert len(samples.trials) <= 20
    assert len(caught.value.history) >= 3
    assert "SIGSEGV" in caught.value.history[0]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("infrastructure", StoreError),
        ("mismatch", ModelError),
        ("range", PoisonRangeError),
        ("died", WorkerError),  # before its first sample: nobody is guilty
    ],
)
def test_other_ends_accuse_no_sample(end, error):
    samples = Samples(end=end)
    with pytest.raises(error):
        Isolation(samples).resolve(JOB)
    assert samples.trials == [()]


def trials(body, **options):
    script = f"import json, os, signal, sys, time\ntrial, events, parent = sys.argv[1:]\ntell = lambda **e: os.write(int(events), json.dumps(e).encode() + b'\\n')\n{body}"
    return Trials([sys.executable, "-c", script], worker="w1", device="cpu", **options)


def test_a_process_tells_its_rows_and_the_one_in_hand_is_known_when_it_dies():
    moved = []
    outcome = trials(
        "tell(row=4)\ntell(row=5)\nos.kill(os.getpid(), signal.SIGSEGV)",
        on_progress=lambda: moved.append(1),
    )(JOB)
    assert outcome == Outcome(end="died", row=5, text="ended by signal 11 (SIGSEGV)")
    assert moved


def test_a_process_ends_well_or_says_why_not():
    assert trials("tell(row=4)\ntell(end='done')")(JOB).end == "done"
    outcome = trials("tell(end='infrastructure', text='store away')\nsys.exit(1)")(JOB)
    assert (outcome.end, outcome.row, outcome.text) == ("infrastructure", None, "store away")
    assert trials("sys.exit(3)")(JOB) == Outcome(end="died", text="ended by exit status 3")


def test_a_process_is_told_its_trial(tmp_path):
    file = tmp_path / "trial"
    trials(f"open({str(file)!r}, 'w').write(trial)\ntell(end='done')")(JOB, only=7)
    said = json.loads(file.read_text())
    assert (said["only"], said["worker"], said["job"]["range_id"]) == (7, "w1", 3)


def test_a_process_that_does_not_move_is_killed():
    outcome = trials("tell(row=4)\ntime.sleep(600)", load_limit_s=60, sample_limit_s=1)(JOB)
    assert (outcome.end, outcome.row) == ("died", 4)
    outcome = trials("time.sleep(600)", load_limit_s=1, sample_limit_s=60)(JOB)
    assert (outcome.end, outcome.row) == ("died", None)
