"""What grammars forbid: the torch code against a loop, the Triton kernel and the one in C against the torch code."""

from __future__ import annotations

import pytest
import torch
from test_triton import DEVICE

from outrider.kernels import native_library
from outrider.kernels.gpu import masks as gpu
from outrider.kernels.masks import restrict, restrict_reference
from outrider.types import Guidance

NUM_JUDGED = 3
DRAFTS = [2, 0, -1, 1]  # of each seat that are judged; -1: it says nothing


def make(vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Guidance, torch.Tensor]:
    """Logits, the target's own ones, what grammars say, and where the rows of each seat begin. Some rows have no mask,
    some nothing left under theirs, and a mask beyond a seat's rows belongs to nobody."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *(1 + drafts for drafts in DRAFTS)]).cumsum(0).int()
    own = torch.randn(int(starts[-1]) + 2, vocab, generator=generator)
    logits = own + torch.randn(own.shape, generator=generator)
    num_words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, (4, num_words), generator=generator).int()
    bits[1] = 0
    bits[1, num_words // 2] = -(2**31)  # one token, of the highest bit
    logits[3] = -torch.inf  # of which no other option leaves anything
    head = torch.zeros(len(DRAFTS), 3 * NUM_JUDGED, dtype=torch.int32)
    head[0, :3] = torch.tensor([1, 0, 2])
    head[1, 0], head[1, 1] = 3, 4
    head[2, 0] = 4
    return logits.to(DEVICE), own.to(DEVICE), Guidance.of(head.to(DEVICE), bits.to(DEVICE)), starts.to(DEVICE)


MASKED = {0: 1, 2: 2, 3: 3}  # row of the logits, its mask


@pytest.mark.parametrize("vocab", [70, 9000])
def test_what_is_forbidden(vocab: int) -> None:
    logits, own, guidance, starts = (each for each in make(vocab))
    found = logits.clone()
    restrict_reference(found, own, guidance, starts)
    for row in range(len(logits)):
        mask, before = MASKED.get(row), logits[row]
        if mask is None:
            assert found[row].equal(before)
            continue
        words = guidance.bits[mask - 1].tolist()
        allowed = [bool(words[token // 32] >> token % 32 & 1) for token in range(vocab)]
        assert 0 < sum(allowed) < vocab
        source = own[row] if row == 3 else before
        expected = [value if allowed[token] else -torch.inf for token, value in enumerate(source.tolist())]
        assert found[row].tolist() == expected


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("vocab", [70, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_triton(vocab: int, one: bool, dtype: torch.dtype) -> None:
    """`one`: the logits are the target's own, in its own precision."""
    logits, own, guidance, starts = make(vocab)
    own = own.to(dtype)
    wanted, found = (own.clone() if one else logits.clone() for _ in range(2))
    restrict_reference(wanted, wanted if one else own, guidance, starts)
    gpu.restrict(found, found if one else own, guidance, starts)
    assert found.equal(wanted)
    assert not found.equal(own if one else logits)


@pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("vocab", [1, 31, 70, 9000])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_in_c(vocab: int, one: bool, num_threads: int) -> None:
    logits, own, guidance, starts = (
        Guidance(**{name: field.cpu() for name, field in vars(each).items()})
        if isinstance(each, Guidance)
        else each.cpu()
        for each in make(vocab)
    )
    wanted, found, before = logits.clone(), logits.clone(), torch.get_num_threads()
    restrict_reference(wanted, wanted if one else own, guidance, starts)
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        restrict(found, found if one else own, guidance, starts)
    torch.set_num_threads(before)
    assert found.equal(wanted)
    assert not found.equal(logits)
