"""The Triton recurrence against the reference: what comes out, which states are kept and which are left alone; and the
promise that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_mamba import (
    NUM_ENTRIES,
    NUM_SLOTS,
    Sizes,
    make_batch,
    make_snapshots,
    make_states,
    make_wanted,
    make_weights,
)
from test_triton import CUDA, DEVICE, DTYPES, TOLERANCE
from torch import Tensor

pytest.importorskip("triton")

from outrider.kernels.gpu import mamba as gpu_mamba
from outrider.kernels.mamba import MambaWeights, mamba_reference
from outrider.types import Batch, Recurrence

States = tuple[Tensor, Tensor]


def weights_of(sizes: Sizes, dtype: torch.dtype = torch.float32, *, biased: bool = True) -> MambaWeights:
    """The convolution in the model's precision, the rest in float32, as the layer has them."""
    made = make_weights(sizes, biased)
    tensors = {name: getattr(made, name).to(DEVICE) for name in ("step_bias", "rate", "skip")}
    bias = None if made.conv_bias is None else made.conv_bias.to(DEVICE, dtype)
    return replace(made, conv=made.conv.to(DEVICE, dtype), conv_bias=bias, **tensors)


def states_of(sizes: Sizes) -> States:
    conv, heads = make_states(sizes)
    return conv.to(DEVICE), heads.to(DEVICE)


