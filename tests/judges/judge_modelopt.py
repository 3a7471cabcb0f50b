"""ModelOpt's own OfflineSupervisedDataset and collator, on an export and on the adapter."""

import sys
from pathlib import Path

from common import Verdict
from modelopt.torch.speculative.eagle.utils import (
    EagleOfflineDataCollator,
    OfflineSupervisedDataset,
)

from swathe.adapters import ModelOpt


def main() -> None:
    export = Path(sys.argv[1])
    verdict = Verdict(export)
    files = [str(path) for path in export.glob("**/*.pt")]
    files.sort(key=lambda path: int(Path(path).stem.removeprefix("data_")))
    for answers in (False, True):
        data = OfflineSupervisedDataset(files, answer_only_loss=answers)
        adapter = ModelOpt(verdict.run, answer_only_loss=answers)
        for index, sample in enumerate(verdict.truth["samples"]):
            item = data[index]
            after = sample["hidden_states"][-1].bfloat16()
            verdict.same("ids", item["input_ids"], sample["input_ids"])
            if answers:
                verdict.same("mask", item["loss_mask"], sample["loss_mask"])
            verdict.aux(sample, item["aux_hidden_states"], 1)
            verdict.same("final state", item["base_model_hidden_states"], after)
            if item["base_hidden_prenorm"]:
                verdict.same("flag", item["input_ids"], -item["input_ids"])
            verdict.logits(sample, item["base_model_hidden_states"])
            verdict.same_item("adapter", adapter[index], item)
        for source in (data, adapter):
            batch = EagleOfflineDataCollator(64)([source[0], source[1], source[2]])
            found = batch["base_model_outputs"]["base_model_hidden_states"]
            verdict.same("batch", found[0, :3], data[0]["base_model_hidden_states"][:3])
    verdict.close()


if __name__ == "__main__":
    main()
