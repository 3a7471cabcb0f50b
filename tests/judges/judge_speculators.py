"""speculators' own ArrowDataset, transfers, collate function and loader, on an export and on the adapter."""

import sys
import warnings
from pathlib import Path

import torch
from common import Verdict, norm_of
from hs_connectors import FileTransfer, FP8Transfer
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from swathe.adapters import Speculators


def main() -> None:
    warnings.simplefilter("error")  # speculators warns and drops a sample where it should stop
    export = Path(sys.argv[1])
    verdict = Verdict(export)
    truth, fp8 = verdict.truth, verdict.marker["options"]["fp8"]
    transfer = (FP8Transfer if fp8 else FileTransfer)(export / "hidden_states")
    data = ArrowDataset(max_len=4096, datapath=str(export), transfer=transfer, on_missing="raise")
    adapter = Speculators(verdict.run)
    norm = norm_of(truth)
    hidden, counts = len(truth["norm"]), {}
    for index, sample in enumerate(truth["samples"]):
        item = data[index]
        verdict.same("ids", item["input_ids"], sample["input_ids"])
        verdict.same("mask", item["loss_mask"], sample["loss_mask"])
        before = sample["before_norm"].bfloat16()
        if fp8:
            verdict.close_to("final state", item["verifier_last_hidden_states"], before, 0.1)
        else:
            verdict.aux(sample, item["hidden_states"], 0)
            verdict.same("final state", item["verifier_last_hidden_states"], before)
            verdict.logits(sample, norm(item["verifier_last_hidden_states"]))
            verdict.same_item("adapter", adapter[index], item)
        for token in sample["input_ids"][sample["loss_mask"].bool()].tolist():
            counts[token] = counts.get(token, 0) + 1
    found = torch.load(export / "token_freq.pt", weights_only=True)
    verdict.same_item("token_freq", found, counts)
    build_vocab_mappings_from_distribution(found, 32, truth["head"].shape[0])
    for source in (data, adapter):
        collate = CollateFn(256, hidden, len(verdict.ids), preprocess=shift_batch)
        batch = collate([source[0], source[1], source[2]])
        verdict.same("lost samples", torch.tensor(batch["error_records"]), torch.tensor(0))
    verdict.same("lengths", torch.tensor(adapter.approx_lengths), torch.tensor(data.approx_lengths))
    verdict.close()


if __name__ == "__main__":
    main()
