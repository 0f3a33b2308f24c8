"""Mamba-2's recurrence against plain float64 loops: what comes out, which states are kept and which are left alone;
and the promise that a row's bits are its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from outrider.kernels import native_library
from outrider.kernels.mamba import MambaWeights, mamba_native, mamba_reference
from outrider.types import Batch, Recurrence

needs_compiler = pytest.mark.skipif(
    native_library.library() is None, reason="no C compiler: the native kernels are not built"
)
NUM_SLOTS, NUM_ENTRIES, NUM_PLACES, NUM_WANTED = 5, 4, 9, 3
Kernel = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def keep_num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Sizes:
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.num_groups * self.state_size


def make_weights(sizes: Sizes, biased: bool = True) -> MambaWeights:
    return MambaWeights(
        conv=torch.randn(sizes.kernel, sizes.channels) / sizes.kernel,
        conv_bias=torch.randn(sizes.channels) if biased else None,
        step_bias=torch.randn(sizes.num_heads) * 3,
        rate=-torch.rand(sizes.num_heads) * 4,
        skip=torch.randn(sizes.num_heads),
        num_groups=sizes.num_groups,
    )


def make_states(sizes: Sizes) -> tuple[Tensor, Tensor]:
    entries = NUM_SLOTS, NUM_ENTRIES
    conv = torch.randn(*entries, sizes.kernel - 1, sizes.channels)
    return conv, torch.randn(*entries, sizes.num_heads, sizes.state_size, sizes.head_dim)


def make_snapshots(sizes: Sizes) -> tuple[Tensor, Tensor]:
    conv = torch.randn(NUM_PLACES, sizes.kernel - 1, sizes.channels)
    return conv, torch.randn(NUM_PLACES, sizes.num_heads, sizes.state_size, sizes.head_dim)


def make_wanted(num_rows: Sequence[int], slots: Sequence[int], firsts: Sequence[int]) -> Tensor:
    """Of every request some snapshots, in places of their own: after rows of the pass, and after some that are not."""
    wanted = torch.zeros(2, NUM_WANTED, NUM_SLOTS, dtype=torch.long)
    places = iter((torch.randperm(NUM_PLACES - 1) + 1).tolist())
    for count, slot, first in zip(num_rows, slots, firsts, strict=True):
        for column in torch.randperm(NUM_WANTED)[:2].tolist():
            end = first + int(torch.randint(-1, count + 2, ()))
            wanted[:, column, slot] = torch.tensor([end, next(places)])
    return wanted


def make_batch(
    num_rows: Sequence[int], slots: Sequence[int], recurrence: Recurrence, firsts: Sequence[int] | None = None
) -> Batch:
    """Only what recurrent layers look at means anything. `firsts`: the cache index of each request's first row."""
    counts = torch.tensor(num_rows)
    begins = firsts or [0] * len(num_rows)
    indices = torch.cat([begin + torch.arange(count) for begin, count in zip(begins, num_rows, strict=True)])
    total = int(counts.sum())
    start = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    nothing = torch.zeros(total, dtype=torch.long)
    return Batch(
        input_ids=nothing,
        positions=nothing,
        indices=indices,
        query_start=start.int(),
        request=torch.repeat_interleave(counts),
        row_slots=torch.tensor(slots)[torch.repeat_interleave(counts)],
        slots=torch.tensor(slots),
        page_table=torch.zeros(len(num_rows), 1, dtype=torch.int32),
        write_locations=nothing,
        page_size=4,
        max_len=total,
        max_rows=max(num_rows),
        recurrence=recurrence,
    )


