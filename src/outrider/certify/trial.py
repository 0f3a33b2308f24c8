"""One world of the differential fuzz as it happens: requests come and go, steps are broken off, memory is taken for
spoilt, a clock says anything. What everybody was told is then compared with what the target says plainly."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.certify.comparison import compare
from outrider.certify.hints import guide
from outrider.certify.random_depth import RandomDepth
from outrider.certify.worlds import MAX_MODEL_LEN, World, WorldRequest
from outrider.config import EngineConfig, SpeculativeConfig, WatchdogConfig
from outrider.engine.engine import Engine
from outrider.engine.flight import Flight
from outrider.engine.governor import Governor
from outrider.engine.policy import DepthPolicy, FixedDepth
from outrider.engine.request import Progress, Request, Work
from outrider.engine.stopwatch import Stopwatch
from outrider.engine.watchdog import Watchdog
from outrider.llm import LLM
from outrider.outputs import CompletionOutput
from outrider.sampling_params import SamplingParams
from outrider.server.faults import blame, discard
from outrider.types import Outcome

NERVOUS = WatchdogConfig(dead_acceptance=0.4, window=2, engine_window=4, pause=3)
MAX_STEPS = 20_000  # of a world: more would be for ever

Answers = Mapping[int, Sequence[Request]]  # by the number of what was asked


class InjectedFaultError(RuntimeError):
    """Broken off on purpose."""


@dataclass(frozen=True)
class Pair:
    """A target and a drafter, or none."""

    name: str
    config: EngineConfig
    speculative: SpeculativeConfig | None


@dataclass
class FuzzFigures:
    """What was tried: a fuzz in which something never happened has not shown that it does no harm."""

    worlds: int = 0
    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    given_up: int = 0
    guided: int = 0
    predicted: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    rebuilds: int = 0
    faults: int = 0
    recorded_rounds: int = 0
    seconds: float = 0.0

    def add(self, other: FuzzFigures) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def doubts(self) -> list[str]:
        """What should have happened, and did not."""
        wanted = ("tokens", "accepted", "given_up", "cached_tokens", "preemptions", "rebuilds", "faults")
        missing = [f"no {name.replace('_', ' ')}" for name in wanted if not getattr(self, name)]
        return missing + (["nothing rejected"] if self.drafted and self.accepted == self.drafted else [])


@dataclass(frozen=True)
class Failure:
    """A world in which somebody was told something else, or that broke."""

    pair: str
    world: World
    request: int | None  # None: the engine itself
    what: str

    @property
    def numbers(self) -> list[int]:
        return [each.number for each in self.world.asked]


class WorldTrial:
    """One world as it happens."""

    def __init__(self, world: World, pair: Pair, answers: Answers) -> None:
        self.world, self.pair, self.answers = world, pair, answers
        self.figures = FuzzFigures(worlds=1)
        self._chance = random.Random(f"{world.seed} happens")
        self._llm = open_engine(world, pair)
        self._running: dict[int, list[Request]] = {}
        self._given_up: set[int] = set()
        self._armed: str | None = None
        self._guilty: Request | None = None  # breaks every step
        self._torn: Request | None = None  # the host broke off in the middle of it
        self._prepare(self._llm.engine)

    def close(self) -> None:
        self._llm.close()

    def happen(self) -> None:
        engine = self._llm.engine
        last = max((each.arrives for each in self.world.asked), default=0)
        for step in range(MAX_STEPS):
            self._let_come_and_go(step)
            self._disturb(step)
            try:
                engine.step()
            except InjectedFaultError:
                self._recover()
            if step >= last and not engine.has_work:
                break
        else:
            raise RuntimeError(f"after {MAX_STEPS} steps there is still work")
        engine.step()  # whatever is still under way has nobody to land for
        self._count(engine)

    # what happens

    def _let_come_and_go(self, step: int) -> None:
        for asked in self.world.asked:
            if asked.arrives == step:
                made = self._llm.requests_for(list(asked.prompt), self._params(asked), asked.number)
                self._running[asked.number] = made
                for request in made:
                    self._llm.engine.add(request)
            if asked.leaves is not None and step == asked.arrives + asked.leaves:
                for request in self._running[asked.number]:
                    if not request.finished:
                        self._give_up(asked.number, request)

    def _give_up(self, number: int, request: Request) -> None:
        self._given_up.add(number)
        discard(self._llm.engine, request)

    def _disturb(self, step: int) -> None:
        running = self._llm.engine.scheduler.running
        if step in self.world.rebuilds and running:
            self._chance.choice(running).standing.needs_rebuild = True
            self.figures.rebuilds += 1
        fault = self.world.faults.get(step)
        if fault in ("logits", "propose") and self._llm.config.torch_device.type == "cuda":
            fault = "append"  # nothing may be broken off while a CUDA graph is recorded
        if fault == "guilty" and running:
            self._guilty = self._chance.choice(running)
        self._armed = fault or self._armed

    def _break_off(self, where: str) -> None:
        if self._armed == where:
            self._armed = None
            self.figures.faults += 1
            raise InjectedFaultError(where)

    def _break_append(self, request: Request) -> None:
        """The host breaks off after the next token of a request: some of what is kept for it may be missing."""
        append = request.append

        def broken(*given: Any) -> None:
            append(*given)
            del request.append
            self._torn = request
            self._break_off("append")

        request.append = broken  # type: ignore[method-assign, assignment]

    def _recover(self) -> None:
        """As the server does: those to blame are taken out, the others go on from the tokens that they have."""
        self._armed = None
        for request in blame(self._llm.engine):
            if request not in (self._guilty, self._torn):
                raise RuntimeError(f"{request.request_id} is blamed for what it has not done")
            (number,) = [number for number, made in self._running.items() if request in made]
            self._give_up(number, request)
            self.figures.faults += request is self._guilty
            self._guilty = self._guilty if request is not self._guilty else None
        self._torn = None

    def _params(self, asked: WorldRequest) -> SamplingParams:
        """With what its client thinks it will be told, where there is room for such drafts."""
        if asked.predicts is None or self._llm.engine.drafting.predicting is None:
            return asked.params
        vocab_size = self._llm.target.vocab_size
        said = self.answers[asked.number][0].outputs
        guess = [token if self._chance.random() < asked.predicts else (token + 7) % vocab_size for token in said]
        return replace(asked.params, prediction=guess)

    # the engine

    def _prepare(self, engine: Engine) -> None:
        drafter, logits, commit = engine.drafter, engine.target.logits, engine._commit

        def breaking_logits(*given: Any) -> Any:
            self._break_off("logits")
            return logits(*given)

        def breaking_commit(work: Work, outcome: Outcome) -> Progress:
            if work.request is self._guilty:
                raise InjectedFaultError("guilty")
            if self._armed == "append":
                self._break_append(work.request)
            return commit(work, outcome)

        engine.target.logits = breaking_logits  # type: ignore[method-assign, assignment]
        engine._commit = breaking_commit  # type: ignore[method-assign]
        engine.stopwatch = MadeUpTime(self._chance)
        if drafter is None:
            return
        texts = [[*each.prompt, *each.outputs] for made in self.answers.values() for each in made]
        guide(drafter, texts, engine.target.vocab_size, self.world.skill)
        propose = drafter.propose

        def breaking_propose(*given: Any) -> Any:
            self._break_off("propose")
            return propose(*given)

        drafter.propose = breaking_propose  # type: ignore[method-assign, assignment]
        engine.drafting.policy = self._policy(engine)
        if self.world.watchdog_acts:
            engine.watchdog = Watchdog(NERVOUS, acts=True, rebuilds=not drafter.reads_tokens_only)

    def _policy(self, engine: Engine) -> DepthPolicy:
        if self.world.policy == "restless":
            return RandomDepth(engine.lookahead, self._chance.randrange(100))
        if self.world.policy == "adaptive":
            return Governor(engine.lookahead, engine.cache.shape.num_slots)
        return FixedDepth(engine.lookahead)

    # afterwards

    def _count(self, engine: Engine) -> None:
        figures = self.figures
        for asked in self.world.asked:
            for request in self._running[asked.number]:
                figures.requests += 1
                figures.tokens += request.num_outputs
                figures.rounds += request.rounds
                figures.drafted += sum(request.drafted_at)
                figures.accepted += sum(request.accepted_at)
                figures.guided += request.guide is not None
                figures.predicted += request.num_predicted
                figures.cached_tokens += request.num_cached
        figures.given_up = len(self._given_up)
        figures.preemptions = engine.scheduler.num_preemptions
        figures.rebuilds += engine.watchdog.counts.rebuilds if engine.watchdog is not None else 0
        figures.recorded_rounds = engine.num_recorded_rounds

    def first_difference(self, tolerance: float) -> Failure | None:
        for asked in self.world.asked:
            pairs = zip(self.answers[asked.number], self._running[asked.number], strict=True)
            for index, (plain, found) in enumerate(pairs):
                what = difference(plain, found, index, tolerance)
                if what is not None:
                    return Failure(self.pair.name, self.world, asked.number, what)
        return None

    def leftovers(self) -> Failure | None:
        """Nothing may stay behind when everybody has left."""
        pool = self._llm.engine.scheduler.pool
        pool.check()
        if pool.num_free != pool.capacity:
            return Failure(self.pair.name, self.world, None, f"{pool.capacity - pool.num_free} pages were not freed")
        return None


def difference(plain: Request, found: Request, index: int, tolerance: float) -> str | None:
    """What is not the same, in words. Of a request that was given up, as far as it came."""
    own, other = plain.output(index), found.output(index)
    if found.finish_reason == "abort":
        own = _cut(own, len(other.token_ids))
        other = replace(other, finish_reason=None, stop_reason=None, text="")
    apart = compare(own, other, tolerance)
    if apart is not None:
        return f"{apart.kind} {apart.position} of answer {index}: {apart.plain!r} plainly, {apart.speculative!r} here"
    if found.finish_reason != "abort" and plain.prompt_logprobs != found.prompt_logprobs and tolerance == 0:
        return "log-probabilities of the prompt differ"
    return None


def _cut(output: CompletionOutput, count: int) -> CompletionOutput:
    logprobs = output.logprobs[:count] if output.logprobs is not None else None
    ids = output.token_ids[:count]
    return replace(output, token_ids=ids, logprobs=logprobs, finish_reason=None, stop_reason=None, text="")


class MadeUpTime(Stopwatch):
    """Rounds take any time, for a while more and for a while less."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance, self._pace = chance, 1e-3

    def lap(self, flight: Flight, end: float) -> float:
        if self._chance.random() < 0.02:
            self._pace = self._chance.choice([1e-4, 1e-3, 1e-2])
        return self._pace * self._chance.uniform(0.5, 1.5)


# opening


def open_engine(world: World, pair: Pair) -> LLM:
    settings: dict[str, Any] = {**world.settings, "max_model_len": MAX_MODEL_LEN, "watchdog": NERVOUS}
    speculative = pair.speculative
    if speculative is not None:
        speculative = replace(speculative, num_speculative_tokens=world.num_speculative_tokens, force=True)
    llm = LLM.from_config(settled(pair.config, speculative, settings))
    if world.spare_pages is None:
        return llm
    lookahead, page_size = llm.engine.lookahead, world.settings["page_size"]
    num_pages = -(-(MAX_MODEL_LEN + 1 + lookahead) // page_size) + world.spare_pages
    memory = (num_pages + 1) * llm.budget.page_bytes  # one page belongs to nobody
    llm.close()
    return LLM.from_config(settled(pair.config, speculative, {**settings, "kv_cache_memory": memory}))


def settled(config: EngineConfig, speculative: SpeculativeConfig | None, settings: dict[str, Any]) -> EngineConfig:
    """On a GPU bits must not depend on company, or ties would be decided either way."""
    exact = config.exact or config.torch_device.type == "cuda"
    return replace(config, speculative=speculative, exact=exact, **settings)
