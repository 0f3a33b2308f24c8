"""How well a drafter agrees with its target: what it drafts at every place of texts that the target writes alone.
Nothing drafted is handed over, so that two drafters, or two readings of one, are measured at the same places."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from outrider.drafters.base import Drafter, no_draft
from outrider.engine.engine import Engine
from outrider.engine.pages import PagePool
from outrider.engine.policy import FixedDepth
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.sampling_params import SamplingParams, Speculation, accept_length
from outrider.tokenizer import Tokenizer
from outrider.types import Draft, Hidden, Step, Verdict

DEAD_ACCEPT_LENGTH = 1.1  # less than one token in ten drafts: it costs more than it can ever bring
MIN_PLACES = 32  # fewer drafts than this say nothing

# What is asked at load. Ordinary questions: a drafter that knows none of the answers knows another target.
QUESTIONS = (
    "Why is the sky blue?",
    "Tell me a short story about a dog.",
    "What is a good way to start the day?",
    "How do I make a cup of tea?",
    "What do plants need to grow?",
    "Write a few sentences about the sea.",
    "Name three animals and say where they live.",
    "What is a friend?",
)
SHORT_ANSWER = 16  # tokens
ENOUGH_AGREED = 24  # draft tokens: then it is alive, whatever the rest would say
# of a check-up: after the first, as many drafts as say something are enough; after the second, it ends in any case.
# On a GPU, the first steps compile kernels, which they would have to anyway.
USUAL_SECONDS, MAX_SECONDS, MAX_GPU_SECONDS = 3.0, 12.0, 60.0

OnStep = Callable[[int, int], None]  # steps done, steps at most
_ids = itertools.count()


@dataclass(frozen=True)
class DraftPlace:
    """One draft: where it was made, how many of its tokens could be judged, and how many of them were right."""

    text: int
    context_len: int  # tokens known when it was made
    drafted: int
    agreed: int


@dataclass(frozen=True)
class Agreement:
    """Every draft that was made along some texts."""

    places: tuple[DraftPlace, ...]
    texts: tuple[tuple[int, ...], ...]  # what the target said

    @property
    def mean_accept_length(self) -> float:
        """Tokens that a round would commit, over all places at which one could start."""
        return accept_length(len(self.places), sum(place.agreed for place in self.places))

    @property
    def is_dead(self) -> bool:
        return len(self.places) >= MIN_PLACES and self.mean_accept_length < DEAD_ACCEPT_LENGTH

    @cached_property
    def speculation(self) -> Speculation:
        """The rounds that an engine would go through: each starts where the one before ended."""
        total = Speculation()
        following: dict[int, int] = {}  # where the next round of each text starts
        for place in sorted(self.places, key=lambda each: (each.text, each.context_len)):
            if place.context_len >= following.get(place.text, 0):
                following[place.text] = place.context_len + place.agreed + 1
                reached = tuple(int(number < place.agreed) for number in range(place.drafted))
                total += Speculation(1, place.drafted, place.agreed, (1,) * place.drafted, reached)
        return total

    def within(self, low: int, high: int) -> Agreement:
        """The drafts made with at least `low` and fewer than `high` tokens of context."""
        return replace(self, places=tuple(each for each in self.places if low <= each.context_len < high))


class Observed(Drafter):
    """Drafts as another drafter does, writes it down, and hands nothing over: the target goes on alone."""

    recordable = False  # it writes on the host

    def __init__(self, drafter: Drafter, running: Callable[[], Sequence[Request]]) -> None:
        super().__init__()
        self._drafter = (drafter,)  # in a tuple: observed, not owned
        self._running = running
        self.taps, self.num_carried, self.lookahead = drafter.taps, drafter.num_carried, drafter.lookahead
        self.drafts: dict[Request, dict[int, list[int]]] = {}  # by the number of tokens known

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        draft = self._drafter[0].propose(step, hidden, verdict)
        requests = {request.slot: request for request in self._running()}
        slots = step.batch.slots
        columns = (slots, step.state.lengths[slots], step.emits, draft.count, draft.tokens)
        for slot, length, emits, count, tokens in zip(*(column.tolist() for column in columns), strict=True):
            if emits:
                self.drafts.setdefault(requests[slot], {})[length] = tokens[:count]
        return no_draft(step, self.lookahead)

    def agreement(self, requests: Sequence[Request]) -> Agreement:
        """So far. A draft can be judged up to the token before the last known one, which is the target's own in any
        case. While a text grows, drafts wait until they can be judged to their end."""
        places = []
        for number, request in enumerate(requests):
            for length, draft in self.drafts.get(request, {}).items():
                known = request.tokens[length:]
                if known and (request.finished or len(draft) < len(known)):
                    judged = draft[: len(known) - 1]
                    places.append(DraftPlace(number, length, len(judged), _common(judged, known)))
        return Agreement(tuple(places), tuple(tuple(request.outputs) for request in requests))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of what two sequences begin with alike."""
    return next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(left))


