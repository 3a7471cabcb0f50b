"""Train a small EAGLE-style drafter on a run's hidden states, on a CPU, in minutes.

The drafter sees what it sees in speculative decoding: the target's states at token t (three layers, fused) and the token
t + 1 that the target has just chosen; it drafts token t + 2. One causal decoder layer is trained; embedding, final norm and head
are the target's own, frozen. A draft is accepted when it is the target's greedy token.

    make demo
    python examples/train_drafter.py runs/demo --plot drafter.svg

On held-out conversations it is compared with a bigram table, and with the same drafter trained on states that are one
stored layer, or one position, off: if the run were misaligned, it could not win.

Legend: T tokens of a batch (samples end to end), K layers, H hidden size, V draft vocabulary.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional

from swathe import HiddenStates
from swathe.adapters.norm import read_final_norm
from swathe.reader import collate_packed

HELD_OUT = 5
"""Every fifth conversation is not trained on."""
BATCH_TOKENS = 512
VARIANTS = ("aligned", "one layer off", "one position off")


class Block(nn.Module):
    """A pre-norm decoder layer: attention inside each sample, then a gated MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, hidden_TH: torch.Tensor, mask_TT: torch.Tensor) -> torch.Tensor:
        """[T, H]; ``mask_TT`` is true where a token may look."""
        qkv = self.qkv(self.norm_attention(hidden_TH)).view(len(hidden_TH), 3, self.heads, -1)
        q, k, v = (one.transpose(0, 1) for one in qkv.unbind(1))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT)
        hidden_TH = hidden_TH + self.out(mixed.transpose(0, 1).flatten(1))
        gate, value = self.up(self.norm_mlp(hidden_TH)).chunk(2, dim=-1)
        change_TH: torch.Tensor = self.down(functional.silu(gate) * value)
        return hidden_TH + change_TH


