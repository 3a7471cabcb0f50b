"""The page that an export carries: which tensor is which layer, in whose numbering, before or after the norm."""

from swathe.adapters import Adapter
from swathe.export.options import ExportOptions
from swathe.reader import HiddenStates

_FILES = {
    "speculators": """\
* `hidden_states/hs_{i}.safetensors`: `token_ids` int64 [S], `hidden_states` {dtype} [S, K + 1, H]{scales}
* `data-*.arrow`, `state.json`, `dataset_info.json`: the set that `datasets.load_from_disk` opens; row i belongs to
  `hs_{i}`. `row` is the place in the user's data set, where rows may be missing: rejected or quarantined ones.
* `token_freq.pt`: how often each id is supervised, for `--draft-vocab-size`
""",
    "eagle3": """\
* `rows_*/data_{i}.ckpt`: `input_ids`, `loss_mask` int64 [S], `aux_hidden_state` {dtype} [1, S, 3H] (the layers below,
  side by side), `hidden_state` [1, S, H] (the final state)
""",
    "dflash": """\
* `rows_*/data_{i}.ckpt`: `input_ids`, `loss_mask` int64 [S], `hidden_states` {dtype} [1, S, K * H] (the layers below, side
  by side)
""",
    "dspark": """\
* `rows_*/data_{i}.ckpt`: `input_ids`, `loss_mask` int64 [S], `hidden_states` {dtype} [1, S, K * H] (the layers below, side
  by side), `target_last_hidden_states` [1, S, H] (the final state)
""",
    "modelopt": """\
* `rows_*/data_{i}.pt`: `input_ids`, `loss_mask` int64 [S], `aux_hidden_states` {dtype} [S, K * H] (the layers below, side
  by side), `hidden_states` [S, H] (the final state), `hidden_states_prenorm` False
""",
}
_USE = {
    "speculators": """\
Give the trainer `--target-layer-ids {ids}` and this folder as `--data-path`{fp8}. The last slot is
the state BEFORE the final norm: speculators applies the verifier's norm itself.""",
    "specforge": """\
Give the trainer the layer ids {ids} in its draft config and this folder as the hidden states' path.""",
    "modelopt": """\
Give the trainer the layer ids {ids} and this folder as the offline data. The final state is AFTER the norm and says so
(`hidden_states_prenorm` False), because ModelOpt applies a norm only for the architectures on its own list.""",
}


def readme(adapter: Adapter, options: ExportOptions, dataset: HiddenStates) -> str:
    """The page as Markdown."""
    spec = adapter.spec
    trainer = adapter.needs.trainer
    ids = " ".join(map(str, adapter.trainer_ids))
    kind = options.algorithm if options.format == "specforge" else options.format
    files = _FILES["dflash" if kind == "domino" else kind]
    files = files.replace("{dtype}", "float8_e4m3fn" if options.fp8 else options.dtype)
    scales = ", `hidden_states_scales` float32 [S, 1, 1]" if options.fp8 else ""
    files = files.replace("{scales}", scales)
    fp8 = " and `--hidden-states-backend fp8`" if options.fp8 else ""
    use = _USE[options.format].format(ids=ids, fp8=fp8)
    random = (
        "\n**The model's weights are random. Train nothing on this.**\n"
        if spec.model.random_weights
        else ""
    )
    return f"""# Hidden states for {trainer}
{random}
{len(adapter)} samples of `{spec.model.source}` ({spec.model.num_layers} blocks, hidden size {spec.model.hidden_size}),
exported by swathe from run `{spec.run_id}`.{_left_out(adapter, dataset)}

## Files

{files}
Ids, mask and states are unshifted and of equal length: position t of the states is what the model computed at token t.

## Layers

| slot | swathe's layer | transformers `hidden_states[i]` | {trainer}'s id | state |
|---|---|---|---|---|
{_layers(adapter)}

{use}
"""


def _layers(adapter: Adapter) -> str:
    depth = adapter.spec.model.num_layers
    lines = [
        f"| {slot} | {layer} | {layer + 1 if layer < depth - 1 else 'none'} | {number} | output of block {layer} |"
        for slot, (layer, number) in enumerate(
            zip(adapter.selection.aux, adapter.trainer_ids, strict=True)
        )
    ]
    if adapter.selection.final:
        place = f"{depth} (the last)" if adapter.post_norm else "none (the last one is normed)"
        state = "AFTER the final norm" if adapter.post_norm else "BEFORE the final norm"
        number = str(depth) if adapter.needs.id_offset else "none"
        lines.append(f"| final | final | {place} | {number} | output of the last block, {state} |")
    return "\n".join(lines)


def _left_out(adapter: Adapter, dataset: HiddenStates) -> str:
    left_out = len(dataset) - len(adapter)
    if not left_out:
        return ""
    return (
        f" {left_out} more are stored and left out: they have no two supervised tokens in a row"
        f"{f' within {adapter.max_length} tokens' if adapter.max_length else ''}, and the trainer refuses such samples."
    )
