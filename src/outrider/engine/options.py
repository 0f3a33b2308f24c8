"""Sampling options on the device: one table by slot, written when a request is admitted, read by every round.
COLUMNS says all there is to say about an option that is a number; what is added there is packed, reset and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.engine.request import Request
from outrider.kernels.filters import check_filters, filters
from outrider.kernels.sampling import GREEDY_TEMPERATURE
from outrider.sampling_params import SamplingParams
from outrider.types import Sampling

# what there is room for at first; a request that brings more makes the table wider
NUM_ENDS = 16  # ids that min_tokens bars
NUM_WORDS, WORD_LEN = 32, 16  # bad words, and tokens of one


@dataclass(frozen=True)
class Column:
    """An option with one number for every request."""

    name: str  # of the field of Sampling
    dtype: torch.dtype
    value: Callable[[Request, int], float]  # of a request, given the size of the vocabulary


COLUMNS = (
    Column("temperature", torch.float32, lambda request, _: request.params.temperature),
    Column("top_k", torch.long, lambda request, size: request.params.top_k if request.params.top_k > 0 else size),
    Column("top_p", torch.float32, lambda request, _: request.params.top_p),
    Column("min_p", torch.float32, lambda request, _: request.params.min_p),
    Column("seed", torch.long, lambda request, _: request.seed),
    Column("repetition", torch.float32, lambda request, _: request.params.repetition_penalty),
    Column("presence", torch.float32, lambda request, _: request.params.presence_penalty),
    Column("frequency", torch.float32, lambda request, _: request.params.frequency_penalty),
    Column("prompt_len", torch.long, lambda request, _: len(request.prompt)),
    Column("min_len", torch.long, lambda request, _: len(request.prompt) + request.params.min_tokens),
)
FLOATS = [column for column in COLUMNS if column.dtype is torch.float32]
WHOLES = [column for column in COLUMNS if column.dtype is torch.long]


@dataclass(frozen=True)
class Flags:
    """What the requests of a round ask for at all, as far as a round is recorded differently for it."""

    filtered: bool  # some request has top_k, top_p, min_p or a filter of somebody's own
    adjusted: bool  # some request's logits are changed before a token is chosen
    masked: bool = False  # some request's grammar forbids something

    def within(self, other: Flags) -> bool:
        """Whether the other asks for all of it."""
        return all(theirs or not mine for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Flags:
        params = [request.params for request in requests]
        return cls(any(map(is_filtered, params)), any(map(is_adjusted, requests)))


@dataclass(frozen=True)
class SamplingNeeds:
    """What the requests of a round ask of sampling at all."""

    greedy: bool
    filtered: bool
    biased: bool
    bad_words: bool
    penalised: bool
    bounded: bool

    @classmethod
    def of(cls, requests: Sequence[Request]) -> SamplingNeeds:
        params = [request.params for request in requests]
        return cls(
            greedy=all(map(is_greedy, params)),
            filtered=any(map(is_filtered, params)),
            biased=any(map(is_biased, params)),
            bad_words=any(request.bad_words for request in requests),
            penalised=any(map(is_penalised, params)),
            bounded=any(each.min_tokens > 0 for each in params),
        )

    @property
    def adjusted(self) -> bool:
        return self.biased or self.bad_words or self.penalised or self.bounded


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature <= GREEDY_TEMPERATURE


def is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or bool(params.extra_args)


def is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def is_biased(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.allowed_token_ids is not None


def is_adjusted(request: Request) -> bool:
    """Whether this request's logits are changed before a token is chosen."""
    params = request.params
    return is_biased(params) or params.min_tokens > 0 or bool(request.bad_words) or is_penalised(params)


def _filter_column(name: str) -> Column:
    """The column of a sampling filter that somebody has registered."""
    off = filters[name].off
    return Column(name, torch.float32, lambda request, _: (request.params.extra_args or {}).get(name, off))