class Drafter(nn.Module):
    """Fuse the target's layers with the next token's embedding, one decoder layer, the target's head."""

    def __init__(self, layers: int, hidden: int, head_VH: torch.Tensor) -> None:
        super().__init__()
        # Each layer is normed by itself: their magnitudes differ by orders.
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(layers + 1))
        self.fuse = nn.Linear((layers + 1) * hidden, hidden, bias=False)
        self.block = Block(hidden, heads=hidden // 64)
        self.norm = nn.RMSNorm(hidden)
        self.head_VH: torch.Tensor
        self.register_buffer("head_VH", head_VH)

    def forward(
        self, states_TKH: torch.Tensor, embeds_TH: torch.Tensor, mask_TT: torch.Tensor
    ) -> torch.Tensor:
        """Logits [T, V] for the token after next."""
        inputs = [*states_TKH.unbind(1), embeds_TH]
        normed = [norm(one) for norm, one in zip(self.norms, inputs, strict=True)]
        hidden_TH = self.block(self.fuse(torch.cat(normed, dim=-1)), mask_TT)
        logits_TV: torch.Tensor = self.norm(hidden_TH) @ self.head_VH.T
        return logits_TV


class Target:
    """What is frozen: embedding and head of the target (one matrix or two), and its final norm, from the run."""

    def __init__(self, run: HiddenStates, checkpoint: Path) -> None:
        names: dict[str, Path] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names |= dict.fromkeys(file.keys(), path)
        embedding = next(name for name in names if name.endswith("embed_tokens.weight"))
        head = next((name for name in names if name.endswith("lm_head.weight")), embedding)
        self.embedding = _read(names[embedding], embedding)
        self.head = _read(names[head], head)
        self.norm = read_final_norm(run.store, run.spec)

    def greedy(self, final_TH: torch.Tensor) -> torch.Tensor:
        """The target's own next token after each position: [T]."""
        return (self.norm(final_TH.float()) @ self.head.T).argmax(-1)


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor.float()


def groups(run: HiddenStates, samples: list[int]) -> list[list[int]]:
    """Samples in shuffled groups of about ``BATCH_TOKENS``: one batch each."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    found: list[list[int]] = [[]]
    for index in (samples[place] for place in order):
        if found[-1] and run.lengths[[*found[-1], index]].sum() > BATCH_TOKENS:
            found.append([])
        found[-1].append(index)
    return found


def batches(run: HiddenStates, parts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Each group's samples end to end; a very long one is cut, because attention costs its square."""
    for part in parts:
        yield collate_packed([run[index] for index in part], max_tokens=4 * BATCH_TOKENS)


class Example:
    """One batch in the drafter's terms: everything at position t is what is known there."""

    def __init__(
        self, batch: dict[str, Any], run: HiddenStates, target: Target, variant: str
    ) -> None:
        states, ids, sample = batch["hidden_states"].float(), batch["input_ids"], batch["sample"]
        final = run.slot("final")
        aux = [slot for slot in range(states.shape[1]) if slot != final]
        self.states_TKH = states[:-1, aux]
        if variant == "one layer off":
            # Slot j holds the next stored layer: what an off-by-one in layer ids gives.
            self.states_TKH = states[:-1][:, [*aux[1:], final]]
        elif variant == "one position off":
            self.states_TKH = states.roll(1, 0)[:-1, aux]
        self.next_ids = ids[1:]
        self.embeds_TH = target.embedding[self.next_ids]
        self.after_next_TH = states[1:, final]
        """The target's final state at t + 1: the teacher of the token t + 2."""
        place = torch.arange(len(ids) - 1)
        self.mask_TT = (sample[:-1, None] == sample[None, :-1]) & (place[:, None] >= place)
        inside = sample[:-1] == sample[1:]
        drafted = torch.cat([batch["loss_mask"][2:], batch["loss_mask"].new_zeros(1)]).bool()
        same = torch.cat([sample[2:] == sample[:-2], inside.new_zeros(1)])
        self.taught = inside & same
        """Positions whose token t + 2 is of this sample. Few data: the user's turns teach too."""
        self.wanted = self.taught & drafted
        """Of these, where the assistant speaks: only there would a drafter draft."""


def train(
    run: HiddenStates, target: Target, parts: list[list[int]], vocab: torch.Tensor, options: Any
) -> Iterator[tuple[str, Drafter, list[float]]]:
    """For each variant the trained drafter and its loss by step."""
    for variant in VARIANTS:
        torch.manual_seed(0)
        drafter = Drafter(len(run.layers) - 1, run.spec.model.hidden_size, target.head[vocab])
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=options.lr, weight_decay=0.1)
        steps = options.epochs * len(parts)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
        losses: list[float] = []
        for epoch in range(options.epochs):
            shuffle = torch.Generator().manual_seed(epoch)
            order = torch.randperm(len(parts), generator=shuffle).tolist()
            for batch in batches(run, [parts[place] for place in order]):
                loss = loss_of(drafter, Example(batch, run, target, variant), target)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
        yield variant, drafter, losses


def loss_of(drafter: Drafter, example: Example, target: Target) -> torch.Tensor:
    """Cross entropy with the target's distribution over the draft vocabulary, as EAGLE-3 has it."""
    logits = drafter(example.states_TKH, example.embeds_TH, example.mask_TT)[example.taught]
    with torch.no_grad():
        teacher = target.norm(example.after_next_TH[example.taught]) @ drafter.head_VH.T
    return functional.cross_entropy(logits, teacher.softmax(-1))


@torch.inference_mode()
def acceptance(
    drafter: Drafter, run: HiddenStates, target: Target, parts: list[list[int]], vocab: torch.Tensor
) -> float:
    """Share of drafts that are the target's greedy token, on states as the target gives them."""
    accepted = drafted = 0
    for batch in batches(run, parts):
        example = Example(batch, run, target, "aligned")
        logits = drafter(example.states_TKH, example.embeds_TH, example.mask_TT)
        draft = vocab[logits[example.wanted].argmax(-1)]
        accepted += int((draft == target.greedy(example.after_next_TH[example.wanted])).sum())
        drafted += len(draft)
    return accepted / drafted


def bigram_acceptance(
    run: HiddenStates, target: Target, split: dict[str, list[list[int]]]
) -> float:
    """The same for a table: after this token, what the target said most often in training."""
    table: defaultdict[int, Counter[int]] = defaultdict(Counter)
    anywhere: Counter[int] = Counter()
    accepted = drafted = 0
    for part, members in split.items():
        for batch in batches(run, members):
            example = Example(batch, run, target, "aligned")
            used = example.taught if part == "train" else example.wanted
            greedy = target.greedy(example.after_next_TH[used]).tolist()
            pairs = zip(example.next_ids[used].tolist(), greedy, strict=True)
            for token, chosen in pairs:
                if part == "train":
                    table[token][chosen] += 1
                    anywhere[chosen] += 1
                else:
                    guess = (table.get(token) or anywhere).most_common(1)[0][0]
                    accepted += guess == chosen
                    drafted += 1
    return accepted / drafted


