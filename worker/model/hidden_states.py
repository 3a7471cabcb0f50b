"""The frozen model as the engine sees it: batches of ids in, states of the wanted layers out.

Padded batches are right padded and run without any mask: in a causal model a token never sees what stands to its
right, which holds for sliding windows, sinks, convolutions, recurrences and expert routing too. A mask would force a
``B x 1 x L x L`` tensor and slower kernels; a mask derived from the pad id would be wrong, as real text may hold it.
Packed batches are one row whose samples are kept apart by ``worker.model.kernels.packing``.

Shapes: T real tokens, K slots, H hidden size, B rows, L tokens of a row, S tokens of one sample.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from swathe.errors import ModelError
from swathe.spec import ComputeDtype, Layer
from worker.model.backbone import Backbone, load_backbone, load_text_config
from worker.model.batch import Batch
from worker.model.capture import Capture, block_indices
from worker.model.flops import count_flops
from worker.model.kernels.choice import Kernels, KernelSet, Mode
from worker.model.kernels.packing import Boundaries, chunk_places, packed_row
from worker.model.norm import FinalNorm, final_norm_module, read_final_norm
from worker.model.upcast import upcast

Ids = NDArray[np.integer[Any]]


def load_model(
    checkpoint: str | Path,
    *,
    layers: Sequence[Layer],
    dtype: ComputeDtype,
    device: torch.device,
    kernels: Kernels = "auto",
    trust_remote_code: bool = False,
) -> "HiddenStateModel":
    """Load what the wanted layers need of a checkpoint folder, or of ``random:CONFIG.json`` with random weights.

    Raises ModelError for layers that do not exist and for checkpoints that do not load completely.
    """
    config = load_text_config(checkpoint, trust_remote_code=trust_remote_code)
    depth = max(block_indices(layers, int(config.num_hidden_layers))) + 1
    backbone = load_backbone(
        checkpoint, depth=depth, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    return HiddenStateModel(backbone, layers=layers, kernels=kernels)


def _rope(config: Any, kind: str) -> list[dict[str, Any]]:
    """The rotary parameters of a kind, which may differ by type of layer; empty where the model has none."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return [part for part in parts if part.get("rope_type") == kind]