class Options:
    """The table. Slots that nobody has taken hold whatever their last request wanted: no row reads them."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        # a row for each column, so that a request is written with one copy of each dtype
        self._extra = [_filter_column(name) for name in filters]
        self._float_columns = [*FLOATS, *self._extra]
        self._floats = torch.zeros(len(self._float_columns), num_slots, device=device)
        self._wholes = torch.zeros(len(WHOLES), num_slots, dtype=torch.long, device=device)
        self._end_ids = torch.full((num_slots, NUM_ENDS), -1, dtype=torch.long, device=device)
        self._bias: Tensor | None = None  # made with the first request that has one: it is as wide as the vocabulary
        self._bad_words: Tensor | None = None
        self._adjusted: set[int] = set()  # slots whose lists hold something
        self.generation = 0  # counts how often tensors were replaced: what was recorded with the old ones is void

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError for filters that nobody knows, or that came too late to have a column."""
        check_filters(params.extra_args or {})
        late = set(params.extra_args or ()) - {column.name for column in self._extra}
        if late:
            raise ValueError(f"{', '.join(sorted(late))}: register a filter before the LLM is made that shall know it")

    def write(self, requests: Sequence[Request], upload: Callable[[Tensor], Tensor]) -> None:
        """Requests that have just been given a slot. `upload` takes a tensor to the device without waiting."""
        slots = upload(torch.tensor([request.slot for request in requests]))
        for table, columns in ((self._floats, self._float_columns), (self._wholes, WHOLES)):
            rows = [[column.value(request, self._vocab_size) for request in requests] for column in columns]
            table[:, slots] = upload(torch.tensor(rows, dtype=table.dtype))
        for request in requests:
            if is_adjusted(request) or request.slot in self._adjusted:
                self.prepare_adjusting()
                self._write_lists(request, upload)

    def prepare_adjusting(self) -> None:
        """Makes the tables that only rounds with adjusted logits read, where they are missing."""
        if self._bias is None:
            num_slots = len(self._end_ids)
            self._bias = torch.zeros(num_slots, self._vocab_size, device=self._device)
            words = (num_slots, NUM_WORDS, WORD_LEN)
            self._bad_words = torch.full(words, -1, dtype=torch.long, device=self._device)

    def _write_lists(self, request: Request, upload: Callable[[Tensor], Tensor]) -> None:
        """The options that are lists, or the lack of them where the slot's last request had some."""
        assert self._bias is not None
        assert self._bad_words is not None
        slot, params, words = request.slot, request.params, request.bad_words
        ends, allowed, bias = barred_ids(request), params.allowed_token_ids, params.logit_bias or {}
        self._adjusted.discard(slot)
        if is_adjusted(request):
            self._adjusted.add(slot)
        self._end_ids = self._widen(self._end_ids, len(ends))
        self._end_ids[slot] = -1
        if ends:
            self._end_ids[slot, : len(ends)] = upload(torch.tensor(ends))
        self._bias[slot] = 0.0 if allowed is None else -torch.inf
        if allowed is not None:
            self._bias[slot].index_fill_(0, upload(torch.from_numpy(np.array(allowed, dtype=np.int64))), 0.0)
        if bias:
            ids, values = torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)
            self._bias[slot].index_add_(0, upload(ids), upload(values))
        self._bad_words = self._widen(self._bad_words, len(words), max(map(len, words), default=0))
        self._bad_words[slot] = -1
        if words:
            length = self._bad_words.shape[2]
            rows = torch.tensor([[-1] * (length - len(word)) + list(word) for word in words])
            self._bad_words[slot, : len(words)] = upload(rows)

    def _widen(self, table: Tensor, *sizes: int) -> Tensor:
        """At least so large behind its first axis; what is there stays, aligned right in the last of several axes."""
        wanted = [max(now, size) for now, size in zip(table.shape[1:], sizes, strict=True)]
        if wanted == list(table.shape[1:]):
            return table
        self.generation += 1
        wider = table.new_full((len(table), *wanted), -1)
        if len(wanted) == 1:
            wider[:, : table.shape[1]] = table
        else:
            wider[:, : table.shape[1], wanted[1] - table.shape[2] :] = table
        return wider

    def sampling(self, requests: Sequence[Request]) -> Sampling:
        """Sampling options as a round of these requests reads the table."""
        return self.sampling_for(SamplingNeeds.of(requests))

    def sampling_for(self, asked: SamplingNeeds) -> Sampling:
        """Sampling options as a round reads them whose requests ask for this."""
        table = replace(self.recorded(Flags(asked.filtered, asked.adjusted)), greedy=asked.greedy)
        if not asked.adjusted:
            return table
        return replace(
            table,
            bias=self._bias if asked.biased else None,
            bad_words=self._bad_words if asked.bad_words else None,
            penalised=asked.penalised,
            bounded=asked.bounded,
        )

    def recorded(self, flags: Flags) -> Sampling:
        """Sampling options as any recorded round reads them whose requests ask for such things."""
        if flags.adjusted:
            self.prepare_adjusting()
        tables = self._floats.unbind()
        columns = dict(zip((each.name for each in FLOATS), tables[: len(FLOATS)], strict=True))
        extra = dict(zip((each.name for each in self._extra), tables[len(FLOATS) :], strict=True))
        columns |= zip((each.name for each in WHOLES), self._wholes.unbind(), strict=True)
        return Sampling(
            **columns,
            end_ids=self._end_ids,
            bias=self._bias if flags.adjusted else None,
            bad_words=self._bad_words if flags.adjusted else None,
            greedy=False,  # every row looks at its own temperature
            filtered=flags.filtered,
            extra=extra if flags.filtered else {},
            penalised=flags.adjusted,
            bounded=flags.adjusted,
        )


def barred_ids(request: Request) -> list[int]:
    """End tokens that min_tokens bars."""
    return sorted(request.end_ids | set(request.params.stop_token_ids)) if request.params.min_tokens else []