def draft_vocabulary(run: HiddenStates, samples: list[int], size: int) -> torch.Tensor:
    """The most frequent tokens of the training part, as EAGLE-3 picks them: int64 [V]."""
    counts: Counter[int] = Counter()
    for index in samples:
        counts.update(run.tokens(index)["input_ids"].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


def main() -> None:
    """Train, compare, plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run")
    parser.add_argument(
        "--checkpoint", type=Path, help="folder of the target (default: run.json's)"
    )
    parser.add_argument("--layers", type=int, nargs="+", help="of the run (default: all it stores)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--vocab", type=int, default=4096, help="size of the draft vocabulary")
    parser.add_argument("--unsealed", action="store_true", help="train on a run that goes on")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run = HiddenStates(options.run, unsealed=options.unsealed)
    layers = options.layers or [layer for layer in run.layers if layer != "final"]
    run = run.with_layers([*layers, "final"])
    target = Target(run, options.checkpoint or Path(run.spec.model.source))
    samples = {
        "train": [i for i in range(len(run)) if run.rows[i] % HELD_OUT],
        "held out": [i for i in range(len(run)) if run.rows[i] % HELD_OUT == 0],
    }
    split = {part: groups(run, members) for part, members in samples.items()}
    vocab = draft_vocabulary(run, samples["train"], options.vocab)
    tokens = {part: int(run.lengths[members].sum()) for part, members in samples.items()}
    print(f"{len(run)} conversations, {tokens['train']} tokens to train on, {len(vocab)} drafted")
    started = time.monotonic()
    result: dict[str, Any] = {"run": run.spec.fingerprint[:12], "tokens": tokens}
    result["acceptance"] = {"bigram": bigram_acceptance(run, target, split)}
    result["loss"] = {}
    print(f"bigram table: {result['acceptance']['bigram']:.1%} accepted")
    for variant, drafter, losses in train(run, target, split["train"], vocab, options):
        accepted = acceptance(drafter, run, target, split["held out"], vocab)
        result["acceptance"][variant], result["loss"][variant] = accepted, losses
        print(
            f"drafter, states {variant}: {accepted:.1%} accepted, loss {losses[0]:.2f} -> {losses[-1]:.2f}"
        )
    result["seconds"] = round(time.monotonic() - started)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.plot:
        options.plot.write_text(plot(result))


def plot(result: dict[str, Any]) -> str:
    """Loss curves and acceptance bars, as SVG."""
    colors = {"aligned": "#1b7f4d", "one layer off": "#c77d0a", "one position off": "#b3332e"}
    top = max(max(losses) for losses in result["loss"].values())
    parts = ['<text x="20" y="22">loss by step (training)</text>']
    for variant, losses in result["loss"].items():
        width = max(1, len(losses) // 60)
        smooth = [
            sum(losses[i : i + width]) / len(losses[i : i + width])
            for i in range(0, len(losses), width)
        ]
        points = " ".join(
            f"{20 + 300 * i / max(1, len(smooth) - 1):.1f},{230 - 195 * value / top:.1f}"
            for i, value in enumerate(smooth)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colors[variant]}" stroke-width="2"/>'
        )
    parts.append('<text x="360" y="22">accepted drafts (held-out conversations)</text>')
    for place, (name, value) in enumerate(result["acceptance"].items()):
        y, color = 45 + 48 * place, colors.get(name, "#777")
        parts.append(
            f'<rect x="360" y="{y + 8}" width="{330 * value:.1f}" height="18" fill="{color}"/>'
        )
        parts.append(f'<text x="360" y="{y + 2}">{name}</text>')
        parts.append(f'<text x="{366 + 330 * value:.1f}" y="{y + 22}">{value:.1%}</text>')
    parts.append('<path d="M20 35V230H320" fill="none" stroke="#999"/>')
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 250" font-family="sans-serif" font-size="13">\n'
        f'<rect width="720" height="250" fill="#fff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
