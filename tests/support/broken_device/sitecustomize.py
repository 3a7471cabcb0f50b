"""Put this folder on PYTHONPATH: every worker's device then fails for good at a sample that ends with three times 90.

An index out of bounds inside a kernel is what a wrong kernel does: the context answers nothing but the same error. A CPU
has no context, so there the error's text alone is raised.
"""

import sys

if any("worker.cli" in argument for argument in sys.orig_argv):
    import torch

    from worker.model.hidden_states import HiddenStateModel

    _forward, _reference = HiddenStateModel.forward, HiddenStateModel.reference

    def _break(ids):
        if len(ids) >= 3 and all(int(each) == 90 for each in ids[-3:]):
            if not torch.cuda.is_available():
                raise RuntimeError("CUDA error: device-side assert triggered")
            values = torch.zeros(8, device="cuda")
            values[torch.full((4,), 1_000, device="cuda")] += 1

    def _bad_forward(self, batch, ids):
        for sample in ids:
            _break(sample)
        return _forward(self, batch, ids)

    def _bad_reference(self, ids):
        _break(ids)
        return _reference(self, ids)

    HiddenStateModel.forward, HiddenStateModel.reference = _bad_forward, _bad_reference
