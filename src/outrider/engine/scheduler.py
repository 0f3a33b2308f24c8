"""Which requests run next, how many rows each, with pages reserved for all of them. Host only: no tensor in sight.
Decoding goes first, then prompts in order of arrival; when pages run out, the youngest request starts over later."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engine.pages import PagePool
from outrider.engine.prefixes import Prefixes
from outrider.engine.request import Request, Status, Work
from outrider.engine.snapshots import Snapshots, WantedSnapshots

MAX_FIGURES = 2**12  # log-probabilities of prompts that are made in a round: some ten milliseconds
CROWD = 4  # rounds that all who wait would have to be read in: where that takes larger ones, it is crowded
FEW_DRAFTS = 32  # one row of a draft beside so many of prompts delays nobody much

Follows = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    lookahead: int  # draft tokens per round at most
    prefix_caching: bool = True
    num_prompt_rows: int = 1024  # at most about so many rows of prompts in a round in which others decode
    round_sizes: tuple[int, ...] = ()  # numbers of rows that rounds with prompts are recorded for
    num_groups: int = 1  # rounds that may be under way at a time, if more than one: nobody takes part in two of them


@dataclass(frozen=True)
class Plan:
    """The work of a round, which of its requests have just been given a slot, and which states it shall keep."""

    work: list[Work]
    admitted: list[Request]
    wanted: list[WantedSnapshots] = field(default_factory=list)


class Scheduler:
    def __init__(self, limits: SchedulerLimits, pool: PagePool, snapshots: Snapshots | None = None) -> None:
        """`snapshots`: where layers are recurrent, so that pages alone are of no use."""
        self.limits = limits
        self.pool = pool
        self.snapshots = snapshots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefixes = Prefixes(pool, limits.page_size, snapshots, enabled=limits.prefix_caching)
        self.num_preemptions = 0
        self._figures_left = MAX_FIGURES
        self._num_launched = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))

    # requests come and go

    def add(self, request: Request) -> None:
        needed = self._pages_for(self._final_len(request))
        if needed > self.pool.capacity:
            raise ValueError(
                f"request {request.request_id} may need {needed} cache pages, but there are {self.pool.capacity}: "
                "lower max_tokens, or give the cache more memory (kv_cache_memory)"
            )
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        if request.finished:
            return
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        request.finish("abort")
        self._retire(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def next_in_line(self) -> list[Request]:
        """Waiting requests that there are slots for."""
        return list(itertools.islice(self.waiting, len(self._free_slots)))

    # planning

    @property
    def at_hand(self) -> list[Request]:
        """Whom the next round is for: those who run, as far as they are not in another; or those who will."""
        return self._in_turn or self.next_in_line[: self._group_size]

    @property
    def _in_turn(self) -> list[Request]:
        """All who run; in groups, as many as a group has of those who are in no round under way, and waited longest."""
        if self.limits.num_groups == 1:
            return self.running
        free = [request for request in self.running if not request.flying]
        return sorted(free, key=lambda each: each.turn)[: self._group_size]

    @property
    def _group_size(self) -> int:
        """Requests of a round, at most: that as many are in each of those under way. Groups are made anew in every
        round, so that they are even again as soon as somebody has come or gone."""
        if self.limits.num_groups == 1:
            return sys.maxsize
        num_pages, count = self.pool.num_free, len(self.running)
        for request in self.next_in_line:
            num_pages -= self._pages_for(len(request.tokens))
            count += num_pages >= 0
        return max(-(-count // self.limits.num_groups), 1)

    def next(self, depth: int, *, flying: bool = False, follows: Follows = lambda *_: True) -> Plan:
        """The next round's work, empty if there is nothing to do. `depth`: how many tokens are drafted in it for the
        next one. `flying`: rounds are under way, whose outcome may help: where pages are short, it is waited for.
        `follows`: whether the drafter will follow the text of one more request, see Drafting.follows()."""
        num_preemptions = self.num_preemptions
        budget = self.limits.max_num_batched_tokens
        plan: list[Work] = []
        admitted: list[Request] = []
        most = self._group_size
        decoding, reading = self._parties
        num_left, self._figures_left = len(reading) + len(decoding), MAX_FIGURES
        for group in (decoding, reading):
            if group is reading and plan:
                budget = min(
                    budget, self._room_beside(sum(work.num_rows for work in plan), self._rows_to_read(reading))
                )
            for request in group:
                num_left -= 1
                if budget <= 0 or request.status is not Status.RUNNING:  # preempted for an older one just now
                    continue
                work = self._work(request, budget, depth, 1 + num_left)
                if self._reserve(request, work, plan, may_preempt=not flying):
                    plan.append(work)
                    budget -= work.num_rows
                elif flying:
                    return Plan([], [])
        room = self.num_preemptions == num_preemptions  # who just made room does not come back in the same step
        while room and self.waiting and budget > 0 and self._free_slots and len(plan) < most:
            work_or_none = self._admit(self.waiting[0], budget, depth, follows)
            if work_or_none is None:
                break
            plan.append(work_or_none)
            admitted.append(work_or_none.request)
            budget -= work_or_none.num_rows
        plan = [work for work in plan if work.request.status is Status.RUNNING]
        if not plan and not room and self.running:  # a whole group has made room for others
            return self.next(depth, flying=flying, follows=follows)
        assert plan or flying or not self.has_work or self.waiting, "running requests that cannot run"
        return Plan(plan, admitted, self.snapshots.plan(plan) if self.snapshots is not None else [])

    def is_crowded(self, num_drafts: int) -> bool:
        """Whether more prompts wait than the next round can read beside those who decode, and drafts of so many tokens
        would keep them waiting much longer: beside prompts the device computes all the time, and a draft's row takes
        as long as a prompt's."""
        decoding, reading = self._parties
        if FEW_DRAFTS * len(decoding) * num_drafts <= self.limits.num_prompt_rows:
            return False
        return self._rows_to_read(reading) > self.limits.num_prompt_rows

    @property
    def beside_prompts(self) -> tuple[list[Request], int]:
        """Those who decode in the next round, and how many rows of prompts it reads beside them, if it can read all
        that wait; else nobody."""
        decoding, reading = self._parties
        num_rows = self._rows_to_read(reading)
        return (decoding, num_rows) if 0 < num_rows <= self.limits.num_prompt_rows else ([], 0)

    @property
    def _parties(self) -> tuple[list[Request], list[Request]]:
        """Of those whose turn it is, but for those who surely end: who decodes, and who reads a prompt."""
        parties: tuple[list[Request], list[Request]] = [], []
        for request in self._in_turn:
            if not self._surely_ends(request):
                parties[request.is_reading].append(request)
        return parties

    def _rows_to_read(self, reading: Sequence[Request]) -> int:
        """Of prompts, theirs and those of newcomers."""
        return sum(request.num_unread for request in [*reading, *self.next_in_line])

    def _room_beside(self, num_rows: int, num_unread: int) -> int:
        """Rows of prompts in a round in which so many others decode, while so many rows are still to be read. Whoever
        decodes should not wait long for whoever comes; and where many come at once, they should not go on in step for
        ever: rounds in which some read and others decode use the device best. But the last of a crowd waits for every
        round in which others decode beside it: a crowd's rounds are up to twice as large. Rounds are filled up to a
        size that they are recorded for."""
        usual = self.limits.num_prompt_rows
        wanted = num_rows + min(max(num_unread // CROWD, usual), 2 * usual)
        sizes = [size for size in self.limits.round_sizes if num_rows < size <= wanted]
        return max(sizes, default=wanted) - num_rows

    def launched(self, plan: Sequence[Work]) -> None:
        """A round with this work is under way."""
        self._num_launched += 1
        for work in plan:
            work.request.flying.append(work)
            work.request.turn = self._num_launched

    def _surely_ends(self, request: Request) -> bool:
        """Whether rounds under way bring its last token, whatever they bring: each brings one at least."""
        return request.remaining(self.limits.max_model_len) <= request.under_way[0]

    def _work(self, request: Request, budget: int, depth: int, num_left: int) -> Work:
        """Of its draft only its share, so that the `num_left` requests from this one on can all move: some drafts are
        longer than the drafter's. While a round is under way that brings it a token, how far it has come is known to
        the device alone."""
        num_emitting, num_flying = request.under_way
        remaining = request.remaining(self.limits.max_model_len) - num_emitting
        start = request.num_computed + num_flying  # at most
        if num_emitting:
            pending, waiting = 1, request.flying[-1].depth
        else:
            pending = len(request.tokens) - start
            waiting = request.num_drafts if pending == 1 and not num_flying else 0
        wish = request.most_drafts(predicted=request.draft_is_predicted)
        waiting = waiting if wish is None else min(waiting, wish)
        if request.most_judged is not None and not request.draft_is_predicted:
            waiting = min(waiting, request.most_judged)
        num_drafts = min(waiting, remaining - 1, max(self.limits.lookahead, budget // num_left - 1))
        num_rows = request.whole(start, min(pending + max(num_drafts, 0), budget, self._most_rows(request)))
        return _rows_of(request, start, num_rows, pending, depth)

    def _most_rows(self, request: Request) -> int:
        """Of one round: log-probabilities of prompts are made on the host, while everybody waits."""
        wanted = request.params.prompt_logprobs
        if wanted is None or len(request.prompt_logprobs) >= len(request.prompt):
            return sys.maxsize
        num_rows = max(self._figures_left // (1 + wanted), 1)
        self._figures_left -= min(num_rows, len(request.prompt)) * (1 + wanted)
        return num_rows

    def _reserve(self, request: Request, work: Work, plan: list[Work], *, may_preempt: bool) -> bool:
        """Pages for the rows and the draft that follows, taking them from younger requests if it must and may. Rows
        that lie beyond the request's end, whose round was planned before that was known, have no page."""
        while True:
            missing = self._pages_for(work.end) - len(request.pages)
            if missing > 0:
                missing = self._pages_for(min(work.end, self._final_len(request))) - len(request.pages)
            pages = self.pool.allocate(missing) if missing > 0 else []
            if pages is not None:
                request.pages += pages
                return True
            if not may_preempt:
                return False
            victim = self.running[-1]
            self.preempt(victim)
            plan[:] = [other for other in plan if other.request is not victim]
            if victim is request:
                return False

    def _admit(self, request: Request, budget: int, depth: int, follows: Follows) -> Work | None:
        known = self.prefixes.look_up(request)
        num_running = len(self.running) // self.limits.num_groups
        request.is_followed = follows(num_running, known.num_unseen, request.remaining(self.limits.max_model_len))
        reused = self.prefixes.take(request, known)
        start = len(reused) * self.limits.page_size
        pending = len(request.tokens) - start
        num_rows = request.whole(start, min(pending, budget, self._most_rows(request)))
        fresh = self.pool.allocate(self._pages_for(len(request.tokens)) - len(reused))
        if fresh is None:  # not before the whole of it fits, or it would soon be sent back
            self.pool.release(reused)
            return None
        self.waiting.popleft()
        request.status, request.slot = Status.RUNNING, self._free_slots.pop()
        request.pages = reused + fresh
        request.num_computed = request.num_followed = start
        self.prefixes.begin(request, known, len(reused))
        request.num_admissions += 1
        request.recompute = False
        self.running.append(request)
        return _rows_of(request, start, num_rows, pending, depth)

    def preempt(self, request: Request) -> None:
        """Takes its pages and its slot; what it has said so far is recomputed when its turn comes again."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._release(request)
        request.status = Status.WAITING
        self.waiting.appendleft(request)

    def restart(self, request: Request) -> None:
        """All that target and drafter remember of it is computed again, and what they remembered is found by nobody."""
        self.prefixes.forget(request)
        self.preempt(request)
        request.recompute = True

    # after the step

    def update(self, work: Work, num_kept: int, num_drafts: int) -> None:
        """The round is over for this request: `num_kept` more rows are in the cache, a new draft is waiting."""
        request = work.request
        if work in request.flying:
            request.flying.remove(work)
        request.num_computed = min(request.num_computed + num_kept, len(request.tokens))
        if not work.rests:
            request.num_followed = request.num_computed
        if request.finished:
            self._retire(request)
            return
        wanted = request.most_drafts(predicted=request.draft_is_predicted)
        request.num_drafts = num_drafts if wanted is None else min(num_drafts, wanted)
        self.prefixes.name(request)

    def release(self, request: Request) -> None:
        """Takes a finished request out, wherever it stands."""
        self._retire(request)

    def _retire(self, request: Request) -> None:
        if request.slot >= 0:
            self.prefixes.name_all(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        if self.snapshots is not None:
            self.snapshots.drop(request)
        self._free_slots.append(request.slot)
        request.leave()

    def _pages_for(self, length: int) -> int:
        """Pages for `length` rows, the token that follows them, and a draft after that."""
        return -(-(length + 1 + self.limits.lookahead) // self.limits.page_size)

    def _final_len(self, request: Request) -> int:
        return len(request.tokens) + request.remaining(self.limits.max_model_len)


def _rows_of(request: Request, start: int, num_rows: int, num_known: int, depth: int) -> Work:
    """So many rows, of which the first `num_known` at most hold known tokens, and the others drafts."""
    emits = num_rows >= num_known
    return Work(
        request,
        pending=min(num_known, num_rows),
        allowed=max(num_rows - num_known, 0),
        emits=emits,
        end=start + num_rows,
        depth=depth if emits else 0,
        admission=request.num_admissions,
    )
