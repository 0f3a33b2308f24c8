"""What the front (HTTP, text) and the engine say to each other. Plain data, which needs no torch to be read: the two
may be processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from outrider.outputs import Logprob
from outrider.sampling_params import SamplingParams, Speculation
from outrider.server.errors import ApiError

WireRow = dict[int, tuple[float, int, str]]  # log-probabilities of one token and its alternatives


# to the engine


@dataclass(frozen=True, slots=True)
class Submit:
    job: int
    job_id: str  # what the log calls it
    prompts: list[list[int] | Mapping[str, Any]]  # checked token ids; or with images, as it was given
    params: list[SamplingParams]  # of each prompt
    streams: bool  # otherwise only last pieces are wanted
    waited: float  # seconds since the client asked
    left: float  # seconds until the deadline
    begun: list[list[int]] = field(default_factory=list)  # of each sequence: tokens that it has already; or nothing


@dataclass(frozen=True, slots=True)
class Abort:
    job: int
    error: ApiError


@dataclass(frozen=True, slots=True)
class AskMetrics:
    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Everything ends now."""


# from the engine, while it is being opened


@dataclass(frozen=True, slots=True)
class Located:
    """Where the target's files are: the tokenizer is among them, unless another was asked for."""

    path: str
    tokenizer: str | None = None  # a directory


@dataclass(frozen=True, slots=True)
class Loading:
    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class NotOpened:
    message: str
    is_fault: bool  # ours; otherwise it is the user's to mend
    trace: str


@dataclass(frozen=True, slots=True)
class Opened:
    """What the front must know of the model."""

    origin: str  # what the user called it
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_speculative_tokens: int  # 0: there is no drafter
    memory: dict[str, Any]  # what takes how much, for programs
    memory_rows: dict[str, str]  # and for people


# from the engine, at work


class SequenceCounts(NamedTuple):
    """What was drafted and accepted for one sequence so far."""

    num_cached: int  # prompt tokens found in the cache
    num_predicted: int  # draft tokens from its prediction
    num_predicted_accepted: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence has ended."""

    finish_reason: str | None
    stop_reason: int | str | None
    speculation: Speculation


@dataclass(slots=True)
class Piece:
    """What one step added to one sequence. Pieces of a sequence, joined, are its output. It travels as a plain tuple:
    there is one for every stream in every step."""

    job: int
    index: int  # of the sequence
    text: str
    token_ids: list[int]
    draft_positions: list[int]  # of each token: its place in the draft, 0: the target's own
    text_ends: list[int]  # of each token: length of the text up to and with it
    counts: tuple[int, int, int]  # see Counts
    logprobs: list[dict[int, Logprob]] | None = None
    draft: list[int] | None = None  # proposed for this step; only for those who asked
    prompt_logprobs: list[Any] | None = None  # with the first piece
    ending: Ending | None = None  # with the last piece

    def can_be_joined(self, other: object) -> bool:
        """Whether what came right after it may be sent with it. Whoever asked for drafts sees every step."""
        return isinstance(other, Piece) and self.index == other.index and self.draft is None and other.draft is None

    def joined(self, other: Piece) -> Piece:
        """What two steps added, one after the other."""
        return replace(
            other,
            text=self.text + other.text,
            token_ids=self.token_ids + other.token_ids,
            draft_positions=self.draft_positions + other.draft_positions,
            text_ends=self.text_ends + other.text_ends,
            logprobs=(self.logprobs or []) + other.logprobs if other.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs,
        )

    def split(self, num_tokens: int) -> tuple[Piece, Piece]:
        """Its first tokens, and the rest; of a piece that begins with its sequence."""
        end = self.text_ends[num_tokens - 1] if num_tokens else 0
        parts = ("token_ids", "draft_positions", "text_ends")
        first = {name: getattr(self, name)[:num_tokens] for name in parts}
        rest = {name: getattr(self, name)[num_tokens:] for name in parts}
        logprobs = None if self.logprobs is None else self.logprobs[num_tokens:]
        return (
            replace(self, text=self.text[:end], logprobs=None, draft=None, ending=None, **first),
            replace(self, text=self.text[end:], logprobs=logprobs, **rest),
        )

    def packed(self) -> tuple[Any, ...]:
        return (
            *(self.job, self.index, self.text, self.token_ids, self.draft_positions, self.text_ends, self.counts),
            None if self.logprobs is None else [_packed_row(row) for row in self.logprobs],
            self.draft,
            None if self.prompt_logprobs is None else [row and _packed_row(row) for row in self.prompt_logprobs],
            self.ending,
        )

    @classmethod
    def unpacked(cls, fields: tuple[Any, ...]) -> Piece:
        piece = cls(*fields)
        if piece.logprobs is not None:
            piece.logprobs = [_row(row) for row in fields[7]]
        return piece  # its prompt_logprobs stay packed until somebody reads them: they may be many

    def prompt_rows(self) -> list[dict[int, Logprob]]:
        """Log-probabilities of the prompt's tokens from the second on, of a piece that has been unpacked."""
        return [_row(row) for row in self.prompt_logprobs or () if row is not None]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has taken the job: from here on, only faults and deadlines can end it early."""

    job: int
    prompts: list[list[int]] | None  # their tokens, where the front could not know them


@dataclass(frozen=True, slots=True)
class Brought:
    """What a step has brought everybody; also that requests get on, where nobody is told of it yet."""

    num_steps: int  # so far
    is_acceptance_dead: bool
    pieces: list[tuple[Any, ...]]
    closed: list[int]  # jobs that have ended as they should


@dataclass(frozen=True, slots=True)
class JobRefused:
    """A job has ended before its time, or was never taken."""

    job: int
    error: ApiError


@dataclass(frozen=True, slots=True)
class MetricsText:
    number: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Died:
    """The engine has ended, and not because it was told to."""

    error: ApiError


def _packed_row(row: dict[int, Logprob]) -> WireRow:
    return {token: (each.logprob, each.rank, each.decoded_token) for token, each in row.items()}


def _row(row: WireRow) -> dict[int, Logprob]:
    return {token: Logprob(*fields) for token, fields in row.items()}