def measure_agreement(
    engine: Engine,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    enough: Callable[[Agreement], bool] = lambda agreement: False,
    on_step: OnStep | None = None,
) -> Agreement:
    """The target answers greedily, and the drafter drafts at every place of the answers. Any drafter that shares the
    cached layers of the engine's own will do. The engine is left as it was found."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [Request(f"follow-{next(_ids)}", list(ids), params, seed=0, end_ids=engine.end_ids) for ids in prompts]
    with _observing(engine, drafter) as observed:
        for request in requests:
            engine.add(request)
        waves = -(-len(requests) // engine.scheduler.limits.max_num_seqs)
        for number in itertools.count(1):
            engine.step()
            if on_step is not None:
                on_step(number, waves * max_tokens)
            if not engine.has_work or enough(observed.agreement(requests)):
                return observed.agreement(requests)
    raise AssertionError("unreachable")


@contextmanager
def _observing(engine: Engine, drafter: Drafter) -> Iterator[Observed]:
    """With a scheduler of its own: what one drafter wrote must not be found again by another, nor counted."""
    assert not engine.has_work, "an engine at work cannot be measured"
    before = engine.scheduler
    limits = replace(engine.scheduler.limits, prefix_caching=False)
    engine.scheduler = Scheduler(limits, PagePool(engine.scheduler.pool.num_pages))
    observed = Observed(drafter, lambda: engine.scheduler.running)
    try:
        with engine.drafting_with(FixedDepth(drafter.lookahead), observed):
            yield observed
    finally:
        for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.scheduler.abort(request)  # rounds under way are nobody's from now on: another scheduler follows
        engine.scheduler = before


def fits(engine: Engine, prompt: Sequence[int], max_tokens: int) -> bool:
    """Whether an engine has room for a prompt and its answer, and knows its tokens."""
    limits = engine.scheduler.limits
    length = len(prompt) + max_tokens
    room = engine.scheduler.pool.capacity * limits.page_size - 1 - limits.lookahead
    return bool(prompt) and max(prompt) < engine.target.vocab_size and length <= min(engine.max_model_len, room)


def has_weights(drafter: Drafter) -> bool:
    """Whether it was trained, so that it can be for another target."""
    return next(drafter.parameters(), None) is not None


def question_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """A question as the checkpoint wants to be asked; as it is, where the chat template will not have it."""
    try:
        if tokenizer.has_chat_template:
            return tokenizer.encode(tokenizer.chat([{"role": "user", "content": question}]), add_special_tokens=False)
    except ValueError:  # nobody has asked for a chat yet, so this is no time to complain
        pass
    return tokenizer.encode(question)


@dataclass(frozen=True)
class Checkup:
    """What the short examination at load found."""

    agreement: Agreement | None
    note: str

    @property
    def is_dead(self) -> bool:
        return self.agreement is not None and self.agreement.is_dead


def check_up(engine: Engine, on_step: OnStep | None = None) -> Checkup:
    """The short form of `outrider doctor`: a few short answers, fewer if the drafter soon shows that it is alive, or if
    they take long. Too few drafts to tell say nothing against a drafter: the watchdog will go on looking."""
    drafter, tokenizer = engine.drafter, engine.tokenizer
    if drafter is None or not has_weights(drafter):
        return Checkup(None, "there is no drafter with weights to check")
    if tokenizer is None:
        return Checkup(None, "the drafter was not checked: without a tokenizer there is no text to agree on")
    prompts = [question_ids(tokenizer, question) for question in QUESTIONS]
    prompts = [ids for ids in prompts if fits(engine, ids, SHORT_ANSWER)]
    if not prompts:
        return Checkup(None, "the drafter was not checked: the context is too short for a question and its answer")
    most = MAX_SECONDS if engine.runner.device.type == "cpu" else MAX_GPU_SECONDS
    begin = time.monotonic()

    def enough(agreement: Agreement) -> bool:
        if sum(place.agreed for place in agreement.places) >= ENOUGH_AGREED:
            return True
        seconds = time.monotonic() - begin
        return seconds >= (USUAL_SECONDS if len(agreement.places) >= MIN_PLACES else most)

    agreement = measure_agreement(engine, drafter, prompts, SHORT_ANSWER, enough=enough, on_step=on_step)
    found = f"accept length {agreement.mean_accept_length:.2f} over {len(agreement.places)} drafts"
    return Checkup(agreement, found)
