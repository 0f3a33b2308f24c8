"""Made-up worlds for the policy that says how much is drafted: what rounds cost and bring is known, and time is
counted, not measured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.governor import Governor, depths_up_to
from outrider.engine.policy import Judged, Landed, RowSizes
from outrider.engine.request import Request
from outrider.sampling_params import SamplingParams


@dataclass
class World:
    """A plain round of one request takes one second."""

    rates: Sequence[float]  # chance that a draft token is right if all before it are, of one request after the other
    begin: float  # seconds that drafting takes at all
    each: float  # and for each token
    row: float = 0.0  # and for each row beyond the first that is computed
    noise: float = 0.0
    lookahead: int = 5
    made: float = 1.0  # share of the rounds in which there is a draft at all
    prompt: int = 0  # rows of a request that joins
    answer: int = 0  # tokens after which a request ends, and another takes its place; 0: never

    def seconds(self, depth: int, rows: int) -> float:
        return 1 + self.row * (rows - 1) + (self.begin + self.each * depth if depth else 0.0)

    def rate(self, depth: int, judged: Sequence[int]) -> float:
        """Tokens a second where so many tokens of each request's draft are judged."""
        tokens = sum(sum(p**n for n in range(count + 1)) for p, count in zip(self.rates, judged, strict=True))
        return tokens / self.seconds(depth, len(judged) + sum(judged))

    @property
    def plain(self) -> float:
        return self.rate(0, [0] * len(self.rates))

    @property
    def best_fixed(self) -> float:
        """With the same depth for all."""
        return max(self.rate(depth, [depth] * len(self.rates)) for depth in range(self.lookahead + 1))

    @property
    def best(self) -> float:
        """Of all there is: rows in the order of their worth, for every depth that can be drafted."""
        found = self.plain
        for depth in depths_up_to(self.lookahead)[1:]:
            rows = sorted(((p ** (n + 1), who) for who, p in enumerate(self.rates) for n in range(depth)), reverse=True)
            judged = [0] * len(self.rates)
            for _, who in rows:
                judged[who] += 1
                found = max(found, self.rate(depth, judged))
        return found


def requests(count: int) -> list[Request]:
    made = [Request(str(number), [1], SamplingParams(), seed=0) for number in range(count)]
    for slot, request in enumerate(made):
        request.slot = slot
    return made


@dataclass
class Run:
    tokens: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0  # that no policy can save
    drafted: int = 0  # rounds that draft
    rounds: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / (self.seconds - self.prompt_seconds)


def run(
    world: World, governor: Governor, num_rounds: int, chance: random.Random, row_sizes: RowSizes | None = None
) -> Run:
    """As in the engine, a round judges what the one before has drafted. A slow machine is slow for all alike: noise is
    taken out of what is counted."""
    asked, waiting, found = requests(len(world.rates)), [0] * len(world.rates), Run()
    left = [chance.randint(1, world.answer or 1) for _ in asked]
    reading = [False] * len(asked)
    for _ in range(num_rounds):
        depth = governor.depth(asked, row_sizes)
        judged, brought = [], []
        for who, (request, rate) in enumerate(zip(asked, world.rates, strict=True)):
            if reading[who]:
                brought.append(1)
                continue
            right = 0
            while right < waiting[who] and chance.random() < rate:
                right += 1
            most = waiting[who] if request.most_judged is None else min(request.most_judged, waiting[who])
            seen = min(right + 1, most + 1, waiting[who])
            if waiting[who]:
                judged.append(Judged(request.slot, most, min(right, seen), seen))
            brought.append(min(right, most) + 1)
        decoding = [who for who in range(len(asked)) if not reading[who]]
        rows = sum(1 + min(asked[who].most_judged or 0, waiting[who]) for who in decoding)
        other = world.prompt * sum(reading)
        took = world.seconds(depth, max(rows + other, 1))
        noise = 1 + world.noise * chance.random() + 4 * world.noise * (chance.random() < 0.02)
        made = [depth if chance.random() < world.made else 0 for _ in asked]
        counts = (sum(made), depth * len(made))
        governor.note(Landed(len(asked), depth, depth == 0, rows, other, sum(brought), *counts, took * noise, judged))
        found.tokens += sum(brought)
        found.seconds += took
        found.prompt_seconds += world.row * other
        found.drafted += depth > 0
        found.rounds += 1
        waiting = made
        if world.answer:
            reading = [False] * len(asked)
            for who, count in enumerate(brought):
                left[who] -= count
                if left[who] <= 0:
                    left[who], reading[who], waiting[who] = world.answer, True, 0
                    governor.admit(asked[who].slot)
    return found


def mixed(*rates: float, count: int) -> list[float]:
    return list(itertools.islice(itertools.cycle(rates), count))
