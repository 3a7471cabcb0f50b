"""Hub ids through the hub's own client: its real cache layout, and a stand-in for its server on loopback.

The client reads its environment when it is imported, so each look at a data set is a process of its own.
"""

import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swathe.dataset import open_dataset
from swathe.dataset.choice import choose
from swathe.errors import PlanError
from tests.support import hub_server

MAIN, OLD = "1" * 40, "2" * 40
LOOK = """
import json, sys
from swathe.dataset import Limits, open_dataset, read_samples
from swathe.errors import PlanError
try:
    found = open_dataset(sys.argv[1], split=json.loads(sys.argv[2]))
except PlanError as error:
    print(json.dumps({"error": str(error)}))
else:
    steps = read_samples(found, Limits(vocab_rows=100))
    ids = [token for step in steps for token in step.block.input_ids.tolist()]
    names = [file.name for file in found.files]
    print(json.dumps({"location": found.location, "names": names, "ids": ids}))
"""
CARD = b"""---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: held_out
    path:
    - data/test-*
- config_name: small
  data_files:
  - split: train
    path: small/**
---
# A data set
"""


def table(*tokens):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"input_ids": [[token] for token in tokens]}), buffer)
    return buffer.getvalue()


FILES = {
    "README.md": CARD,
    "data/train-00000-of-00002.parquet": table(1, 2),
    "data/train-00001-of-00002.parquet": table(3),
    "data/test-00000-of-00001.parquet": table(9),
    "small/deep/part.parquet": table(5),
    "loader.py": b"raise SystemExit('never run')",
}


def look(home, location, split=None, **environment):
    """What a fresh process finds under a location."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, location, json.dumps(split)],
        env=kept | {"HF_HOME": str(home), "NO_PROXY": "127.0.0.1"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def cached(home, files, *, commit=MAIN, refs=("main",)):
    """A cache as the hub's client leaves it: blobs, links to them by commit, refs."""
    root = home / "hub" / "datasets--org--name"
    for name, data in files.items():
        blob = root / "blobs" / str(abs(hash(data)))
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = root / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / ref).write_text(commit)


def test_a_cached_data_set_is_read_offline_and_its_commit_is_named(tmp_path):
    cached(tmp_path, FILES)
    offline = {"HF_HUB_OFFLINE": "1"}
    found = look(tmp_path, "org/name", "train", **offline)
    assert found == {
        "location": f"hf://datasets/org/name@{MAIN}",
        "names": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        "ids": [1, 2, 3],
    }
    assert look(tmp_path, f"org/name@{MAIN}", "held_out", **offline)["ids"] == [9]
    assert look(tmp_path, found["location"], "small/train", **offline)["ids"] == [5]
    several = look(tmp_path, "org/name", **offline)["error"]
    assert "choose one with --split: default/train, default/held_out, small/train" in several
    assert "no split nope" in look(tmp_path, "org/name", "nope", **offline)["error"]


def test_what_is_not_cached_is_one_clear_line_offline(tmp_path):
    cached(tmp_path, FILES)
    for location in ("org/other", "org/name@v2"):
        error = look(tmp_path, location, HF_HUB_OFFLINE="1")["error"]
        assert error.startswith(f"data set {location}: no such file or folder here")
        assert "hf download org/" in error
        assert "\n" not in error


def test_a_split_is_downloaded_once_and_read_offline_afterwards(tmp_path):
    with hub_server.running("org/name", {"main": MAIN, MAIN: MAIN}, FILES) as hub:
        online = {"HF_ENDPOINT": hub.endpoint_url}
        found = look(tmp_path, "org/name", "train", **online)
        assert found["ids"] == [1, 2, 3]
        assert found["location"] == f"hf://datasets/org/name@{MAIN}"
        assert sorted(hub.sent) == sorted(["README.md", *found["names"]])
        assert look(tmp_path, "org/name", "train", **online) == found
        assert len(hub.sent) == 3
        error = look(tmp_path, "org/none", **online)["error"]
        assert "not to be had from the hub" in error
    assert look(tmp_path, "org/name", "train", HF_HUB_OFFLINE="1") == found
    absent = look(tmp_path, "org/name", "small/train", HF_HUB_OFFLINE="1")["error"]
    assert "small" in absent