def slow(
    projected: Tensor,
    states: tuple[Tensor, Tensor],
    batch: Batch,
    weights: MambaWeights,
    snapshots: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Request after request, row after row, head after head, in float64."""
    recurrence = batch.recurrence
    assert recurrence is not None
    before = [each.clone() for each in states]
    _, _, num_heads, state_size, head_dim = states[1].shape
    inner, group = num_heads * head_dim, num_heads // weights.num_groups
    out = torch.zeros(len(projected), num_heads, head_dim, dtype=torch.float64)
    for request, slot in enumerate(batch.slots.tolist()):
        window, state = (each[slot, int(recurrence.read[request])].double() for each in before)
        kept = recurrence.rows[request].tolist()
        for row in range(int(batch.query_start[request]), int(batch.query_start[request + 1])):
            _, channels, steps = projected[row].double().split([inner, weights.conv.shape[1], num_heads])
            window = torch.cat([window, channels[None]])
            mixed = (window * weights.conv.double()).sum(0)
            mixed = functional.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias.double())
            window = window[1:]
            x, b, c = mixed.split([inner, *[weights.num_groups * state_size] * 2])
            state = state.clone()
            for head in range(num_heads):
                step = torch.log1p(torch.exp(steps[head] + weights.step_bias[head].double()))
                mine = slice(head // group * state_size, (head // group + 1) * state_size)
                news = step * torch.outer(b[mine], x[head * head_dim :][:head_dim])
                state[head] = state[head] * torch.exp(step * weights.rate[head].double()) + news
                out[row, head] = c[mine] @ state[head] + weights.skip[head].double() * x[head * head_dim :][:head_dim]
            for place, wanted in enumerate(kept):
                if wanted == row:
                    for each, value in zip(states, (window, state), strict=True):
                        each[slot, recurrence.first + place] = value.float()
            if snapshots is not None and recurrence.wanted is not None:
                for end, place in recurrence.wanted[:, :, slot].T.tolist():
                    if end == batch.indices[row] + 1:
                        for each, value in zip(snapshots, (window, state), strict=True):
                            each[place] = value.float()
    return out.flatten(1)


@needs_compiler
@pytest.mark.parametrize("kernel", [mamba_native, mamba_reference])
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    num_heads=st.sampled_from([1, 2, 6]),
    head_dim=st.sampled_from([1, 7, 16, 40]),
    state_size=st.sampled_from([1, 5, 24]),
    kernel_size=st.integers(1, 4),
    first=st.integers(0, 2),
    biased=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_it_equals_float64(
    kernel: Kernel,
    num_rows: list[int],
    num_heads: int,
    head_dim: int,
    state_size: int,
    kernel_size: int,
    first: int,
    biased: bool,
    num_threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(num_threads)
    sizes = Sizes(num_heads, head_dim, state_size, 2 if num_heads % 2 == 0 else 1, kernel_size)
    weights, states = make_weights(sizes, biased), make_states(sizes)
    slots = torch.randperm(NUM_SLOTS)[: len(num_rows)].tolist()
    starts = torch.tensor([0, *num_rows]).cumsum(0)[:-1]
    # any rows, some more than once, into places that may be where the request starts from
    picks = torch.stack([torch.randint(0, count, (NUM_ENTRIES - first,)).sort().values for count in num_rows])
    recurrence = Recurrence(torch.randint(0, NUM_ENTRIES, (len(num_rows),)), starts[:, None] + picks, first)
    batch = make_batch(num_rows, slots, recurrence)
    projected = torch.randn(sum(num_rows), sizes.inner + sizes.channels + num_heads)
    expected_states = states[0].clone(), states[1].clone()
    expected = slow(projected, expected_states, batch, weights)
    with torch.inference_mode():
        actual = kernel(projected, states, batch, weights)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5 * state_size)
    for mine, theirs in zip(states, expected_states, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)
        others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
        assert torch.equal(mine[others], theirs[others]), "another slot's state was touched"
        assert torch.equal(mine[:, :first], theirs[:, :first]), "a place that was not asked for was written"


@needs_compiler
@pytest.mark.parametrize("kernel", [mamba_native, mamba_reference])
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    kernel_size=st.integers(1, 4),
    head_dim=st.sampled_from([1, 16, 40]),
    seed=st.integers(0, 2**31),
)
def test_snapshots(kernel: Kernel, num_rows: list[int], kernel_size: int, head_dim: int, seed: int) -> None:
    """Those that are wanted after a row of the pass are taken, whatever else is kept; all others are left alone."""
    torch.manual_seed(seed)
    sizes = Sizes(2, head_dim, 5, 2, kernel_size)
    weights, states, snapshots = make_weights(sizes), make_states(sizes), make_snapshots(sizes)
    slots = torch.randperm(NUM_SLOTS)[: len(num_rows)].tolist()
    firsts = torch.randint(0, 50, (len(num_rows),)).tolist()
    last = torch.tensor(num_rows).cumsum(0) - 1
    read = torch.randint(0, NUM_ENTRIES, (len(num_rows),)) * (torch.tensor(num_rows) > 0)  # without rows nothing moves
    recurrence = Recurrence(read, last[:, None])
    recurrence = replace(recurrence, wanted=make_wanted(num_rows, slots, firsts))
    batch = make_batch(num_rows, slots, recurrence, firsts)
    projected = torch.randn(sum(num_rows), sizes.inner + sizes.channels + 2)
    expected_states = states[0].clone(), states[1].clone()
    expected = snapshots[0].clone(), snapshots[1].clone()
    out = slow(projected, expected_states, batch, weights, expected)
    with torch.inference_mode():
        actual = kernel(projected, states, batch, weights, snapshots)
    torch.testing.assert_close(actual.double(), out, rtol=2e-5, atol=1e-4)
    for mine, theirs in zip((*states, *snapshots), (*expected_states, *expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_rows_keep_their_bits(chunk: int) -> None:
    """In one pass, in chunks, among other requests, on several threads: the same output and the same states."""
    torch.manual_seed(1)
    sizes = Sizes(num_heads=6, head_dim=20, state_size=24, num_groups=2, kernel=4)
    weights, initial = make_weights(sizes), make_states(sizes)
    lengths, slots = [24, 16, 8], [3, 0, 4]
    texts = [torch.randn(length, sizes.inner + sizes.channels + 6) for length in lengths]
    zeros, alone, ends = torch.zeros(1, dtype=torch.long), [], []
    for text, slot in zip(texts, slots, strict=True):
        states = initial[0].clone(), initial[1].clone()
        batch = make_batch([len(text)], [slot], Recurrence(zeros, torch.tensor([[len(text) - 1]])))
        alone.append(mamba_native(text, states, batch, weights))
        ends.append([each[slot, 0].clone() for each in states])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        states = initial[0].clone(), initial[1].clone()
        parts: list[list[Tensor]] = [[] for _ in texts]
        for begin in range(0, max(lengths), chunk):
            here = [number for number, length in enumerate(lengths) if begin < length]
            rows = [texts[number][begin : begin + chunk] for number in here]
            last = torch.tensor([len(each) for each in rows]).cumsum(0) - 1
            recurrence = Recurrence(zeros.expand(len(here)).contiguous(), last[:, None])
            batch = make_batch([len(each) for each in rows], [slots[number] for number in here], recurrence)
            out = mamba_native(torch.cat(rows), states, batch, weights).split([len(each) for each in rows])
            for number, part in zip(here, out, strict=True):
                parts[number].append(part)
        for number, slot in enumerate(slots):
            assert torch.equal(torch.cat(parts[number]), alone[number])
            assert all(torch.equal(each[slot, 0], end) for each, end in zip(states, ends[number], strict=True))


@needs_compiler
def test_extreme_steps() -> None:
    """Steps so small that nothing is forgotten, and so large that everything is."""
    torch.manual_seed(2)
    sizes = Sizes(num_heads=2, head_dim=16, state_size=8, num_groups=1, kernel=2)
    weights, states = make_weights(sizes), make_states(sizes)
    weights = replace(weights, step_bias=torch.tensor([-60.0, 90.0]), rate=torch.tensor([-1.0, -30.0]))
    batch = make_batch([5], [1], Recurrence(torch.tensor([2]), torch.tensor([[4]])))
    projected = torch.randn(5, sizes.inner + sizes.channels + 2)
    expected_states = states[0].clone(), states[1].clone()
    expected = slow(projected, expected_states, batch, weights)
    actual = mamba_native(projected, states, batch, weights)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=1e-3)
    torch.testing.assert_close(states[1][1, 0], expected_states[1][1, 0], rtol=2e-5, atol=1e-6)
