"""What ``swathe plan`` prints: counts, rejected rows by reason, and a picture of the lengths."""

import json

import pytest
from typer.testing import CliRunner

from producer.cli import app
from swathe.errors import ConfigError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "dtype": "bfloat16",
}


@pytest.fixture
def swathe(tmp_path):
    """Plans 60 rows of 1, 5 and 40 tokens, half of the longest without any supervision."""
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    rows = [{"input_ids": [1] * n, "loss_mask": [0, 1] * (n // 2) + [1] * (n % 2)}
            for n in [1] * 10 + [5] * 30 + [40] * 20]  # fmt: skip
    for row in rows[40:50]:
        row["loss_mask"] = [1] + [0] * 39
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*options):
        arguments = [
            "plan",
            str(tmp_path / "d.jsonl"),
            "--model",
            f"random:{tmp_path / 'tiny.json'}",
        ]
        arguments += ["--final", "--out", str(tmp_path / "run"), *options]
        return CliRunner().invoke(app, arguments)

    return run


def test_a_plan_says_what_it_rejected_and_draws_the_lengths(swathe):
    done = swathe("--min-length", "3", "--min-supervised", "10%")
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.output.splitlines()]
    assert "rows     60: 40 samples, 20 rejected" in lines
    assert "rejected       10  too short (N tokens, N wanted)" in lines
    assert "rejected       10  too few supervised tokens (N, N wanted)" in lines
    picture = [
        line.split() for line in lines if " to " in line and "tokens" in line and "█" in line
    ]
    assert picture == [
        ["4", "to", "7", "tokens", "30", "█" * 40],
        ["32", "to", "63", "tokens", "10", "█" * 14],
    ]


def test_the_same_as_json_and_in_the_run(swathe, tmp_path):
    done = swathe("--min-length", "3", "--min-supervised", "0.1", "--json")
    report = json.loads(done.output)
    assert report["rejected"] == {
        "too short (N tokens, N wanted)": 10,
        "too few supervised tokens (N, N wanted)": 10,
    }
    assert report["length_histogram"] == [[4, 7, 30], [8, 15, 0], [16, 31, 0], [32, 63, 10]]
    policies = json.loads((tmp_path / "run" / "run.json").read_text())["policies"]
    found = [policies[name] for name in ("min_length", "min_supervised", "min_supervised_ratio")]
    assert found == [3, 1, 0.1]
    rejected = [
        json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_bytes().splitlines()
    ]
    assert rejected[-1] == {
        "row": 49, "id": 49, "reason": "too few supervised tokens (1, 4 wanted)",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "stays"),
    [("0", 60), ("1", 60), ("2", 40), ("20", 10), ("1.0", 10), ("50%", 50), ("0.51", 40)],
)
def test_the_least_supervision_is_a_number_or_a_share(swathe, text, stays):
    done = swathe("--min-supervised", text, "--json")
    assert json.loads(done.output)["totals"]["samples"] == stays


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "200%", "nan%", ""])
def test_a_least_supervision_that_makes_no_sense_is_refused(swathe, text):
    done = swathe("--min-supervised", text)
    assert isinstance(done.exception, ConfigError)