class HiddenStateModel:
    """A frozen model on one device. Not safe for use by several threads at once."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        layers: Sequence[Layer],
        kernels: Kernels = "auto",
        fuse: bool | None = None,
    ) -> None:
        """``fuse`` decides over fusions on any device; unset: as ``kernels`` says, on a GPU only."""
        self.layers = tuple(layers)
        self.load_s = backbone.load_s
        self.peak_host_bytes = backbone.peak_host_bytes
        self.num_layers = backbone.num_layers
        self.config = backbone.config
        self.hidden_size = int(backbone.config.hidden_size)
        self._module: Any = backbone.module
        self._capture = Capture(backbone.blocks, block_indices(layers, backbone.num_layers))
        self._upcast = (*backbone.blocks, final_norm_module(backbone.module))
        self._embedding: nn.Embedding = backbone.module.get_input_embeddings()
        self._flops = count_flops(backbone.blocks, backbone.config)
        self._kernels = KernelSet(
            backbone.module, backbone.blocks, kernels=kernels, device=self.device, fuse=fuse
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights and the states are made of."""
        return self._embedding.weight.dtype

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding table; an id must be smaller."""
        return self._embedding.num_embeddings

    @property
    def max_positions(self) -> int | None:
        """Longest sample that the positions allow: as many as were learned; None where they are computed.

        Dynamic NTK computes them by the longest sample so far, once one is longer than the model is made for.
        """
        limit: int | None = getattr(self.config, "max_position_embeddings", None)
        if _rope(self.config, "dynamic"):
            return limit
        for module in self._module.children():
            if isinstance(module, nn.Embedding) and module is not self._embedding:
                return module.num_embeddings if module.num_embeddings == limit else None
        return None

    @property
    def length_limits(self) -> tuple[int, ...]:
        """Lengths that share no batch with longer ones: LongRoPE turns a whole batch by its longest sample."""
        found = {
            int(rope["original_max_position_embeddings"]) for rope in _rope(self.config, "longrope")
        }
        return tuple(sorted(found))

    @property
    def kernels(self) -> dict[str, str]:
        """Which implementation is bound for each operation."""
        return dict(self._kernels.names)

    @property
    def can_pack(self) -> bool:
        """Whether packed batches are proven for this architecture and its fast kernels are wanted."""
        return self._kernels.can_pack

    def forward(self, batch: Batch, ids: Sequence[Ids]) -> torch.Tensor:
        """States ``[T, K, H]`` of the batch's samples end to end, in the batch's order, on the device.

        ``ids[i]`` are the ids of ``batch.samples[i]``. On a GPU the call returns before the work is done.
        """
        if tuple(len(sample) for sample in ids) != batch.lengths:
            msg = f"ids of lengths {[len(sample) for sample in ids]} are not the batch's {batch.lengths}"
            raise ValueError(msg)
        if batch.form == "packed":
            return self._forward_packed(batch, ids)
        return self._forward_padded(batch, ids)

    def reference(self, ids: Ids) -> torch.Tensor:
        """States ``[S, K, H]`` of one sample alone, unpadded, through the stock implementation."""
        ids_BL = self._to_device(np.asarray(ids, np.int64)[None])
        return self._run(ids_BL, len(ids), mode="stock")

    def exact(self, ids: Ids) -> torch.Tensor:
        """States ``[S, K, H]`` of one sample in float32, through the stock implementation, one block at a time.

        Only one block's weights are held in float32 at once, so this fits beside the model; meant for a few
        thousand tokens.
        """
        with torch.inference_mode(), upcast(self._upcast):
            ids_BL = self._to_device(np.asarray(ids, np.int64)[None])
            embedded_BLH = self._embedding(ids_BL).float()
            return self._run(
                None, len(ids), mode="stock", dtype=torch.float32, inputs_embeds=embedded_BLH
            )

    def fall_back(self, to: Literal["padded", "reference"]) -> None:
        """Stop packing, or stop using any fast kernel, for good: the self-test found them wrong on this device."""
        self._kernels.fall_back(to)

    def flops(self, lengths: Sequence[int]) -> float:
        """Operations that samples of these lengths cost; see ``worker.model.flops``."""
        return self._flops.of(lengths)

    def final_norm(self) -> FinalNorm:
        """The norm that follows the last block; it is loaded even when only the first blocks are."""
        return read_final_norm(self._module)

    def _forward_padded(self, batch: Batch, ids: Sequence[Ids]) -> torch.Tensor:
        width = max(batch.lengths)
        ids_BL = np.zeros((len(ids), width), np.int64)
        for row, sample in enumerate(ids):
            ids_BL[row, : len(sample)] = sample
        tokens_T = None
        if batch.padding_tokens:
            places = [
                row * width + np.arange(length, dtype=np.int64)
                for row, length in enumerate(batch.lengths)
            ]
            tokens_T = self._to_device(np.concatenate(places))
        return self._run(
            self._to_device(ids_BL), batch.real_tokens, mode="padded", tokens_T=tokens_T
        )

    def _forward_packed(self, batch: Batch, ids: Sequence[Ids]) -> torch.Tensor:
        if not self.can_pack:
            msg = f"{self.config.model_type} does not pack (architecture, or kernels set to reference)"
            raise ModelError(msg)
        filler = [np.zeros(batch.filler_tokens, np.int64)] if batch.filler_tokens else []
        parts = [*(np.asarray(sample, np.int64) for sample in ids), *filler]
        lengths = [len(part) for part in parts]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        positions_L = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
        boundaries = Boundaries(
            offsets=tuple(offsets.tolist()),
            cu_seqlens=self._to_device(offsets.astype(np.int32)),
            chunks=self._to_device(chunk_places(lengths)),
        )
        with packed_row(boundaries, mixers=self._kernels.mixers):
            return self._run(
                self._to_device(np.concatenate(parts)[None]),
                batch.real_tokens,
                mode="packed",
                position_ids=self._to_device(positions_L[None]),
            )

    def _run(
        self,
        ids_BL: torch.Tensor | None,
        tokens: int,
        *,
        mode: Mode,
        dtype: torch.dtype | None = None,
        tokens_T: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        shape = (tokens, len(self.layers), self.hidden_size)
        with torch.inference_mode(), self._kernels.use(mode):
            out_TKH = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
            with self._capture.into(out_TKH, tokens_T):
                self._module(input_ids=ids_BL, use_cache=False, **kwargs)
        return out_TKH

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            # From pinned memory the copy does not wait for the work queued on the device before it.
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
