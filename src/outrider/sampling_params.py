"""What one request may ask of the sampler, in the names that vLLM and OpenAI users know."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from outrider.compatibility.rules import accepting
from outrider.compatibility.sampling import SAMPLING, STRUCTURED

MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_N = 256
MAX_WHITESPACE = 64
PROMPT_TAIL = 16  # tokens at the end of a prompt that show whether it has opened what a grammar leaves free
MAX_PREDICTION = 2**18  # characters; tokens may be bytes, so four times as many
# the least and the most that a field may be, here and at the server
BOUNDS: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**63 - 1),
    "repetition_penalty": (1e-3, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "max_tokens": (1, 2**31),
    "min_tokens": (0, 2**31),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "num_speculative_tokens": (0, 1024),
    "logit_bias": (-1e4, 1e4),  # of each token
    "max_whitespace": (1, MAX_WHITESPACE),  # of guided
}


@dataclass(frozen=True)
class Guided:
    """What an answer must look like: exactly one of the first six. Needs the extra "serve"."""

    json_schema: Mapping[str, Any] | str | None = None  # oneOf is taken as anyOf
    json_object: bool = False  # any JSON object
    regex: str | None = None  # the whole answer matches
    choice: Sequence[str] | None = None  # the answer is one of these
    grammar: str | None = None  # EBNF; its first rule is called root
    structural_tag: Mapping[str, Any] | None = None  # the format in one, as xgrammar has it, without free text
    after: str | None = None  # text such as "</think>" before which the answer is free; None: bound from the start
    opening: str | None = None  # with after: free only where this text ends the prompt or begins the answer
    max_whitespace: int = 1  # characters between two parts of a JSON text: many models write nothing else otherwise
    close: bool = True  # JSON that would be cut by max_tokens is closed in time, as shortly as the schema allows

    def __post_init__(self) -> None:
        if self.kind == "" or len(self._given) > 1:
            known = "json_schema, json_object, regex, choice, grammar or structural_tag"
            raise ValueError(f"guided needs exactly one of {known}, not {', '.join(self._given) or 'none'}")
        if not isinstance(self.json_object, bool):
            raise ValueError(f"guided: json_object must be true or false, not {self.json_object!r}")
        _check_range("guided: max_whitespace", self.max_whitespace, *BOUNDS["max_whitespace"])
        if not isinstance(self.json_schema, Mapping | str | None):
            raise ValueError(f"guided: json_schema must be a JSON object or its text, not {self.json_schema!r}")
        if not isinstance(self.structural_tag, Mapping | None):
            raise ValueError(f"guided: structural_tag must be a JSON object, not {self.structural_tag!r}")
        if self.opening is not None and self.after is None:
            raise ValueError("guided: opening needs after, the text that ends what it opens")
        for name in ("regex", "grammar", "after", "opening"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise ValueError(f"guided: {name} must be text that is not empty, not {text!r}")
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(text, str) and text for text in self.choice):
                raise ValueError("guided: choice must be a list of texts, none of them empty")
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def kind(self) -> str:
        """Which of them is given."""
        return next(iter(self._given), "")

    @property
    def _given(self) -> list[str]:
        kinds = ("json_schema", "regex", "choice", "grammar", "structural_tag")
        flags = ["json_object"] if self.json_object else []
        return [name for name in kinds if getattr(self, name) is not None] + flags


@accepting(STRUCTURED)
@dataclass
class StructuredOutputsParams:
    """What an answer must look like, in vLLM's names: exactly one of the first six."""

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_additional_properties: bool = False  # they are left out in any case

    def __post_init__(self) -> None:
        self.guided()

    def guided(self) -> Guided:
        """What is asked for as a Guided, checked."""
        return Guided(
            json_schema=self.json,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            structural_tag=_tag(self.structural_tag),
        )


def _tag(given: Mapping[str, Any] | str | None) -> Mapping[str, Any] | None:
    """A structural tag's format. As text or not, xgrammar's own form has a frame around it."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"structural_tag is not valid JSON ({error}); correct it") from error
    is_framed = isinstance(given, Mapping) and given.get("type") == "structural_tag" and "format" in given
    return given["format"] if isinstance(given, Mapping) and is_framed else given  # type: ignore[return-value]


GuidedDecodingParams = StructuredOutputsParams  # what vLLM called it before


class BeamSearchParams:
    """vLLM has a beam search; here it is refused by name."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError("there is no beam search: use SamplingParams with n and a temperature, and choose")


