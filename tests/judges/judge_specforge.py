"""SpecForge's own offline reader, feature store, normalizers and collators, on an export and on the adapter."""

import importlib
import sys
from pathlib import Path

from common import Verdict
from specforge.runtime.data_plane.feature_store import LocalFeatureStore

from swathe.adapters import SpecForge


def main() -> None:
    export = Path(sys.argv[1])
    verdict = Verdict(export)
    algorithm = verdict.marker["options"]["algorithm"]
    module = importlib.import_module(f"specforge.algorithms.{algorithm}.providers")
    (offline,) = module.algorithm_providers().offline
    reader = offline.build_reader(str(export), run_id="judge", ttt_length=7, max_len=4096)
    reader.validate_files = True
    normalize, collate = offline.build_normalizer(4096), offline.build_collator()
    store = LocalFeatureStore()
    adapter = SpecForge(verdict.run, algorithm=algorithm)
    items = {}
    for ref in reader.read():
        raw, _ = store.get(ref, names=list(ref.feature_keys))
        place = int(Path(ref.feature_store_uri).name.split(".")[0].removeprefix("data_"))
        items[place] = normalize(raw)
    for index, member in enumerate(adapter.members):
        sample, item = verdict.truth["samples"][member], items[index]
        mask = sample["loss_mask"].clone()
        if algorithm == "eagle3":
            mask[-1] = 0
        verdict.same("ids", item["input_ids"][0], sample["input_ids"])
        verdict.same("mask", item["loss_mask"][0], mask)
        name, target = {
            "eagle3": ("hidden_state", "target"),
            "dspark": ("hidden_states", "target_last_hidden_states"),
        }.get(algorithm, ("hidden_states", None))
        verdict.aux(sample, item[name][0], 1)
        if target:
            verdict.same("final state", item[target][0], sample["hidden_states"][-1].bfloat16())
            verdict.logits(sample, item[target][0])
        verdict.same_item("adapter", adapter[index], item)
    for source in (items, adapter):
        batch = collate([source[0], source[1], source[2]])
        verdict.same("batch", batch["input_ids"][0, :3], items[0]["input_ids"][0, :3])
    verdict.close()


if __name__ == "__main__":
    main()
