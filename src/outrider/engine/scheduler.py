"""Which requests run next, how many rows each, with pages reserved for all of them. Host only: no tensor in sight.
Decoding goes first, then prompts in order of arrival; when pages run out, the youngest request starts over later."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from outrider.engine.pages import PagePool, page_hashes, root_of
from outrider.engine.request import Request, Status


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    lookahead: int  # draft tokens per round at most
    prefix_caching: bool = True


@dataclass(frozen=True)
class Work:
    """One request's part of a step."""

    request: Request
    start: int
    num_rows: int
    num_drafts: int  # the last rows, after the token that is certain
    emits: bool  # the rows reach the last known token

    @property
    def is_round(self) -> bool:
        """Its request decodes: one token that is certain, then drafts."""
        return self.emits and self.num_rows == 1 + self.num_drafts


@dataclass
class PrefixStats:
    queried: int = 0
    hit: int = 0


class Scheduler:
    def __init__(self, limits: Limits, pool: PagePool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.admitted: list[Request] = []  # by the last call of next(): their slots must be filled
        self.stats = PrefixStats()
        self.num_preemptions = 0
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

    # planning

    def next(self) -> list[Work]:
        """The next step's work, empty if there is nothing to do."""
        self.admitted = []
        num_preemptions = self.num_preemptions
        budget = self.limits.max_num_batched_tokens
        plan: list[Work] = []
        ordered = sorted(self.running, key=lambda r: r.num_computed < len(r.tokens) - 1)  # decoding first
        for number, request in enumerate(ordered):
            if budget <= 0:
                break
            if request.status is not Status.RUNNING:  # preempted for an older one just now
                continue
            work = self._work(request, budget, len(ordered) - number)
            if self._reserve(request, work, plan):
                plan.append(work)
                budget -= work.num_rows
        room = self.num_preemptions == num_preemptions  # who just made room does not come back in the same step
        while room and self.waiting and budget > 0 and self._free_slots:
            work_or_none = self._admit(self.waiting[0], budget)
            if work_or_none is None:
                break
            plan.append(work_or_none)
            budget -= work_or_none.num_rows
        plan = [work for work in plan if work.request.status is Status.RUNNING]
        assert plan or not self.has_work or self.waiting, "running requests that cannot run"
        return plan

    def steady(self, num_ahead: int) -> list[Request]:
        """The running requests, if all of them decode and nobody else can join, with pages for one more round while
        `num_ahead` are under way; otherwise none."""
        if not self.running or self._could_admit():
            return []
        rows = (num_ahead + 1) * (1 + self.limits.lookahead)
        for request in self.running:
            if request.num_computed != len(request.tokens) - 1:
                return []
            length = min(request.num_computed + rows, self.limits.max_model_len)
            missing = self._pages_for(length) - len(request.pages)
            pages = self.pool.allocate(missing) if missing > 0 else []
            if pages is None:
                return []
            request.pages += pages
        return list(self.running)

    def _could_admit(self) -> bool:
        """Whether it is worth trying: pages that it may share with others are not looked for."""
        if not self.waiting or not self._free_slots:
            return False
        return self._pages_for(len(self.waiting[0].tokens)) <= self.pool.num_free

    def _work(self, request: Request, budget: int, num_left: int) -> Work:
        """Of its draft only its share, so that the `num_left` requests from this one on can all move: some drafts are
        longer than the drafter's."""
        start = request.num_computed
        pending = len(request.tokens) - start
        num_drafts = min(request.num_drafts, request.remaining(self.limits.max_model_len) - 1) if pending == 1 else 0
        num_drafts = min(num_drafts, max(self.limits.lookahead, budget // num_left - 1))
        num_rows = request.whole(start, min(pending + max(num_drafts, 0), budget))
        num_drafts = max(num_rows - pending, 0)
        return Work(request, start, num_rows, num_drafts, emits=num_rows >= pending)

    def _reserve(self, request: Request, work: Work, plan: list[Work]) -> bool:
        """Pages for the rows and the draft that follows, taking them from younger requests if it must."""
        while True:
            missing = self._pages_for(work.start + work.num_rows) - len(request.pages)
            pages = self.pool.allocate(missing) if missing > 0 else []
            if pages is not None:
                request.pages += pages
                return True
            victim = self.running[-1]
            self.preempt(victim)
            plan[:] = [other for other in plan if other.request is not victim]
            if victim is request:
                return False

    def _admit(self, request: Request, budget: int) -> Work | None:
        names = self._reusable(request)
        reused = self.pool.match(names)
        start = len(reused) * self.limits.page_size
        pending = len(request.tokens) - start
        num_rows = request.whole(start, min(pending, budget))
        fresh = self.pool.allocate(self._pages_for(len(request.tokens)) - len(reused))
        if fresh is None:  # not before the whole of it fits, or it would soon be sent back
            self.pool.release(reused)
            return None
        self.waiting.popleft()
        request.status, request.slot = Status.RUNNING, self._free_slots.pop()
        request.pages, request.page_names = reused + fresh, names[: len(reused)]
        request.num_computed, request.starts_afresh = start, False
        if not request.num_preemptions:
            request.num_cached = start
            self.stats.queried += len(request.prompt)
            self.stats.hit += start
        self.running.append(request)
        self.admitted.append(request)
        return Work(request, start, num_rows, num_drafts=0, emits=num_rows == pending)

    def _reusable(self, request: Request) -> list[bytes]:
        """Names of the pages it could reuse. The last token must be run for its logits; so must a prompt whose
        log-probabilities are wanted."""
        if not self.limits.prefix_caching or request.params.prompt_logprobs is not None or request.starts_afresh:
            return []
        names = page_hashes(request.named_tokens[:-1], self.limits.page_size, 0, root_of(request.params.tenant))
        while request.whole(0, len(names) * self.limits.page_size) != len(names) * self.limits.page_size:
            names.pop()  # the last page ends inside an image
        return names

    def preempt(self, request: Request) -> None:
        """Takes its pages and its slot; what it has said so far is recomputed when its turn comes again."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._release(request)
        request.status = Status.WAITING
        self.waiting.appendleft(request)

    def restart(self, request: Request) -> None:
        """All that target and drafter remember of it is computed again, and what they remembered is found by nobody."""
        self.pool.forget(request.pages)
        self.preempt(request)
        request.starts_afresh = True

    # after the step

    def update(self, request: Request, num_kept: int, num_drafts: int, *, missed: bool = False) -> None:
        """The step is over for this request: `num_kept` more rows are in the cache, a new draft is waiting.
        `missed`: the drafter has not seen these rows."""
        before = request.num_computed
        request.num_computed = min(before + num_kept, len(request.tokens))
        if missed:
            request.num_missed += request.num_computed - before
        if request.finished:
            self._retire(request)
            return
        wanted = request.most_drafts(predicted=request.draft_is_predicted)
        request.num_drafts = num_drafts if wanted is None else min(num_drafts, wanted)
        if self.limits.prefix_caching:
            self._name_pages(request)

    def _name_pages(self, request: Request) -> None:
        """Pages that target and drafter have filled can be found by other requests."""
        size, known = self.limits.page_size, len(request.page_names)
        num_full = (request.num_computed - request.num_missed) // size
        if num_full <= known:
            return
        full = request.named_tokens[: num_full * size]
        parent = request.page_names[-1] if known else root_of(request.params.tenant)
        names = page_hashes(full, size, known, parent)
        for page, name in zip(request.pages[known:], names, strict=False):
            self.pool.name(page, name)
        request.page_names += names

    def _retire(self, request: Request) -> None:
        if request.slot >= 0:
            if self.limits.prefix_caching:
                self._name_pages(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.page_names, request.slot = [], [], -1
        request.num_computed = request.num_missed = request.num_drafts = 0

    def _pages_for(self, length: int) -> int:
        """Pages for `length` rows, the token that follows them, and a draft after that."""
        return -(-(length + 1 + self.limits.lookahead) // self.limits.page_size)

    def _final_len(self, request: Request) -> int:
        return len(request.tokens) + request.remaining(self.limits.max_model_len)
