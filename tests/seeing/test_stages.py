"""Which stage limits a worker."""

import pytest

from swathe.stages import LIMITS, STATES, WORDS, Spent, limiting, shares


@pytest.mark.parametrize(
    ("states", "stages", "limit"),
    [
        ({}, {}, None),
        ({"compute": 0.0}, {}, None),
        ({"compute": 50, "input": 10}, {"forward": 49, "copy": 5}, "compute"),
        ({"compute": 50, "input": 10}, {"forward": 20, "copy": 45}, "copy"),
        ({"compute": 20, "input": 40}, {"forward": 20, "copy": 45}, "input"),
        ({"compute": 20, "write": 30, "input": 10}, {"forward": 18}, "write"),
        ({"queue_empty": 59, "compute": 1}, {"forward": 1}, "queue_empty"),
        ({"space": 30, "compute": 20}, {"forward": 20}, "space"),
        ({"load": 30, "store_away": 31}, {}, "store_away"),
    ],
)
def test_the_largest_share_of_the_clock_limits(states, stages, limit):
    assert limiting(Spent(states=states, stages=stages)) == limit


def test_shares_add_up_to_one():
    found = shares(Spent(states={"compute": 3, "input": 1}, stages={"copy": 9}))
    assert found == {"copy": 0.75, "input": 0.25}


def test_a_worker_started_anew_counts_whole_and_workers_add_up():
    earlier = Spent(states={"compute": 100.0, "input": 5.0})
    grown = Spent(states={"compute": 7.0, "input": 6.0}).since(earlier)
    assert grown.states == {"compute": 7.0, "input": 1.0}
    assert Spent.of([grown, grown]).states == {"compute": 14.0, "input": 2.0}


def test_every_limit_has_words_and_every_state_is_a_limit():
    assert set(WORDS) == set(LIMITS) == {*STATES, "copy"}
