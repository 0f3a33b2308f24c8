"""Host truth of one prompt: its tokens, where it stands, and how it ends. Tokens are committed one at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any

from outrider.engine.snapshot_pool import Marks
from outrider.engine.watchdog import RequestHealth
from outrider.grammar.guide import Guide
from outrider.outputs import CompletionOutput, Logprob
from outrider.sampling_params import SamplingParams, Speculation
from outrider.text_stream import TextStream
from outrider.types import Images, Prediction

CLOSED = "max_tokens"  # why an answer stopped that had no more room, and was closed


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Residence:
    """What a request has while it runs: a slot and pages, what is computed in them, and what is planned on it."""

    slot: int = -1
    pages: list[int] = field(default_factory=list)
    page_names: list[bytes] = field(default_factory=list)
    num_placed: int = 0  # pages that the device's page table knows
    num_computed: int = 0
    num_followed: int = 0  # the first of them that the drafter has seen
    is_followed: bool = True  # the drafter sees its text; otherwise it is never drafted for
    num_drafts: int = 0  # draft tokens waiting to be verified
    draft: list[int] = field(default_factory=list)  # which
    draft_is_predicted: bool = False  # it is from the prediction
    draft_is_forced: bool = False  # the grammar says what comes next
    num_refused: int = 0  # the last of its tokens, which are not judged: the grammar forbids them
    most_judged: int | None = None  # tokens of a draft that are worth judging in the next round; None: all
    turn: int = 0  # which of all rounds it was in last
    flying: list[Work] = field(default_factory=list)  # its work in rounds under way, the oldest first
    marks: Marks = field(default_factory=Marks)  # where snapshots of recurrent states are taken

    @property
    def under_way(self) -> tuple[int, int]:
        """Tokens that rounds under way bring it at least, and rows that it has in them at most."""
        num_emitting = num_rows = 0
        for work in self.flying:
            num_emitting += work.emits
            num_rows += work.pending + work.allowed
        return num_emitting, num_rows

    def leave(self) -> None:
        """The request gives up its slot and pages: nothing of this stay reaches the next one."""
        vars(self).update(vars(Residence()))


@dataclass(eq=False)
class Request(Residence):
    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int] = frozenset()  # end-of-text tokens, empty under ignore_eos
    text: TextStream | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    guide: Guide | None = None  # where the answer stands in its grammar
    prediction: Prediction | None = None  # what the answer is expected to be
    images: Images | None = None
    unsplit: tuple[tuple[int, int], ...] = ()  # parts of the prompt (begin, end) that must be run in one pass
    # where it stands
    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt, then what was generated
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    num_admissions: int = 0
    first_admitted: float | None = None  # when, by time.monotonic()
    num_preemptions: int = 0
    recompute: bool = False  # when it is admitted again, it reuses nothing
    standing: RequestHealth = field(default_factory=RequestHealth)  # with the watchdog
    # what came out
    draft_positions: list[int] = field(default_factory=list)  # of each output: its place in the draft, 0: no draft's
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    judged: list[int] = field(default_factory=list)  # rounds by how many tokens of a draft were judged in them
    accepted: list[int] = field(default_factory=list)  # and by how many stood
    num_predicted: int = 0  # draft tokens from the prediction
    num_predicted_accepted: int = 0
    ends_in_draft: bool = False  # its last token is a draft's
    error: str | None = None
    # when, by time.monotonic()
    arrived_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    ended_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def text_ends(self) -> list[int]:
        """Of each output: length of the text once it was added."""
        return self.text.ends if self.text is not None else [0] * self.num_outputs

    @property
    def named_tokens(self) -> list[int]:
        """The tokens as they name pages: an image's placeholders are all alike, so its content stands for them."""
        if self.images is None:
            return self.tokens
        tokens = list(self.tokens)
        for index, name in zip(self.images.indices.tolist(), self.images.names, strict=True):
            tokens[index] = name
        return tokens

    def has_images_after(self, index: int) -> bool:
        return self.images is not None and any(end > index for _, end in self.images.spans)

    def whole(self, start: int, num_rows: int) -> int:
        """How many rows from `start` to run, given room for `num_rows`, so that nothing unsplit is cut: fewer, or
        more where an unsplit part begins right there."""
        for begin, end in self.unsplit:
            if begin < start + num_rows < end:
                return begin - start if begin > start else end - start
        return num_rows

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def drafted_at(self) -> tuple[int, ...]:
        """By place in a draft: rounds in which a token there was judged."""
        return _at_least(self.judged)

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """The same: rounds in which it stood."""
        return _at_least(self.accepted)

    @property
    def speculation(self) -> Speculation:
        return Speculation(
            rounds=self.rounds,
            drafted=sum(self.drafted_at),
            accepted=sum(self.accepted_at),
            drafted_at=self.drafted_at,
            accepted_at=self.accepted_at,
            predicted=self.num_predicted,
            accepted_predicted=self.num_predicted_accepted,
            ended=int(self.ends_in_draft),
        )

    def most_drafts(self, *, predicted: bool = False) -> int | None:
        """How many tokens of a draft are wanted, be it the drafter's or from the prediction; None: all of them."""
        rests = self.standing.is_paused or not self.is_followed
        return 0 if rests and not predicted else self.params.num_speculative_tokens

    @property
    def num_unread(self) -> int:
        """Known tokens that no round has run, nor is running."""
        num_emitting, num_flying = self.under_way
        return 0 if num_emitting else len(self.tokens) - self.num_computed - num_flying

    @property
    def is_reading(self) -> bool:
        """Whether more than its last known token is still to be run."""
        return self.num_unread > 1

    def remaining(self, max_model_len: int) -> int:
        """How many more tokens may come."""
        room = max_model_len - len(self.tokens)
        return room if self.params.max_tokens is None else min(room, self.params.max_tokens - self.num_outputs)

    def append(self, token: int, max_model_len: int, draft_position: int = 0) -> None:
        """Commits one token and decides whether the request ends with it."""
        params = self.params
        fits = self.error is None and (self.guide is None or self.guide.accept(token))
        self.tokens.append(token)
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        may_stop = not params.min_tokens or self.num_outputs >= params.min_tokens
        ends = may_stop and (token in self.end_ids or token in params.stop_token_ids)
        stop = None
        if self.text is not None:
            # One that ends the answer is like a stop string itself: it is part of the text only where that was asked
            # for, and what was held back before it comes first.
            shown = token if params.include_stop_str_in_output or not ends else None
            stop = self.text.add(shown, may_stop=may_stop and not ends)
        if not fits:  # no mask allows it: the target's logits were no numbers
            self.error = self.error or f"token {token} is against the grammar"
            self.finish("error")
        elif ends and token in self.end_ids:
            self.finish("stop")
            if self.guide is not None and self.guide.is_closing:
                self.stop_reason = CLOSED
        elif ends:
            self.finish("stop", token)
        elif stop is not None:
            self.finish("stop", stop)
        elif self.remaining(max_model_len) <= 0:
            self.finish("length")
        self.draft_positions.append(draft_position)  # the last: a token of which this is missing was not taken whole

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.status, self.ended_at = Status.FINISHED, time.monotonic()
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.text is not None and not isinstance(stop_reason, str):
            self.text.finish()

    def output(self, index: int) -> CompletionOutput:
        """What has come so far, as answer number `index` to its prompt."""
        return CompletionOutput(
            index=index,
            text=self.text.text if self.text is not None else "",
            token_ids=self.outputs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            speculation=self.speculation,
            seed=self.seed,
            draft_positions=list(self.draft_positions),
            text_ends=list(self.text_ends),
            trace=list(self.trace) if self.params.trace else None,
        )

    def count_round(self, num_drafts: int, accepted: int, taken: int) -> None:
        """A round that brought `taken` tokens."""
        self.rounds += 1
        self.ends_in_draft = taken == accepted
        missing = 1 + num_drafts - len(self.judged)
        if missing > 0:
            self.judged += [0] * missing
            self.accepted += [0] * missing
        self.judged[num_drafts] += 1
        self.accepted[accepted] += 1
        if self.draft_is_predicted:
            self.num_predicted += num_drafts
            self.num_predicted_accepted += accepted


