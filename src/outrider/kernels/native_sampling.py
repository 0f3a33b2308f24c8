"""The choice of a token in C: one call instead of noise for a whole vocabulary, and a sort of it; and what comes before
and after it, bias, penalties, grammars and log-probabilities."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from outrider.kernels.native import _address, _native
from outrider.types import Guidance, Sampling

_DRAW = struct.Struct("@10q 3q 2d")  # draw_work of sampling.c
_ADD_BIAS = struct.Struct("@3q 4q")  # bias_work of adjust.c
_RESTRICT = struct.Struct("@5q 6q")  # mask_work of masks.c
_PENALISE = struct.Struct("@8q 5q")  # penalty_work of adjust.c
_LOGPROBS = struct.Struct("@7q 4q")  # logprob_work of logprobs.c
NO_DRAW = (0,) * 13 + (0.0, 0.0)


class Drawing:
    """How tokens are drawn: `rows` [R] are slots in `sampling`; the rest as in sampling.choose(). Positions may be of
    several choices, [.., R]. Rows whose temperature is at most `least` are greedy."""

    def __init__(
        self, sampling: Sampling, rows: Tensor, positions: Tensor, ids: Tensor | None, *, least: float, sharpness: float
    ) -> None:
        self.sampling, self.ids = sampling, ids
        self.rows, self.positions = rows.contiguous(), positions.contiguous()  # C sees addresses: they must stay
        self.least, self.sharpness = least, sharpness

    def fields(self, num_rows: int, width: int, logits: int = 0, out: int = 0) -> tuple[float, ...]:
        """Of draw_work, for logits of such a width; where they are, and where tokens go."""
        sampling, filters = self.sampling, (0, 0, 0)
        assert width > 0
        assert self.positions.numel() % num_rows == 0, (self.positions.shape, num_rows)
        if sampling.filtered:
            filters = _address(sampling.top_k, torch.int64), _address(sampling.top_p), _address(sampling.min_p)
        return (
            logits,
            _address(self.rows, torch.int64, num_rows),
            _address(self.positions, torch.int64),
            0 if self.ids is None else _address(self.ids, torch.int64, width),
            _address(sampling.temperature),
            _address(sampling.seed, torch.int64),
            *filters,
            out,
            *(num_rows, width, torch.get_num_threads()),
            *(self.least, self.sharpness),
        )


def draw(logits: Tensor, drawing: Drawing) -> Tensor:
    """The token of each row of logits [R, V]; filters are obeyed."""
    logits = logits.contiguous()
    num_rows, width = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device="cpu")
    if num_rows:
        _native().draw(_DRAW.pack(*drawing.fields(num_rows, width, _address(logits), out.data_ptr())))
    return out


def add_bias(logits: Tensor, bias: Tensor, slots: Tensor) -> None:
    """logits [R, V] += bias[slots], of a table [S, V]."""
    num_rows, width = logits.shape
    assert logits.is_contiguous(), logits.stride()
    assert bias.stride(1) == 1, bias.stride()
    assert bias.shape[1] == width, (bias.shape, logits.shape)
    slots = slots.contiguous()
    addresses = _address(logits), bias.data_ptr(), _address(slots, torch.int64, num_rows)
    _native().add_bias(_ADD_BIAS.pack(*addresses, num_rows, width, bias.stride(0), torch.get_num_threads()))


def penalise(logits: Tensor, sampling: Sampling, slots: Tensor, last: Tensor, texts: Tensor, first_id: int = 0) -> None:
    """As penalties.penalise(), of logits [R, V] that are about the ids from `first_id` on."""
    num_rows, width = logits.shape
    assert logits.is_contiguous(), logits.stride()
    assert texts.stride(1) == 1, texts.stride()
    slots, last = slots.contiguous(), last.contiguous()
    rows = (_address(each, torch.int64, num_rows) for each in (slots, last))
    penalties = (_address(each) for each in (sampling.repetition, sampling.presence, sampling.frequency))
    addresses = _address(logits), *rows, texts.data_ptr(), _address(sampling.prompt_len, torch.int64), *penalties
    sizes = num_rows, width, texts.stride(0), first_id, torch.get_num_threads()
    _native().penalise(_PENALISE.pack(*addresses, *sizes))


def restrict(logits: Tensor, own: Tensor, guidance: Guidance, judged_start: Tensor) -> None:
    """As masks.restrict()."""
    masks, bits = guidance.masks, guidance.bits.contiguous()
    num_words = bits.shape[1]
    assert logits.is_contiguous(), logits.stride()
    assert own.is_contiguous(), own.stride()
    assert own.shape == logits.shape, (own.shape, logits.shape)
    assert masks.stride(1) == 1 or masks.shape[1] == 1, masks.stride()
    assert 32 * num_words >= logits.shape[1], (bits.shape, logits.shape)
    tables = masks.data_ptr(), _address(bits, torch.int32), _address(judged_start, torch.int32, len(masks) + 1)
    sizes = *masks.shape, masks.stride(0), logits.shape[1], num_words, torch.get_num_threads()
    _native().restrict(_RESTRICT.pack(_address(logits), _address(own), *tables, *sizes))


def logprobs(logits: Tensor, rows: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See logprobs.logprobs_of()."""
    logits, rows, chosen = logits.contiguous(), rows.contiguous(), chosen.contiguous()
    num_rows, width = len(rows), logits.shape[1]
    assert 0 <= most <= width, (most, logits.shape)
    own, ranks = torch.empty(num_rows, device="cpu"), torch.empty(num_rows, dtype=torch.int64, device="cpu")
    values = torch.empty(num_rows, most, device="cpu")
    ids = torch.empty(num_rows, most, dtype=torch.int64, device="cpu")
    inputs = _address(logits), *(_address(each, torch.int64, num_rows) for each in (rows, chosen))
    outputs = (each.data_ptr() for each in (own, values, ranks, ids))
    _native().logprobs(_LOGPROBS.pack(*inputs, *outputs, num_rows, width, most, torch.get_num_threads()))
    return own, ranks, values, ids