class RequestOutputKind(Enum):
    """What a stream brings each time: all there is, or what is new; or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@accepting(SAMPLING)
@dataclass
class SamplingParams:
    """A request goes by what its params say when it is made; changing them later changes later requests. Where None has
    no meaning of its own, it is the default."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one, reported with the output
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()  # texts, or token ids
    allowed_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_special_ids: Sequence[int] = ()  # those are text all the same, as markers of tool calls are
    detokenize: bool = True  # otherwise there is no text, and no stop string is found
    extra_args: dict[str, float] | None = None  # sampling filters of your own, by name: docs/adding.md
    guided: Guided | None = None  # what the answer must look like; has the last word over the options above
    structured_outputs: StructuredOutputsParams | None = None  # the same in vLLM's names
    logprobs: int | None = None  # the target's own, before any option; 0: the chosen token's alone
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None  # at most the engine's; 0: no speculation for this request
    prediction: str | Sequence[int] | None = None  # what the answer will be like, as text or token ids: is the draft
    tenant: str | None = None  # drafts learn from earlier requests of the same tenant only
    learn: bool = False  # a drafter that learns online may learn from this answer
    trace: bool = False  # keep every round's draft and how much of it was accepted
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of a stream

    def __post_init__(self) -> None:
        self._fill_in()
        for name, bounds in BOUNDS.items():
            if name in vars(self) and name != "logit_bias":
                _check_range(name, getattr(self, name), *bounds)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}): lower one of them"
            )
        if not isinstance(self.guided, Guided | None):
            raise ValueError(f"guided must be a Guided, not {self.guided!r}")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(f"structured_outputs must be a StructuredOutputsParams, not {self.structured_outputs!r}")
        if self.guided is not None and self.structured_outputs is not None:
            raise ValueError("guided and structured_outputs say the same thing twice: give one of them")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}")
        if not isinstance(self.extra_args, dict | None):
            raise ValueError(f"extra_args must be a dict: numbers of sampling filters, not {self.extra_args!r}")
        if self.prediction is not None:
            _check_prediction(self.prediction)
        if not isinstance(self.tenant, str | None):
            raise ValueError(f"tenant must be a name, not {self.tenant!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("stop holds an empty string or something that is not text; remove it")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are taken")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: nothing could be generated; leave it out to allow all")
        if any(not word for word in self.bad_words):
            raise ValueError("bad_words holds an empty entry; remove it")
        for token, bias in (self.logit_bias or {}).items():
            _check_range(f"logit_bias[{token}]", bias, *BOUNDS["logit_bias"])

    def _fill_in(self) -> None:
        """Gives fields that are None their defaults, and copies lists."""
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        self.stop_token_ids, self.bad_words = list(self.stop_token_ids), list(self.bad_words)
        if self.logit_bias is not None:
            self.logit_bias = {
                int(token) if isinstance(token, str) else token: bias for token, bias in self.logit_bias.items()
            }
        if isinstance(self.structured_outputs, Mapping):
            self.structured_outputs = StructuredOutputsParams(**self.structured_outputs)
        if self.seed == -1:  # vLLM's way to say None
            self.seed = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """The same as the class itself, which takes None for everything; vLLM's does not."""
        return cls(**given)

    def clone(self) -> SamplingParams:
        """A copy of the params as they are now, checked again: anything may have been set."""
        return replace(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)


_DEFAULTS = {
    each.name: each.default
    for each in fields(SamplingParams)
    if each.default not in (None, MISSING) and each.name != "max_tokens"
}


_WHOLE = {
    "guided: max_whitespace",
    "n",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "num_speculative_tokens",
}


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None and name in {"seed", "max_tokens", "logprobs", "prompt_logprobs", "num_speculative_tokens"}:
        return
    kinds = (int,) if name in _WHOLE else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be {'a whole' if name in _WHOLE else 'a finite'} number, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, not {value!r}")


def _check_prediction(prediction: str | Sequence[int]) -> None:
    if not isinstance(prediction, str | Sequence):
        raise ValueError(f"prediction must be text or a list of token ids, not {prediction!r}")
    most = MAX_PREDICTION if isinstance(prediction, str) else 4 * MAX_PREDICTION
    if len(prediction) > most:
        raise ValueError(f"prediction is {len(prediction)} long; at most {most} are taken: shorten it")


def accept_length(rounds: int, accepted: int, ended: int = 0) -> float:
    """Tokens committed per round: the drafts that stood and the target's own, but for the rounds that `ended` with a
    draft's token because the answer did. 1 where there were no rounds."""
    return 1 + (accepted - ended) / rounds if rounds else 1.0


@dataclass(frozen=True)
class Speculation:
    """How drafting went for one request."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: tuple[int, ...] = field(default=())
    accepted_at: tuple[int, ...] = field(default=())
    predicted: int = 0  # of the drafted, those from the request's own prediction
    accepted_predicted: int = 0
    ended: int = 0  # rounds whose last token is the draft's: the answer ended there

    @property
    def accept_length(self) -> float:
        return accept_length(self.rounds, self.accepted, self.ended)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Of the rounds that drafted this far, the share that was accepted this far."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def __add__(self, other: Speculation) -> Speculation:
        def total(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
            size = max(len(left), len(right))
            padded = [tuple(x) + (0,) * (size - len(x)) for x in (left, right)]
            return tuple(a + b for a, b in zip(*padded, strict=True))

        return Speculation(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            total(self.drafted_at, other.drafted_at),
            total(self.accepted_at, other.accepted_at),
            self.predicted + other.predicted,
            self.accepted_predicted + other.accepted_predicted,
            self.ended + other.ended,
        )
