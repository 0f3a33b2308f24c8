"""The engine: requests go in, and step by step their tokens come out.
One step is one round of every running request."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafters.base import Drafter
from outrider.engine.cache import NUM_MISSABLE, Cache, CacheShape
from outrider.engine.governor import Governor
from outrider.engine.grammar import Grammars, Guide
from outrider.engine.graphs import MAX_FLYING, Flight, Graphs
from outrider.engine.logprobs import add_prompt_logprobs, logprob_table
from outrider.engine.memory import Budget
from outrider.engine.pages import PagePool
from outrider.engine.request import Outcome, Request
from outrider.engine.rest import catch_up, is_behind, rests
from outrider.engine.runner import Runner
from outrider.engine.sampler import Masks, adjust, sample
from outrider.engine.scheduler import Limits, Scheduler, Work
from outrider.engine.verify import pretend, verify
from outrider.engine.watchdog import Watchdog
from outrider.kernels.dispatch import has_triton
from outrider.kernels.sampling import choose
from outrider.models.base import Target
from outrider.sampling_params import Guided, SamplingParams
from outrider.tokenizer import Tokenizer
from outrider.types import Draft, Hidden, Step, Verdict

WARM_UP_LENGTHS = (2, 6, 12, 24, 48, 200)  # few rows, some, many: each have kernels of their own


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        drafter: Drafter | None,
        budget: Budget,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.predicting: Drafter | None = None  # in steps with requests that bring a prediction
        self.lookahead = drafter.lookahead if drafter is not None else 0
        self.taps = drafter.taps if drafter is not None else ()
        self.max_model_len = budget.max_model_len
        self.end_ids: frozenset[int] = frozenset()
        self._grammars: Grammars | None = None  # made with the first guided request
        dtype = next(target.parameters()).dtype
        shape = CacheShape(
            num_pages=budget.num_pages,
            page_size=config.page_size,
            num_slots=config.max_num_seqs + 1,
            # rounds that are under way when a request ends go on a little
            max_len=budget.max_model_len + (1 + self.lookahead) * (1 + MAX_FLYING),
            num_taps=len(self.taps),
            hidden_size=target.hidden_size,
            lookahead=self.lookahead,
            num_axes=target.num_position_axes,
            num_carried=drafter.num_carried if drafter is not None else 1,
            num_missable=NUM_MISSABLE,
        )
        models = [target] if drafter is None else [target, drafter]
        self.cache = Cache(shape, models, config.torch_device, dtype)
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            # every running request must be able to move in every step
            max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs * (1 + self.lookahead)),
            max_model_len=self.max_model_len,
            page_size=config.page_size,
            lookahead=self.lookahead,
            # a page holds keys and values; a recurrent state would have to be recomputed from the start anyway
            prefix_caching=config.enable_prefix_caching and not self.cache.recurrent,
        )
        self.scheduler = Scheduler(limits, PagePool(budget.num_pages))
        self.runner = Runner(self.cache, target.vocab_size, config.torch_device)
        self.watchdog = _watchdog(config, drafter)
        self.governor = Governor(self.lookahead) if is_adaptive(config.speculative) and self.lookahead else None
        settings = config.speculative
        self._pretence = settings.synthetic_acceptance_length if settings is not None else None
        self._graphs: Graphs | None = None
        if records(config) and self._is_recordable:
            self._graphs = Graphs(self.runner, self._recorded_round, config.max_num_seqs)

    def guide(self, guided: Guided, prompt: Sequence[int] = ()) -> Guide:
        """What a guided request needs; a ValueError where it asks for what cannot be had."""
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.target.vocab_size, self.end_ids)
        return self._grammars.guide(guided, prompt)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        if not request.finished:
            self.scheduler.abort(request)
            self._learn(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One round; returns the requests that have something new."""
        flight = self._fly()
        if flight is not None:
            return self._land(flight)
        plan = self.scheduler.next()
        if not plan:
            return []
        begin = time.perf_counter()
        self._place(plan)
        depth = self._depth([work.request for work in plan if work.emits])
        resting = self.drafter is not None and rests(self.drafter, self.cache, plan, depth)
        if self.drafter is not None and not resting:
            catch_up(self.drafter, self.cache, self.runner, [work.request for work in plan])
        step = self.runner.pack(plan, depth)
        hidden = self.target(step.batch, self.taps)
        logits, choice = self._choose(plan, step, hidden)
        verdict = verify(step, self._pretended(choice, step))
        self.cache.commit(step, verdict)
        draft = self._draft(step, hidden, verdict, resting=resting)
        add_prompt_logprobs(plan, hidden, self.target, self.tokenizer)
        accepted = self._update(plan, verdict, draft, logits, missed=resting and self._follows)
        if self.governor is not None and all(work.is_round for work in plan):
            self.governor.note(accepted, depth, begin, time.perf_counter())
        self._heal(plan)
        return [work.request for work in plan if work.emits]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """On a GPU: compiles kernels and records rounds, so that the first requests do not wait for it."""
        if self._graphs is not None:
            self._graphs.warm_up({0, self.lookahead} if self.governor is None else self.governor.depths)
        elif self.runner.device.type == "cpu":
            return
        room = self.scheduler.pool.capacity * self.scheduler.limits.page_size - 1 - self.lookahead
        room = min(self.max_model_len, room)
        governor, self.governor = self.governor, None  # nothing is to be learnt from this
        for length in WARM_UP_LENGTHS:  # neither prompts are recorded, nor what a drafter sees after a rest
            self._run_alone(min(length, room - 2), 2)
            self._run_alone(2, min(length, NUM_MISSABLE, room - 2), num_drafts=0)
        self.governor = governor

    def _run_alone(self, prompt_len: int, max_tokens: int, num_drafts: int | None = None) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, num_speculative_tokens=num_drafts)
        request = Request(f"warm-up-{prompt_len}-{max_tokens}", [0] * prompt_len, params, seed=0)
        self.add(request)
        while not request.finished:
            if self.drafter is not None and request.num_missed == max_tokens - 2:
                catch_up(self.drafter, self.cache, self.runner, [request])
            self.step()

    # rounds that are recorded once and replayed

    @property
    def _is_recordable(self) -> bool:
        """A drafter may be put in another's place for a while."""
        return self.drafter is None or self.drafter.recordable

    def _recorded_round(self, step: Step) -> tuple[Tensor, Tensor]:
        """The same as a step, for requests that all decode, in few launches."""
        from outrider.kernels.gpu import bookkeeping  # only a GPU has recorded rounds

        batch, cache = step.batch, self.cache
        hidden = self.target(batch, self.taps)
        logits = self.target.logits(hidden.last)
        adjusted = adjust(logits, step.sampling, batch, step.logit_rows.flatten(), step.state)
        choice = choose(adjusted, step.sampling, batch.request, batch.indices + 1)
        verdict = bookkeeping.settle(step, self._pretended(choice.view_as(step.logit_rows), step))
        if self.drafter is None or not step.depth:  # there is no drafter, or it rests
            cache.miss(step, hidden)
            return bookkeeping.note(step, verdict, None, None), logits
        if self.taps:
            hidden.carry = cache.carry[batch.slots]
            bookkeeping.keep_taps(step, hidden.taps, hidden.carry, verdict, (cache.carry, cache.tails))
        draft = self.drafter.propose(step, hidden, verdict)
        return bookkeeping.note(step, verdict, draft.tokens, draft.count), logits

    def _pretended(self, choice: Tensor, step: Step) -> Tensor:
        return choice if self._pretence is None else pretend(choice, step, self._pretence)

    @property
    def num_recordings(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_recordings

    @property
    def num_recorded_rounds(self) -> int:
        """How many rounds were replayed from recordings."""
        return 0 if self._graphs is None else self._graphs.num_launched

    def replay_ms(self, count: int) -> float | None:
        """Device time of the last recorded round, replayed back to back: a measurement that spoils the requests."""
        return None if self._graphs is None else self._graphs.replay_ms(count)

    def _fly(self) -> Flight | None:
        """The next recorded round that lands, if there is one."""
        if self._graphs is None or not self._is_recordable:
            return None
        flight = self._graphs.fly(self._steady, self._place_pages)
        if flight is not None or self.drafter is None:
            return flight
        requests = self.scheduler.steady(0)
        if not is_behind(self.drafter, self.cache, requests, self._depth(requests), 1):
            return None
        catch_up(self.drafter, self.cache, self.runner, requests)
        return self._graphs.fly(self._steady, self._place_pages)

    def _steady(self, num_ahead: int) -> tuple[list[Request], int]:
        """See Graphs.fly(). A drafter that has missed too much must see it first."""
        requests = self.scheduler.steady(num_ahead)
        depth = self._depth(requests)
        behind = self.drafter is not None and is_behind(self.drafter, self.cache, requests, depth, num_ahead + 1)
        return ([], 0) if behind else (requests, depth)

    def _land(self, flight: Flight) -> list[Request]:
        """The outcome of a recorded round reaches the requests that are still there."""
        landed: list[Work] = []
        accepted: list[int] = []
        end, missed = flight.wait(), flight.num_drafts == 0 and self._follows
        for request, num_valid, outcome, logits in flight.outcomes():
            landed.append(Work(request, request.num_computed, 1 + num_valid, num_valid, emits=True))
            accepted.append(self._settle(landed[-1], outcome, logits, missed=missed))
        if self.governor is not None:
            self.governor.note(accepted, flight.num_drafts, flight.took_off, end)
        self._heal(landed)
        return [work.request for work in landed]

    def close(self) -> None:
        self.cache.free()

    # the parts of a step

    def _place(self, plan: Sequence[Work]) -> None:
        """Slots of new requests are filled, and page tables learn of new pages."""
        page_size = self.cache.shape.page_size
        for request in self.scheduler.admitted:
            reused = request.pages[: request.num_computed // page_size]
            self.cache.admit(request.slot, request.tokens, reused, request.images)
            request.num_placed = len(reused)
        self._place_pages([work.request for work in plan])

    def _place_pages(self, requests: Sequence[Request]) -> None:
        places = []
        for request in requests:
            new = enumerate(request.pages[request.num_placed :], start=request.num_placed)
            places += [(request.slot, place, page) for place, page in new]
            request.num_placed = len(request.pages)
        self.cache.place_pages(places)

    def _depth(self, requests: Sequence[Request]) -> int:
        """How many tokens to draft: as many as the request that wants most, and as are worth it. A prediction is always
        worth a try."""
        most = self.lookahead
        if self.governor is not None and requests and not any(request.prediction is not None for request in requests):
            most = self.governor.depth(len(requests))
        wanted = [request.most_drafts() for request in requests]
        return max((most if want is None else min(want, most) for want in wanted), default=0)

    @property
    def _follows(self) -> bool:
        """Whether there is a drafter that must see all of the text."""
        return self.drafter is not None and not self.drafter.from_text

    def _choose(self, plan: Sequence[Work], step: Step, hidden: Hidden) -> tuple[Tensor | None, Tensor]:
        if not any(work.emits for work in plan):  # prompt chunks only: nothing is judged
            return None, torch.zeros_like(step.logit_rows)
        rows = step.logit_rows.flatten()
        logits = self.target.logits(hidden.last[rows])
        choice = sample(logits, step.sampling, step.batch, rows, step.state, self._masks(plan, step))
        return logits, choice.view_as(step.logit_rows)

    def _masks(self, plan: Sequence[Work], step: Step) -> Masks | None:
        """What grammars allow after each judged row; the target is still at work on the device meanwhile."""
        device, num_judged = step.logit_rows.device, step.logit_rows.shape[1]
        rows: list[int] = []
        bits: list[Tensor] = []
        for number, work in enumerate(plan):
            if work.request.guide is None or not work.emits:
                continue
            for place, mask in work.request.guide.masks(work.request.draft[: work.num_drafts]):
                rows.append(number * num_judged + place)
                bits.append(mask)
        return Masks(torch.tensor(rows, device=device), torch.stack(bits).to(device)) if rows else None

    def _draft(self, step: Step, hidden: Hidden, verdict: Verdict, *, resting: bool) -> Draft | None:
        if resting:
            self.cache.miss(step, hidden)
            self.cache.state.draft_count[step.batch.slots] = 0
            return None
        hidden.carry = self.cache.carry[step.batch.slots]
        self.cache.keep_taps(step, hidden, verdict)
        predictions = any(prediction is not None for prediction in step.predictions)
        drafter = self.predicting if predictions else self.drafter
        if drafter is None:
            return None
        draft = drafter.propose(step, hidden, verdict)
        self.cache.keep_draft(step.batch.slots, draft)
        return draft

    def _update(
        self, plan: Sequence[Work], verdict: Verdict, draft: Draft | None, logits: Tensor | None, *, missed: bool
    ) -> list[int]:
        """The step's one copy to the host; then tokens are committed one at a time. How many drafts each request
        accepted."""
        accepted = []
        columns = [verdict.count[:, None], verdict.kept[:, None], verdict.tokens]
        if draft is not None:
            columns = [draft.count[:, None], *columns, draft.tokens]
        else:
            columns = [torch.zeros_like(columns[0]), *columns]
        predicted = draft.predicted if draft is not None else None
        if predicted is not None:
            columns.append(predicted[:, None].long())
        judged = verdict.tokens.shape[1]
        for number, (work, row) in enumerate(zip(plan, torch.cat(columns, dim=1).tolist(), strict=True)):
            num_drafts, count, kept = row[:3]
            tokens, drafted = row[3 : 3 + count], row[3 + judged :][:num_drafts]
            judged_logits = logits.view(len(plan), judged, -1)[number] if logits is not None else None
            outcome = Outcome(tokens, kept, drafted, predicted is not None and bool(row[-1]))
            accepted.append(self._settle(work, outcome, judged_logits, missed=missed))
        return accepted

    def _settle(self, work: Work, outcome: Outcome, logits: Tensor | None, *, missed: bool) -> int:
        """What a round brought reaches its request; logits [J, V] of the judged rows. How many drafts were accepted."""
        request, tokens = work.request, outcome.tokens
        taken = self._commit(work, tokens)
        if request.params.logprobs is not None and taken:
            assert logits is not None
            request.logprobs += logprob_table(logits[:taken], tokens[:taken], request.params.logprobs, self.tokenizer)
        request.draft_is_predicted = outcome.predicted
        self.scheduler.update(request, outcome.kept, len(outcome.draft), missed=missed)
        if request.finished:
            self._learn(request)
        request.draft = outcome.draft
        return len(tokens) - 1

    def _learn(self, request: Request) -> None:
        if self.drafter is not None and request.num_outputs:
            self.drafter.learn(request.tokens, request.params.tenant)

    def _commit(self, work: Work, tokens: Sequence[int]) -> int:
        """How many of the tokens the request takes before it ends."""
        request = work.request
        is_round = request.num_computed == len(request.tokens) - 1 and request.num_outputs > 0
        taken = 0
        for taken, token in enumerate(tokens, start=1):
            request.append(token, self.max_model_len, taken if taken < len(tokens) else 0)
            if request.finished:
                break
        if is_round and taken:
            accepted = min(len(tokens) - 1, taken)
            request.count_round(work.num_drafts, accepted)
            self._watch(work, accepted)
            if request.params.trace:
                request.trace.append({"draft": request.draft[: work.num_drafts], "accepted": accepted})
        return taken

    def _watch(self, work: Work, accepted: int) -> None:
        """Tells the watchdog of a round. What a client predicts says nothing about the drafter."""
        request = work.request
        if self.watchdog is None or (work.num_drafts and request.draft_is_predicted):
            return
        if work.num_drafts:
            made = (work.num_drafts, accepted)
            self.watchdog.drafted_round(request.standing, request.request_id, len(request.tokens), made)
        else:
            self.watchdog.plain_round(request.standing)

    def _heal(self, plan: Sequence[Work]) -> None:
        """Requests whose memory seems to be spoilt start over from the tokens that they have."""
        for work in reversed(plan):  # each goes to the head of the queue
            if work.request.standing.needs_rebuild and not work.request.finished:
                work.request.standing.needs_rebuild = False
                self.scheduler.restart(work.request)


def is_adaptive(settings: SpeculativeConfig | None) -> bool:
    """Whoever forces a drafter, or makes its acceptance up, wants to see all of its drafts."""
    if settings is None or settings.force or settings.synthetic_acceptance_length is not None:
        return False
    return settings.adaptive


def records(config: EngineConfig) -> bool:
    """Whether rounds can be recorded there, and are to be."""
    return config.torch_device.type == "cuda" and has_triton() and not config.enforce_eager


def _watchdog(config: EngineConfig, drafter: Drafter | None) -> Watchdog | None:
    """A drafter that was forced is used however bad it is; one that reads tokens only has nothing to compute again."""
    if config.watchdog is None or drafter is None:
        return None
    forced = config.speculative is not None and config.speculative.force
    return Watchdog(config.watchdog, acts=not forced, rebuilds=not drafter.from_text)
