"""A small model with several losses, and windows whose numbers of valid targets are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor, nn

from shardstream.torch.batch import Batch, Place
from shardstream.torch.windows import windows

WIDTH, CLASSES, LENGTH, ROWS = 5, 7, 8, 3
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}  # of relative errors

Counts = Mapping[str, Sequence[Sequence[int]]]


class TwoHeads(nn.Module):
    """A trunk and one linear head a loss; the same parameters in every process."""

    def __init__(self, heads, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.trunk = nn.Linear(WIDTH, 6)
        self.heads = nn.ModuleDict({head: nn.Linear(6, CLASSES) for head in sorted(heads)})
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return {name: head(hidden) for name, head in self.heads.items()}


def head_sums(model, batch) -> dict[str, Tensor]:
    """Head name → sum of the cross entropy over its valid targets."""
    logits = model(batch["x"])
    return {
        head: F.cross_entropy(values.flatten(0, 1), batch[head].flatten(), reduction="sum", ignore_index=-100)
        for head, values in logits.items()
    }


def fake_batch(targets: Mapping[str, int], seed: int, dtype=torch.float64, **place) -> Batch:
    """A micro-batch with so many valid targets of each head, at random places."""
    generator = torch.Generator().manual_seed(seed)
    columns = {"x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)}
    for head, count in sorted(targets.items()):
        labels = torch.randint(0, CLASSES, (ROWS * LENGTH,), generator=generator)
        labels[torch.randperm(len(labels), generator=generator)[count:]] = -100
        columns[head] = labels.reshape(ROWS, LENGTH)
    return Batch(
        columns,
        sample_ids=torch.arange(ROWS),
        is_padding=torch.zeros(ROWS, dtype=torch.bool),
        valid_tokens={head: (columns[head] != -100).sum(1) for head in targets},
        place=Place(**{"position": 0, "cursor": None, "window_index": 0, **place}),
    )


def fake_window(counts: Counts, rank: int, dtype=torch.float64, window_index: int = 0) -> list[Batch]:
    """A rank's micro-batches of a window; ``counts[head][rank][micro-batch]`` valid targets."""
    accumulate = len(next(iter(counts.values()))[rank])
    return [
        fake_batch(
            {head: rows[rank][micro] for head, rows in counts.items()},
            seed=100 * rank + 10 * window_index + micro,
            dtype=dtype,
            micro_index=micro,
            window_index=window_index,
            is_last_in_window=micro == accumulate - 1,
        )
        for micro in range(accumulate)
    ]


def whole_window(counts: Counts, dtype=torch.float64) -> dict[str, Tensor]:
    """Everything all ranks have of a window, as one micro-batch."""
    num_ranks = len(next(iter(counts.values())))
    batches = [batch for rank in range(num_ranks) for batch in fake_window(counts, rank, dtype)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in ("x", *counts)}


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters()]


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference by the norm of what is expected, over all tensors together."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    norm = sum(float(b.double().square().sum()) for b in expected)
    return (difference / norm) ** 0.5


class TokenModel(nn.Module):
    """Predicts tokens below 40 from themselves; the same parameters in every process."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(40, 4), nn.Linear(4, 40))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(tokens)


def token_loss(model, batch) -> Tensor:
    """The sum over the batch's valid targets."""
    logits = model(batch["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum", ignore_index=-100)


def step_with(model, batches, loss_of, *, options=None, wrapped=None):
    """One optimizer step on one window; returns gradients and parameters as they are afterwards."""
    wrapped = model if wrapped is None else wrapped
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    [window] = windows(batches, **(options or {}))
    for micro in window.micro_batches(wrapped):
        loss_of(window, micro, head_sums(wrapped, micro)).backward()
    gradients = gradients_of(model)
    window.step(optimizer)
    return gradients, [parameter.detach().clone() for parameter in model.parameters()]


def right(window, micro, sums):
    return window.loss(**sums)


def reference(counts, dtype):
    """The same step in one process on the whole window: for each head the sum of losses by the number of targets."""
    model = TwoHeads(counts, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    totals = {head: sum(map(sum, rows)) for head, rows in counts.items()}
    sums = head_sums(model, whole_window(counts, dtype))
    sum(value / max(totals[head], 1) for head, value in sums.items()).backward()
    gradients = gradients_of(model)
    optimizer.step()
    return gradients, [parameter.detach().clone() for parameter in model.parameters()]


def check(found, counts, dtype):
    for mine, theirs in zip(found, reference(counts, dtype), strict=True):
        assert relative_error(mine, theirs) <= BOUNDS[dtype]