def _at_least(counts: list[int]) -> tuple[int, ...]:
    """Of rounds by a number: how many of them had at least 1, 2, ..."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


@dataclass(eq=False)
class Work:
    """One request's part of a round: known tokens, then at most so many drafts."""

    request: Request
    pending: int  # tokens that are known, its first rows
    allowed: int  # draft tokens that are judged behind them, at most
    emits: bool  # the rows reach the last known token
    end: int  # no cache index of its rows reaches it
    depth: int = 0  # tokens that are drafted for it at most, for the next round
    rests: bool = False  # the drafter does not see these rows
    admission: int = 0  # of the request: after another one, what this brings is nobody's

    @property
    def num_rows(self) -> int:
        """How many rows it has at most."""
        return self.pending + self.allowed

    @property
    def is_round(self) -> bool:
        """Its request decodes: one token that is certain, then drafts."""
        return self.emits and self.pending == 1

    @property
    def is_current(self) -> bool:
        return self.request.status is Status.RUNNING and self.admission == self.request.num_admissions


@dataclass(slots=True)  # not frozen: that would make each, and there are many, three times as slow
class Progress:
    """What a step brought one request: rows of its prompt, or tokens."""

    request: Request
    num_new: int = 0  # tokens that it took
    num_drafted: int = 0  # draft tokens that were judged, where it was a round
    num_accepted: int = 0  # of those