def test_a_revision_is_the_one_asked_for(tmp_path):
    revisions = {"main": MAIN, "v1": OLD, OLD: OLD}
    files = {"train.jsonl": b'{"input_ids": [4]}\n'}
    with hub_server.running("org/name", revisions, files) as hub:
        found = look(tmp_path, "org/name@v1", HF_ENDPOINT=hub.endpoint_url)
    assert (found["location"], found["ids"]) == (f"hf://datasets/org/name@{OLD}", [4])


def test_an_interrupted_download_is_not_read_as_the_whole(tmp_path):
    names = [f"train-{number}.jsonl" for number in range(3)]
    files = dict.fromkeys(names, b'{"input_ids": [4]}\n')
    with hub_server.running("org/name", {"main": MAIN, MAIN: MAIN}, files) as hub:
        look(tmp_path, "org/name", HF_ENDPOINT=hub.endpoint_url)
    snapshot = tmp_path / "hub" / "datasets--org--name" / "snapshots" / MAIN
    (snapshot / names[1]).unlink()
    for split in (None, "train"):
        error = look(tmp_path, "org/name", split, HF_HUB_OFFLINE="1")["error"]
        assert "incomplete" in error
        assert names[1] in error


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", ["train-0.parquet", "x/train/1.parquet", "x_train.parquet"]),
        ("validation", ["dev.parquet", "valid-00.parquet"]),
        ("test", ["a.test.parquet"]),
        ("latest", ["latest.parquet"]),
        (None, None),
    ],
)
def test_without_a_readme_a_split_is_a_word_of_a_path(split, expected):
    names = [
        "x/train/1.parquet", "train-0.parquet", "x_train.parquet", "strain.parquet", "trainer.parquet",
        "dev.parquet", "valid-00.parquet", "a.test.parquet", "latest.parquet",
    ]  # fmt: skip
    if expected is None:
        with pytest.raises(PlanError, match="holds the splits test, train, validation; choose"):
            choose(names, location="d", split=None, card="", ask=True)
    else:
        chosen = choose(names, location="d", split=split, card="", ask=True)
        assert list(chosen.names) == sorted(expected)


@pytest.mark.parametrize(
    "card", ["prose", "---\n: [\n---\n", "---\nconfigs: 7\n---\n", "---\n---\n"]
)
def test_a_readme_of_another_sense_names_no_splits(card):
    chosen = choose(["a/train.jsonl"], location="d", split="train", card=card, ask=True)
    assert chosen.names == ("a/train.jsonl",)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("data_files: '*.jsonl'", ["0.jsonl"]),
        ("data_files: ['a/?.jsonl', '[0-3].jsonl']", ["0.jsonl", "a/1.jsonl"]),
        ("data_dir: a", ["a/1.jsonl", "a/b/2.jsonl"]),
        ("data_files: [{split: train, path: '**/2.jsonl'}]", ["a/b/2.jsonl"]),
    ],
)
def test_patterns_of_a_readme_mean_what_they_mean_on_the_hub(files, expected):
    card = f"---\nconfigs:\n- config_name: x\n  {files}\n---\n"
    names = ["0.jsonl", "a/1.jsonl", "a/b/2.jsonl"]
    chosen = choose(names, location="d", split=None, card=card, ask=True)
    assert list(chosen.names) == expected


def test_a_local_folder_has_splits_when_asked_for_one(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert len(open_dataset(tmp_path).files) == 4
    assert [file.name for file in open_dataset(tmp_path, split="held_out").files] == [
        "data/test-00000-of-00001.parquet"
    ]
    with pytest.raises(PlanError, match="is one whole without splits"):
        open_dataset(tmp_path / "small" / "deep" / "part.parquet", split="train")


def test_a_split_of_a_saved_dictionary_is_chosen(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = {s: datasets.Dataset.from_dict({"input_ids": [[n]]}) for n, s in enumerate(("a", "b"))}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "d"))
    found = open_dataset(tmp_path / "d", split="b")
    assert found.location == str(tmp_path / "d" / "b")
    with pytest.raises(PlanError, match="holds the splits a, b; choose one with --split"):
        open_dataset(tmp_path / "d", split="c")
    with pytest.raises(PlanError, match="is one whole without splits"):
        open_dataset(tmp_path / "d" / "a", split="a")
