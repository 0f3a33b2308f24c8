"""The places of a round whose shapes are fixed: who sits where, with which options. A recorded round finds everything
that may change from replay to replay in these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.request import Request
from outrider.engine.sampler import barred_ids
from outrider.types import Sampling

# of rounds that cost about the same, up to each of them
NUM_SEATS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# what the options of a seat have room for
MAX_ENDS = 16  # ids that min_tokens bars
MAX_WORDS = 32  # bad words
MAX_WORD = 16  # tokens of one
COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "repetition", "presence", "frequency", "prompt_len", "min_len",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What a round is recorded for; anything else can change from replay to replay."""

    num_seats: int
    num_drafts: int
    greedy: bool
    filtered: bool
    adjusted: bool


@dataclass(frozen=True)
class Layout:
    """What never changes in such rounds."""

    request: Tensor  # [B * width]
    query_start: Tensor  # [B + 1]
    logit_rows: Tensor  # [B, width]
    num_rows: Tensor  # [B]
    num_drafts: Tensor  # [B]

    @classmethod
    def of(cls, num_seats: int, num_drafts: int, device: torch.device) -> Layout:
        width = 1 + num_drafts
        rows = torch.arange(num_seats * width, device=device)
        return cls(
            request=rows // width,
            query_start=torch.arange(0, num_seats * width + 1, width, dtype=torch.int32, device=device),
            logit_rows=rows.view(num_seats, width),
            num_rows=torch.full((num_seats,), width, dtype=torch.long, device=device),
            num_drafts=torch.full((num_seats,), num_drafts, dtype=torch.long, device=device),
        )


@dataclass
class Seats:
    """Empty ones have the slot that belongs to nobody."""

    slots: Tensor  # [B]
    allowed: Tensor  # [B] drafts that may be accepted
    taken: Tensor  # [B] bool
    sampling: Sampling
    layout: Layout
    nobody: int

    @classmethod
    def of(cls, kind: Kind, nobody: int, vocab_size: int, device: torch.device) -> Seats:
        """All of them empty."""
        count = kind.num_seats
        return cls(
            slots=torch.full((count,), nobody, dtype=torch.long, device=device),
            allowed=torch.zeros(count, dtype=torch.long, device=device),
            taken=torch.zeros(count, dtype=torch.bool, device=device),
            sampling=_no_options(kind, vocab_size, device),
            layout=Layout.of(count, kind.num_drafts, device),
            nobody=nobody,
        )

    def fill(self, slots: Sequence[int], allowed: Sequence[int], sampling: Sampling) -> None:
        """Some requests take the first seats, with their options; whoever sat there leaves."""
        count = len(slots)
        host = torch.tensor([slots, allowed], dtype=torch.long).to(self.slots.device, non_blocking=True)
        self.slots.fill_(self.nobody)
        self.allowed.zero_()
        self.slots[:count], self.allowed[:count] = host[0], host[1]
        self.taken.zero_()
        self.taken[:count] = True
        own = self.sampling
        for name in COLUMNS:
            vars(own)[name][:count] = vars(sampling)[name]
        if own.bias is None or own.bad_words is None:
            return
        own.end_ids.fill_(-1)
        own.end_ids[:count, : sampling.end_ids.shape[1]] = sampling.end_ids
        own.bias.zero_()
        if sampling.bias is not None:
            own.bias[:count] = sampling.bias
        own.bad_words.fill_(-1)
        if sampling.bad_words is not None:
            _, num_words, length = sampling.bad_words.shape
            own.bad_words[:count, :num_words, MAX_WORD - length :] = sampling.bad_words


def fits(request: Request) -> bool:
    """Whether a seat has room for the options of a request. What the host must decide in every round has none."""
    words = request.bad_words
    free = request.guide is None and request.prediction is None
    short = len(words) <= MAX_WORDS and max(map(len, words), default=0) <= MAX_WORD
    return free and short and len(barred_ids(request)) <= MAX_ENDS


def _no_options(kind: Kind, vocab_size: int, device: torch.device) -> Sampling:
    count = kind.num_seats

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    words = (count, MAX_WORDS, MAX_WORD)
    return Sampling(
        temperature=column(0.0 if kind.greedy else 1.0),
        top_k=column(vocab_size, torch.long),
        top_p=column(1.0),
        min_p=column(0.0),
        seed=column(0, torch.long),
        repetition=column(1.0),
        presence=column(0.0),
        frequency=column(0.0),
        prompt_len=column(0, torch.long),
        min_len=column(0, torch.long),
        end_ids=torch.full((count, MAX_ENDS), -1, dtype=torch.long, device=device),
        bias=torch.zeros(count, vocab_size, device=device) if kind.adjusted else None,
        bad_words=torch.full(words, -1, dtype=torch.long, device=device) if kind.adjusted else None,
        greedy=kind.greedy,
        filtered=kind.filtered,
        penalised=kind.adjusted,
        bounded=kind.adjusted,
    )