def batch_of(
    num_rows: Sequence[int], slots: Sequence[int], recurrence: Recurrence, firsts: Sequence[int] | None = None
) -> Batch:
    batch = make_batch(num_rows, slots, recurrence, firsts)
    for name in ("query_start", "request", "slots", "indices"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    wanted = None if recurrence.wanted is None else recurrence.wanted.to(DEVICE)
    moved = Recurrence(recurrence.read.to(DEVICE), recurrence.rows.to(DEVICE), recurrence.first, wanted)
    return replace(batch, recurrence=moved)


def projected_of(sizes: Sizes, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, sizes.inner + sizes.channels + sizes.num_heads).to(DEVICE, dtype)


def copy_of(states: States) -> States:
    return states[0].clone(), states[1].clone()


CASES = [
    # rows of each request, heads, D, N, groups, kernel, first kept place, biased
    ([1, 4, 2], 2, 8, 16, 1, 4, 0, True),
    ([3], 6, 7, 5, 2, 1, 1, False),
    ([5, 1, 19, 2], 2, 40, 24, 2, 2, 2, True),  # more rows than a program of the convolution has
    ([34, 2], 2, 20, 1, 2, 4, 3, False),
]
CUDA_CASES = [([700, 1, 33], 16, 64, 128, 8, 4, 0, True), ([8, 8, 8], 10, 80, 128, 2, 4, 0, True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "heads", "dim", "size", "groups", "kernel", "first", "biased"), CASES + (CUDA_CASES if CUDA else [])
)
@torch.no_grad()
def test_it_equals_the_reference(
    num_rows: list[int], heads: int, dim: int, size: int, groups: int, kernel: int, first: int, biased: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(sum(num_rows))
    sizes = Sizes(heads, dim, size, groups, kernel)
    weights, ours = weights_of(sizes, dtype, biased=biased), states_of(sizes)
    theirs = copy_of(ours)
    slots = torch.randperm(NUM_SLOTS)[: len(num_rows)].tolist()
    starts = torch.tensor([0, *num_rows]).cumsum(0)[:-1]
    # any rows, in any order, some more than once, into places that may be where the request starts from
    picks = torch.stack([torch.randint(0, count, (NUM_ENTRIES - first,)) for count in num_rows])
    recurrence = Recurrence(torch.randint(0, NUM_ENTRIES, (len(num_rows),)), starts[:, None] + picks, first)
    batch = batch_of(num_rows, slots, recurrence)
    projected = projected_of(sizes, sum(num_rows), dtype)
    wanted = mamba_reference(projected, theirs, batch, weights)
    found = gpu_mamba.mamba(projected, ours, batch, weights)
    assert found.dtype == torch.float32
    # also from bfloat16, as all after the input is float32; a GPU's exp is a few bits short, over hundreds of rows
    tolerance = (50 if CUDA else 10) * TOLERANCE[torch.float32]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * size**0.5)
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        assert torch.equal(mine[others], other[others]), "another slot's state was touched"
        assert torch.equal(mine[:, :first], other[:, :first]), "a place that was not asked for was written"


@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_snapshots(seed: int) -> None:
    """In places of their own, beside the states that are kept; rows that a pass does not come by leave them alone. The
    convolution's inputs may be from before the pass, where they are also written over."""
    torch.manual_seed(seed)
    sizes = Sizes(2, 20, 5, 2, 1 + seed % 4)
    num_rows = [1, int(torch.randint(0, 3, ())), 1 + 7 * (seed % 5), 2]
    slots, firsts = torch.randperm(NUM_SLOTS)[:4].tolist(), torch.randint(0, 50, (4,)).tolist()
    weights, ours, taken = weights_of(sizes), states_of(sizes), tuple(each.to(DEVICE) for each in make_snapshots(sizes))
    theirs, expected = copy_of(ours), tuple(each.clone() for each in taken)
    counts = torch.tensor(num_rows)
    last, before = counts.cumsum(0) - 1, counts.cumsum(0) - counts - 1
    rows = torch.maximum(last[:, None] - torch.arange(NUM_ENTRIES - 1, -1, -1), before[:, None])
    read = torch.randint(0, NUM_ENTRIES, (4,)) * (counts >= NUM_ENTRIES)  # before the first row nothing moves
    wanted = make_wanted(num_rows, slots, firsts)
    batch = batch_of(num_rows, slots, Recurrence(read, rows, wanted=wanted), firsts)
    projected = projected_of(sizes, sum(num_rows))
    out = mamba_reference(projected, theirs, batch, weights, expected)
    found = gpu_mamba.mamba(projected, ours, batch, weights, taken)
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-4)
    for mine, other in zip((*ours, *taken), (*theirs, *expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_row_before_the_first_is_kept() -> None:
    """The convolution's inputs before the first row are those the request started from; there is no new state."""
    sizes = Sizes(num_heads=2, head_dim=8, state_size=4, num_groups=1, kernel=4)
    weights, ours = weights_of(sizes), states_of(sizes)
    theirs = copy_of(ours)
    batch = batch_of([1, 2], [3, 1], Recurrence(torch.tensor([0, 2]), torch.tensor([[-1, 0], [0, 1]])))
    projected = projected_of(sizes, 3)
    wanted = mamba_reference(projected, theirs, batch, weights)
    torch.testing.assert_close(gpu_mamba.mamba(projected, ours, batch, weights), wanted, rtol=1e-4, atol=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [2, 17])
@torch.no_grad()
def test_rows_keep_their_bits(chunk: int) -> None:
    """In one pass, or among others in chunks that go on from the state kept in the same place."""
    torch.manual_seed(1)
    sizes = Sizes(num_heads=2, head_dim=20, state_size=24, num_groups=2, kernel=4)
    weights, initial = weights_of(sizes), states_of(sizes)
    lengths, slots = [19, 5, 2], [3, 0, 4]
    texts = [projected_of(sizes, length) for length in lengths]
    alone, ends = [], []
    for text, slot in zip(texts, slots, strict=True):
        states = copy_of(initial)
        batch = batch_of([len(text)], [slot], Recurrence(torch.tensor([0]), torch.tensor([[len(text) - 1]])))
        alone.append(gpu_mamba.mamba(text, states, batch, weights))
        ends.append([each[slot, 0].clone() for each in states])
    states, parts = copy_of(initial), [[] for _ in texts]
    for begin in range(0, max(lengths), chunk):
        here = [number for number, length in enumerate(lengths) if begin < length]
        rows = [texts[number][begin : begin + chunk] for number in here]
        counts = [len(each) for each in rows]
        recurrence = Recurrence(torch.zeros(len(here), dtype=torch.long), torch.tensor(counts).cumsum(0)[:, None] - 1)
        batch = batch_of(counts, [slots[number] for number in here], recurrence)
        out = gpu_mamba.mamba(torch.cat(rows), states, batch, weights).split(counts)
        for number, part in zip(here, out, strict=True):
            parts[number].append(part)
    for number, slot in enumerate(slots):
        assert torch.equal(torch.cat(parts[number]), alone[number])
        assert all(torch.equal(each[slot, 0], end) for each, end in zip(states, ends[number], strict=True))


@torch.no_grad()
def test_extreme_steps() -> None:
    """Steps so small that nothing is forgotten, and so large that everything is."""
    torch.manual_seed(2)
    sizes = Sizes(num_heads=3, head_dim=16, state_size=8, num_groups=1, kernel=2)
    weights, ours = weights_of(sizes), states_of(sizes)
    extremes = {"step_bias": torch.tensor([-60.0, 90.0, -18.0]), "rate": torch.tensor([-1.0, -30.0, -5.0])}
    weights = replace(weights, **{name: value.to(DEVICE) for name, value in extremes.items()})
    ours[1][:, :, 2] = 0.0  # what a tiny step adds is seen beside nothing
    theirs = copy_of(ours)
    batch = batch_of([5], [1], Recurrence(torch.tensor([2]), torch.tensor([[4]])))
    projected = projected_of(sizes, 5)
    wanted = mamba_reference(projected, theirs, batch, weights)
    torch.testing.assert_close(gpu_mamba.mamba(projected, ours, batch, weights), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ours[1][1, 0], theirs[1][1, 0], rtol=1e-4, atol=1e-12)


@pytest.mark.skipif(not CUDA, reason="graphs are CUDA's")
@torch.no_grad()
def test_in_a_graph() -> None:
    """Captured with slots, played with others and with rows shared out in another way."""
    sizes = Sizes(num_heads=4, head_dim=64, state_size=32, num_groups=2, kernel=4)
    weights, states = weights_of(sizes, torch.bfloat16), states_of(sizes)
    batch = batch_of([4, 4], [1, 3], Recurrence(torch.tensor([0, 1]), torch.tensor([[2, 3], [6, 7]])))
    assert batch.recurrence is not None
    projected = projected_of(sizes, 8, torch.bfloat16)
    gpu_mamba.mamba(projected, copy_of(states), batch, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu_mamba.mamba(projected, states, batch, weights)
    batch.slots.copy_(torch.tensor([4, 2]))
    batch.query_start.copy_(torch.tensor([0, 3, 7]))
    batch.recurrence.rows.copy_(torch.tensor([[1, 2], [5, 6]]))
    theirs = copy_of(states)
    graph.replay()
    wanted = gpu_mamba.mamba(projected, theirs, batch, weights)
    assert torch.equal(out[:7], wanted[:7])
    assert all(torch.equal(mine, other) for mine, other in zip(states, theirs, strict=True))
