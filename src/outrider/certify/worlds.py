"""Random worlds for the differential fuzz: an engine's settings, the strain it is under, and requests that come and go
with any sampling options. All of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.sampling_params import Guided, SamplingParams

MAX_MODEL_LEN = 96  # of all worlds, so that one plain engine can answer for them all
FAULTY = ("logits", "propose", "append", "guilty")  # where a step is broken off; guilty: one request breaks every step
POLICIES = ("fixed", "restless", "adaptive")
GUIDED = (
    Guided(choice=["yes", "no", "yes and no"]),
    Guided(regex="[a-d]{1,6}(xyz|xy)?[0-9]{2,8}"),
    Guided(regex="(one|two|three)( and (one|two|three)){1,5}"),
    Guided(json_object=True),
    Guided(json_schema={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["long text", 7]}},
                        "required": ["a", "b"], "additionalProperties": False}),
    Guided(json_schema={"type": "array", "items": {"type": "boolean"}, "maxItems": 4}),
    Guided(grammar='root ::= "(" root ")" | [a-z]{1,3}'),
    Guided(choice=["left", "right"], after="e"),
)  # fmt: skip


@dataclass(frozen=True)
class Ground:
    """What requests can be made of: facts about the target."""

    vocab_size: int
    has_text: bool = False  # a tokenizer
    has_grammars: bool = False


@dataclass(frozen=True)
class WorldRequest:
    """A request, and when it comes and goes, in steps of the engine."""

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int
    leaves: int | None = None  # so many steps later it is given up
    predicts: float | None = None  # its client predicts the answer, each token right with this probability


@dataclass(frozen=True)
class World:
    seed: str
    settings: dict[str, Any]  # of the engine
    num_speculative_tokens: int
    spare_pages: int | None  # of a cache that holds little more than one request; None: there is enough
    policy: str
    skill: float  # how often a token of a hinted draft is right
    watchdog_acts: bool
    faults: dict[int, str] = field(default_factory=dict)  # by step
    rebuilds: tuple[int, ...] = ()  # steps after which somebody's memory is taken for spoilt
    asked: tuple[WorldRequest, ...] = ()

    def with_only(self, numbers: Sequence[int]) -> World:
        """This world with only some of its requests."""
        return replace(self, asked=tuple(each for each in self.asked if each.number in numbers))


def draw_world(seed: str, ground: Ground, num_requests: int = 16, *, records: bool = False) -> World:
    """The world that follows from a seed. `records`: rounds may be recorded there."""
    chance = random.Random(seed)
    spare = chance.choice([None, None, 0, 2, 6])
    settings = {
        "page_size": chance.choice([1, 4, 8, 16]),
        "max_num_seqs": chance.choice([1, 2, 4, 4, 8]),
        "max_num_batched_tokens": chance.choice([8, 16, 48, 512]),
        "enable_prefix_caching": chance.random() < 0.7,
        "snapshot_interval": chance.choice([4, 16, 64]),
        "num_snapshots": chance.choice([None, 0, 2, 8]),
        "num_predicted_tokens": chance.choice([2, 16]),
        "enforce_eager": not (records and chance.random() < 0.6),
    }
    step, asked, stems = 0, [], [_tokens(chance, ground, chance.randint(4, 40)) for _ in range(3)]
    for number in range(num_requests):
        asked.append(_ask(chance, ground, stems, number, step))
        step += chance.choice([0, 0, 1, 2, 5, 12])
    return World(
        seed=seed,
        settings=settings,
        num_speculative_tokens=chance.choice([1, 2, 3, 5, 7]),
        spare_pages=spare,
        policy=chance.choice(POLICIES),
        skill=chance.choice([0.0, 0.5, 0.8, 0.95, 1.0]),
        watchdog_acts=chance.random() < 0.5,
        faults={chance.randrange(1, step + 20): chance.choice(FAULTY) for _ in range(chance.choice([0, 0, 1, 3]))},
        rebuilds=tuple(chance.randrange(1, step + 20) for _ in range(chance.choice([0, 1, 4]))),
        asked=tuple(asked),
    )


def _ask(chance: random.Random, ground: Ground, stems: Sequence[list[int]], number: int, step: int) -> WorldRequest:
    stem = chance.choice(stems)
    tail = _tokens(chance, ground, chance.choice([1, 1, 2, 5, 17]))
    prompt = (stem[: chance.randint(0, len(stem))] + tail * chance.choice([1, 1, 3]))[:72]
    guided = ground.has_grammars and chance.random() < 0.3
    params = _guided_params(chance) if guided else _params(chance, ground, prompt)
    return WorldRequest(
        number=number,
        prompt=tuple(prompt),
        params=replace(params, n=chance.choice([1] * 6 + [2, 3])),
        arrives=step,
        leaves=chance.randint(0, 12) if chance.random() < 0.12 else None,
        predicts=chance.choice([0.5, 0.9, 1.0]) if chance.random() < 0.12 else None,
    )


def _params(chance: random.Random, ground: Ground, prompt: Sequence[int]) -> SamplingParams:
    """Any options, in any company."""
    given = _usual(chance)

    def maybe(share: float, **options: Any) -> None:
        if chance.random() < share:
            given.update(options)

    common = [*prompt, *_tokens(chance, ground, 8)]
    maybe(0.25, top_k=chance.choice([1, 2, 20, ground.vocab_size + 5]))
    maybe(0.25, top_p=chance.choice([0.1, 0.6, 0.95]))
    maybe(0.2, min_p=chance.choice([0.02, 0.3]))
    maybe(0.2, repetition_penalty=chance.choice([0.8, 1.2, 2.0]))
    maybe(0.2, presence_penalty=chance.choice([-1.0, 0.7]))
    maybe(0.2, frequency_penalty=chance.choice([-0.5, 0.4]))
    maybe(0.2, logit_bias={token: chance.choice([-100.0, -2.0, 3.0]) for token in chance.choices(common, k=4)})
    words = [chance.choices(common, k=chance.choice([1, 2, 3])) for _ in range(chance.choice([1, 6, 40]))]
    maybe(0.2, bad_words=words)
    maybe(0.1, allowed_token_ids=sorted({*chance.choices(common, k=6), *_tokens(chance, ground, 20)}))
    maybe(0.25, stop_token_ids=chance.choices(common, k=chance.choice([1, 8, 20])))
    maybe(0.2, min_tokens=chance.randint(0, given["max_tokens"] or 8))
    if ground.has_text:
        maybe(0.25, stop=chance.choices(["a", "e", " the", ". ", "\n", "and"], k=2))
        maybe(0.2, include_stop_str_in_output=True)
    return SamplingParams(**given)


def _guided_params(chance: random.Random) -> SamplingParams:
    given = {**_usual(chance), "ignore_eos": chance.random() < 0.1, "max_tokens": chance.choice([4, 16, 40])}
    if chance.random() < 0.3:
        given |= {"top_p": 0.9, "presence_penalty": 0.5}
    return SamplingParams(**given, guided=chance.choice(GUIDED))


def _usual(chance: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5]),
        "seed": chance.randrange(2**40),
        "max_tokens": chance.choice([1, 2, 6, 12, 20, 30, 30, None]),
        "ignore_eos": chance.random() < 0.5,
        "logprobs": chance.choice([None, None, None, 0, 3]),
        "prompt_logprobs": chance.choice([None] * 9 + [1]),
        "num_speculative_tokens": chance.choice([None, None, None, None, 0, 1, 2]),
        "tenant": chance.choice([None, None, "one", "other"]),
    }
    return given


def _tokens(chance: random.Random, ground: Ground, count: int) -> list[int]:
    """Few different ones, so that texts repeat themselves and others."""
    few = [chance.randrange(3, ground.vocab_size) for _ in range(6)]
    return [chance.choice(few) if chance.random() < 0.8 else chance.randrange(ground.vocab_size) for _ in range(count)]
