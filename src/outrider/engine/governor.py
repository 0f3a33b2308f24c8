"""Draft rows as a budget of the whole batch. What rounds take is timed, how many tokens of each request's drafts stand
is counted, and those rows are taken that bring the most tokens a second, down to none. No output depends on it, only
how soon it comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.engine.policy import Landed, RowSizes
from outrider.engine.request import Request
from outrider.engine.survival import Survival
from outrider.engine.times import Line, Times, size_of

MIN_ROUNDS = 4  # rounds at a new size before another depth is tried
TRIAL_ROUNDS = 4  # rounds of a trial; the first ones may still pay for the change
STRAY_SHARE = 0.25  # of a round of it: one that has another depth
SETTLING_SECONDS = 0.008  # of a rest, which say nothing: a CPU's caches fill with what it reads then
MARGIN = 1.03  # a depth must be so much better than the one that is in use
REST_MARGIN = 1.1  # and so much no drafts at all, where they pay for requests as they come
HOPE = 0.5  # standard errors by which drafts must be found worse than none, where one request is alone
PATIENCE = 0.02  # seconds that drafts of one request may seem to lose, once: of a text's beginning they say little
HOPELESS = 0.2  # share of a round's time: drafts that seem to lose so much get no such time
REVIEW, RARE_REVIEW = 4, 16  # rounds between decisions, while drafts pay or not
REVIEW_SECONDS, RARE_SECONDS = 0.03, 0.1  # and seconds at least: a decision takes a host half a millisecond
TRIAL_BUDGET = 0.005  # share of the time that trials may cost of which nothing new is expected
MADE_WINDOW = 32  # rounds that the share of a draft that is made looks back on
UNREAD = 4  # prompts that are read without the drafter, so that one of them is timed
ANSWER = 256  # tokens that a request is expected to say, if it may
PROMPT_WINDOW = 256  # rounds that the share of prompts looks back on


@dataclass
class SizeStats:
    """What is decided for batches of about the same size, and what trials there have cost."""

    depth: int  # in use
    pays: bool = True  # drafts would, if all were drafted for
    num_unread: int = 0  # prompts that the drafter was not shown, though drafts may pay
    saving: float = math.inf  # seconds that drafts save of what a token takes, if all are drafted for
    trial: int | None = None  # the depth that is tried now
    num_left: float = 0.0  # rounds of the trial
    num_rounds: int = 0  # since the last trial
    seconds: float = 0.0  # since the last decision
    num_trials: int = 0
    token_seconds: float = 0.0  # what a token takes at the depth in use, when the trial began
    next_loss: float = 0.0  # seconds that the next trial will cost, as far as is known
    loss: float = 0.0  # that the trial has cost so far
    losses: dict[int, float] = field(default_factory=dict)  # that the last trial of a depth has cost
    excess: float = 0.0  # share of a round's time that drafts seem to lose, and are made all the same


@dataclass(frozen=True)
class Offer:
    """The best that a depth has to offer."""

    token_seconds: float  # what a token takes, its share of prompts included
    num_drafts: int  # draft rows to judge
    seconds: float  # of a round


@dataclass(frozen=True)
class Rows:
    """Rows of drafts, the best first: how many there are up to each of them, and how many tokens those bring."""

    counts: np.ndarray
    gains: np.ndarray

    @classmethod
    def of(cls, chances: np.ndarray, many: np.ndarray, depths: Sequence[int]) -> list[Rows]:
        """Those of drafts of each depth. `many`: how many requests have such chances [B, K], [B]."""
        order = np.argsort(-chances, axis=None, kind="stable")
        best, place = chances.ravel()[order], order % chances.shape[1]
        weight = np.where(best > 0, many[order // chances.shape[1]], 0.0)
        found = []
        for depth in depths:
            counts, gains = np.zeros((2, 1 + len(order)))
            taken = weight * (place < depth)
            taken.cumsum(out=counts[1:])
            (taken * best).cumsum(out=gains[1:])
            found.append(cls(counts, gains))
        return found


class Governor:
    adaptive = True

    def __init__(self, lookahead: int, num_slots: int) -> None:
        self.depths = depths_up_to(lookahead)
        self._row_sizes: RowSizes | None = None
        self._survival, self._times = Survival(num_slots, lookahead), Times()
        self._sizes: dict[int, SizeStats] = {}
        self._latest: SizeStats | None = None
        self._number = 0  # which size that is
        self._num_rounds = 0
        self._allotted: tuple[int, list[int], int] | None = None  # for which depth, to whom, and when, was it said last
        self._credit = 0.0  # seconds that trials may cost
        self._patience = PATIENCE  # seconds that drafts may still seem to lose
        self._follow_loss = 0.0  # seconds that it has cost to follow a text for the sake of a trial
        self._has_followed = False  # some running request could be drafted for
        self._num_prompt_rows = self._num_tokens = 0.0  # of the last rounds
        self._made = 1.0  # share of the tokens of a draft that there are: a text may suggest nothing
        self._rested_seconds = 0.0  # that the drafter has rested
        self._token_seconds = 0.0  # what a token takes in rounds without prompts, as drafts were shared out last

    # before a round

    def depth(self, requests: Sequence[Request], row_sizes: RowSizes | None = None) -> int:
        self._row_sizes = row_sizes
        size = self._size(len(requests))
        number = self._number
        self._has_followed = any(request.is_followed for request in requests)
        if size.trial is None and self._is_due(size):
            size.seconds = 0.0
            self._review(number, size, requests)
        depth = size.depth if size.trial is None else size.trial
        allotted = (depth, [request.slot for request in requests], self._num_rounds // REVIEW)
        if allotted != self._allotted:
            self._allot(requests, depth, self._times.line(number, depth, len(requests)) if depth else None)
            self._allotted = allotted
        return depth

    @staticmethod
    def _is_due(size: SizeStats) -> bool:
        """Whether to decide again."""
        if size.num_rounds < RARE_REVIEW:
            return size.num_rounds > 0 and size.num_rounds % REVIEW == 0
        rounds, seconds = (REVIEW, REVIEW_SECONDS) if size.depth else (RARE_REVIEW, RARE_SECONDS)
        return size.num_rounds % rounds == 0 and size.seconds >= seconds

    def _allot(self, requests: Sequence[Request], depth: int, line: Line | None) -> None:
        """Says how many tokens of each draft are judged: of all of them together those that are the most likely."""
        if line is None:
            for request in requests:
                request.most_judged = depth
            return
        survival = self._survival_of(requests)[:, :depth]
        (rows,) = Rows.of(survival, np.ones(len(requests)), [depth])
        offer = self._choose(rows, len(requests), depth, line)
        self._token_seconds = offer.token_seconds - line.prompt * self._prompt_share
        _share_out(requests, survival, offer.num_drafts)

    def allot_beside(self, requests: Sequence[Request], depth: int, row_sizes: Sequence[int]) -> None:
        """A row costs as much there as one of a prompt; it is worth what its token would take in other rounds."""
        row = self._times.prompt_seconds(size_of(len(requests)), rests=False)
        if not row or not self._token_seconds:
            return
        survival = self._survival_of(requests)[:, :depth]
        (rows,) = Rows.of(survival, np.ones(len(requests)), [depth])
        added = np.asarray(row_sizes) - len(requests)
        used = np.minimum(added, int(rows.counts[-1]))
        tokens = self._made * self._survival.trust * np.interp(used, rows.counts, rows.gains)
        _share_out(requests, survival, int(used[(tokens * self._token_seconds - row * added).argmax()]))
        self._allotted = None  # rounds without prompts are another matter

    def _survival_of(self, requests: Sequence[Request], hope: float = 0.0) -> np.ndarray:
        survival = self._survival.of(np.array([request.slot for request in requests]), hope)
        for number, request in enumerate(requests):
            limit = request.most_drafts()
            if limit is not None:
                survival[number, limit:] = 0.0
        return survival

    def _choose(self, rows: Rows, num_requests: int, depth: int, line: Line) -> Offer:
        """How many rows to judge of drafts of such a depth."""
        if self._row_sizes is None:
            used = added = np.arange(num_requests * depth + 1)
        else:
            added = np.maximum(np.asarray(self._row_sizes(num_requests, depth)) - num_requests, 0)
            used = np.minimum(added, int(rows.counts[-1]))
        tokens = num_requests + self._made * self._survival.trust * np.interp(used, rows.counts, rows.gains)
        seconds = line.seconds + line.row * added * (self._made if self._row_sizes is None else 1.0)
        each = seconds / tokens + line.prompt * self._prompt_share
        best = int(each.argmin())
        return Offer(float(each[best]), int(used[best]), float(seconds[best]))

    @property
    def _prompt_share(self) -> float:
        """Rows of prompts for each token that comes out."""
        return self._num_prompt_rows / max(self._num_tokens, 1.0)

    def wants(self, num_requests: int, num_unseen: int = 0, num_left: int = 0) -> bool:
        """Where drafts have been found not to pay, the drafter follows a text only when a trial can be afforded: so it
        is found out should they pay again. Nor does it where they will not save what reading a prompt again takes."""
        # those who come at once will be together, and so will those who come where others have just left
        number = max(size_of(num_requests), self._number)
        size = self._sizes.get(number) or self._latest
        if size is None:
            return True
        if size.depth == 0 and size.num_unread < UNREAD and not self._times.knows_reading(number):
            size.num_unread += 1
            return False  # what it costs to follow a prompt is not known before one was read without
        if size.depth > 0 or size.pays:
            again = num_unseen * self._times.prompt_seconds(number, rests=False)
            wanted = again == 0 or again < min(num_left, ANSWER) * size.saving
        else:
            affordable = self._credit >= size.next_loss + self._follow_loss  # or the trial would never come
            wanted = affordable and not self._has_followed and not num_unseen
        self._has_followed = self._has_followed or wanted
        return wanted

    def admit(self, slot: int) -> None:
        self._survival.begin(slot)
        self._allotted = None

    @property
    def latest(self) -> int:
        """The depth in use for batches as large as the last one."""
        return self._latest.depth if self._latest is not None else self.depths[-1]

    def _size(self, num_requests: int) -> SizeStats:
        number, before = size_of(num_requests), self._latest
        if before is not None and number == self._number:
            return before
        size = self._sizes.get(number)
        if size is None:  # whatever was best for the batches before is a good start
            size = self._sizes[number] = SizeStats(self.latest, before is None or before.pays)
        elif before is not None and not before.depth and not before.pays and not self._times.compares(number):
            size.depth, size.pays = 0, False  # it passed too soon to find that out by itself
        self._latest, self._number = size, number
        return size

    # after a round

    def note(self, landed: Landed) -> None:
        self._survival.add(landed.judged)
        if landed.num_wanted:
            self._made += (min(landed.num_made / landed.num_wanted, 1.0) - self._made) / MADE_WINDOW
        if landed.seconds <= 0:
            return
        keep = 1 - 1 / PROMPT_WINDOW
        self._num_prompt_rows = self._num_prompt_rows * keep + landed.num_other_rows
        self._num_tokens = self._num_tokens * keep + landed.num_tokens
        size, number = self._size(landed.num_requests), self._number
        is_settled = not landed.rests or self._rested_seconds >= SETTLING_SECONDS
        self._rested_seconds = self._rested_seconds + landed.seconds if landed.rests else 0.0
        if is_settled:
            rows = (landed.num_rows, landed.num_other_rows)
            self._times.add(number, landed.depth, rows, landed.seconds, rests=landed.rests)
        size.num_rounds += 1
        size.seconds += landed.seconds
        self._num_rounds += 1
        self._credit += TRIAL_BUDGET * landed.seconds
        if landed.depth:
            self._patience -= size.excess * landed.seconds * landed.num_requests  # many say more
        if size.trial is not None:
            self._note_trial(number, size, landed, is_settled=is_settled)
        elif landed.depth == size.depth == 0 and not landed.rests:  # the drafter follows a text for the sake of a trial
            follow, rest = (self._times.prompt_seconds(number, rests=rests) for rests in (False, True))
            self._follow_loss = max(follow - rest, 0.0) * landed.num_other_rows
            self._credit -= self._follow_loss

    def _note_trial(self, number: int, size: SizeStats, landed: Landed, *, is_settled: bool) -> None:
        assert size.trial is not None
        prompts = self._times.prompt_seconds(number, rests=landed.rests)
        bought = landed.num_tokens * (size.token_seconds - prompts * self._prompt_share)
        size.loss += landed.seconds - prompts * landed.num_other_rows - bought
        # Rounds under way have the depth of before; but requests may also want no more, whatever is tried.
        if is_settled:
            size.num_left -= 1 if landed.depth == size.trial else STRAY_SHARE
        if size.num_left <= 0:
            self._credit -= size.loss
            size.losses[size.trial] = max(size.loss, 0.0)
            size.trial, size.num_rounds = None, 0

    # decisions

    def _review(self, number: int, size: SizeStats, requests: Sequence[Request]) -> None:
        """Takes the depth that looks best, or begins a trial where one is due."""
        found = self._offers(number, *self._expected(requests))
        plain, drafts = self._usual(number, requests)
        size.pays = drafts * (1.0 if size.pays else MARGIN) < plain
        size.saving = max(plain - drafts, 0.0)
        if size.depth not in found:
            return
        now = found[size.depth]
        best = min(found, key=lambda depth: found[depth].token_seconds)
        if found[best].token_seconds * MARGIN >= now.token_seconds and 0 in found and not size.pays:
            best = 0  # drafts that bring nothing are not made
        size.excess = 0.0
        if best == 0 < size.depth:
            other = min(found.keys() - {0}, key=lambda depth: found[depth].token_seconds)
            excess = max(1 - found[0].token_seconds / found[other].token_seconds, MARGIN - 1)  # less cannot be told
            if (self._patience > 0 and excess < HOPELESS) or self._may_pay(number, requests, found[0]):
                best, size.excess = other, excess
        if best == 0:  # those who come will soon be others
            margin = REST_MARGIN if size.pays else 1.0
        else:
            margin = MARGIN
        if found[best].token_seconds * margin < now.token_seconds:
            if self._times.knows(number, best):
                size.depth = best
            elif size.num_rounds >= MIN_ROUNDS:
                self._begin(number, size, best, now)
            return
        other = self._next(number, size)
        size.next_loss = self._loss(number, size, other, found, requests)
        if size.num_rounds >= MIN_ROUNDS and self._credit >= size.next_loss and (self._has_followed or not other):
            self._credit = min(self._credit, max(size.next_loss, 0.0))
            self._begin(number, size, other, now)

    def _loss(
        self, number: int, size: SizeStats, other: int, found: dict[int, Offer], requests: Sequence[Request]
    ) -> float:
        """Seconds that a trial of another depth will cost."""
        now = found[size.depth]
        if other in found:
            tried = found[other]
            loss = TRIAL_ROUNDS * tried.seconds * max(1 - now.token_seconds / tried.token_seconds, 0.0)
            return max(loss, size.losses.get(other, 0.0))
        if other == 0:  # nothing is known of plain rounds
            return -math.inf
        # Nothing is known of what drafts take. Those that stand too seldom never pay, whatever they take.
        line = self._times.line(number, size.depth, len(requests))
        assert line is not None
        survival, many = self._expected(requests)
        (rows,) = Rows.of(survival, many, [other])
        hope = self._choose(rows, len(requests), other, line)
        return -math.inf if hope.token_seconds * MARGIN < now.token_seconds else TRIAL_ROUNDS * now.seconds

    def _next(self, number: int, size: SizeStats) -> int:
        """The depth to try: none, and as many as there can be, come first. At rest the question is whether drafts
        stand by now: whole drafts say most."""
        if size.depth == 0:
            return self.depths[-1]
        others = [depth for depth in reversed(self.depths) if depth != size.depth]
        ends = [depth for depth in (0, self.depths[-1]) if depth in others and not self._times.knows(number, depth)]
        return ends[0] if ends else others[size.num_trials % len(others)]

    def _expected(self, requests: Sequence[Request], hope: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Chances [N, K], and how many requests have each, [N]: those of whom little is known yet are like all that
        come, some good and some bad. What they are is soon found out."""
        slots = np.array([request.slot for request in requests])
        survival = self._survival_of(requests, hope)
        new = (~self._survival.knows(slots)) & np.array([request.most_drafts() is None for request in requests])
        usual = self._survival.usual(slots, hope)
        many = np.append(np.where(new, 0.0, 1.0), np.full(len(usual), new.sum() / len(usual)))
        return np.concatenate([survival, usual]), many

    def _may_pay(self, number: int, requests: Sequence[Request], plain: Offer) -> bool:
        """Whether it may be for bad luck only that drafts look worse than none. Of few requests few drafts say how good
        they are, and whoever rests does not find out soon."""
        hopeful = self._offers(number, *self._expected(requests, HOPE / math.sqrt(len(requests))))
        return any(offer.token_seconds < plain.token_seconds for depth, offer in hopeful.items() if depth)

    def _usual(self, number: int, requests: Sequence[Request]) -> tuple[float, float]:
        """Seconds that a token takes without drafts, and with them, if all requests were drafted for, and were as they
        come; while nothing is known of one of them, drafts are hoped for. Those whose drafts stand leave sooner."""
        usual = self._survival.usual(np.array([request.slot for request in requests]))
        stay = 1 / (1 + usual.sum(1))
        found = self._offers(number, usual, len(requests) * stay / stay.sum())
        if 0 not in found or len(found) < 2:
            return math.inf, 0.0
        return found[0].token_seconds, min(offer.token_seconds for depth, offer in found.items() if depth)

    def _offers(self, number: int, survival: np.ndarray, many: np.ndarray) -> dict[int, Offer]:
        """What each depth has to offer, as far as is known what it takes."""
        num_requests = round(float(many.sum()))
        lines = {depth: self._times.line(number, depth, num_requests) for depth in self.depths}
        known = {depth: line for depth, line in lines.items() if line is not None}
        rows = Rows.of(survival, many, list(known))
        return {
            depth: self._choose(each, num_requests, depth, line)
            for each, (depth, line) in zip(rows, known.items(), strict=True)
        }

    def _begin(self, number: int, size: SizeStats, depth: int, now: Offer) -> None:
        size.trial, size.num_left, size.loss = depth, TRIAL_ROUNDS, 0.0
        size.num_trials += 1
        size.token_seconds = now.token_seconds
        self._times.fade(number, depth)
        if size.depth == 0 and not size.pays:  # else it rests for a moment, because of those who are there
            self._survival.fade()


def _share_out(requests: Sequence[Request], survival: np.ndarray, num_drafts: int) -> None:
    """So many rows, to the tokens that are the most likely."""
    best = np.argsort(-survival, axis=None, kind="stable")[:num_drafts] // survival.shape[1]
    for request, most in zip(requests, np.bincount(best, minlength=len(requests)).tolist(), strict=True):
        request.most_judged = most


def depths_up_to(lookahead: int) -> tuple[int, ...]:
    """None, then as many as there can be, half as many, ..., one."""
    found = {0, lookahead}
    while lookahead > 1:
        lookahead //= 2
        found.add(lookahead)
    return tuple(sorted(found))
