"""The statistical part: sampled tokens, drafts and all, against the target's own probabilities by a chi-squared test.
A wrong distribution is put to the same test and must fail it: else the test could not have seen anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.llm import LLM
from outrider.outputs import RequestOutput
from outrider.sampling_params import SamplingParams

SIGNIFICANCE = 1e-4  # a sampler that is right fails once in ten thousand
CONTROL_TEMPERATURE = 1.3  # what the wrong distribution looks like
RANK_EDGES = (1, 2, 3, 4, 6, 8, 12, 20)  # tokens are counted by their rank, the unlikely ones of all ranks together
MIN_EXPECTED = 5.0  # draws in a bin, or the test's mathematics does not hold
MIN_DRAWS = 400
NUM_SCOUTS = 2  # first tokens that are looked beyond to choose a text
CUTS = (0, 1, 2, 4, 8, 12)  # tokens of an answer after which a draw may begin
DRAW_TOKENS = 3  # of every draw: a third one lets the second be drafted
MAX_STRATA = 512  # first tokens after each of which the second is tested
FIRST_SEED = 7_000_000


@dataclass(frozen=True)
class Distribution:
    """The likeliest tokens after a text, the best first, and their probabilities; all others are the rest."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    def bins(self, temperature: float = 1.0) -> Tensor:
        """Probability of each range of ranks and of the rest; flattened where the temperature is above 1."""
        rest = max(1 - sum(self.probabilities), 0.0)
        powers = torch.tensor([*self.probabilities, rest], dtype=torch.float64) ** (1 / temperature)
        powers = powers / powers.sum()
        places = torch.tensor([*(bin_of_rank(rank) for rank in range(1, len(powers))), len(RANK_EDGES)])
        return torch.zeros(len(RANK_EDGES) + 1, dtype=torch.float64).scatter_add(0, places, powers)

    def bin_of(self, token: int) -> int:
        return bin_of_rank(self.tokens.index(token) + 1) if token in self.tokens else len(RANK_EDGES)

    def distance_to_control(self) -> float:
        """What one draw adds, on average, to the statistic of the control."""
        own, wrong = self.bins(), self.bins(CONTROL_TEMPERATURE)
        return float(((own - wrong) ** 2 / wrong.clamp(min=1e-12)).sum())


def bin_of_rank(rank: int) -> int:
    return next((place for place, edge in enumerate(RANK_EDGES) if rank <= edge), len(RANK_EDGES))


@dataclass(frozen=True)
class DrawPlan:
    """A text, its next token's distribution, and how much one draw tells right from wrong, at the first token or at the
    second, where drafts matter: whichever it tells less of."""

    prompt_token_ids: tuple[int, ...]
    first: Distribution
    sharpness: float

    def num_draws(self, at_most: int) -> int:
        enough = 80 + 10 * math.sqrt(2 * len(RANK_EDGES))  # the control's excess, well beyond any threshold
        return max(min(MIN_DRAWS, at_most), min(at_most, math.ceil(enough / max(self.sharpness, 1e-9))))


@dataclass(frozen=True)
class DrawTest:
    name: str
    draws: int
    p_value: float
    control_p_value: float
    drafted: int  # draft tokens judged at this place
    accepted: int

    @property
    def differs(self) -> bool:
        return self.p_value < SIGNIFICANCE

    @property
    def control_rejected(self) -> bool:
        return self.control_p_value < SIGNIFICANCE

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "draws": self.draws,
            "p_value": self.p_value,
            "control_p_value": self.control_p_value,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "same": not self.differs,
            "control_rejected": self.control_rejected,
        }


# planning, on the plain side


def next_distributions(plain: LLM, prompts: Sequence[Sequence[int]]) -> list[Distribution]:
    """What the target thinks of the next token of each prompt, read from its log-probabilities."""
    wanted = min(RANK_EDGES[-1], plain.target.vocab_size)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=wanted)
    found = []
    for output in plain.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params):
        assert output.outputs[0].logprobs is not None
        ranked = sorted(output.outputs[0].logprobs[0].items(), key=lambda item: -item[1].logprob)
        tokens, entries = zip(*ranked, strict=True)
        found.append(Distribution(tokens, tuple(math.exp(entry.logprob) for entry in entries)))
    return found


def plan_draws(plain: LLM, answers: Mapping[tuple[int, ...], Sequence[int]]) -> list[DrawPlan]:
    """A plan for every prompt, the sharpest first: next words that are neither certain nor arbitrary tell most. Where a
    prompt leaves no choice, a draw begins later, in the middle of an answer to it."""
    texts = {
        (*prompt, *answer[:cut]): prompt
        for prompt, answer in answers.items()
        for cut in CUTS
        if cut == 0 or cut + DRAW_TOKENS <= len(answer)
    }
    firsts = dict(zip(texts, next_distributions(plain, list(texts)), strict=True))
    scouts = [(*text, token) for text, first in firsts.items() for token in first.tokens[:NUM_SCOUTS]]
    beyond = iter(next_distributions(plain, scouts))
    best: dict[tuple[int, ...], DrawPlan] = {}
    for text, first in firsts.items():
        shares = first.probabilities[:NUM_SCOUTS]
        second = sum(share * next(beyond).distance_to_control() for share in shares) / sum(shares)
        plan, known = DrawPlan(text, first, min(first.distance_to_control(), second)), best.get(texts[text])
        best[texts[text]] = plan if known is None or plan.sharpness > known.sharpness else known
    return sorted(best.values(), key=lambda plan: plan.sharpness, reverse=True)


# drawing, on the speculative side


def draw(
    llm: LLM, prompt: Sequence[int], count: int, on_step: Callable[[int, int], None] | None = None
) -> list[RequestOutput]:
    """Many short answers at temperature 1, each with a seed of its own."""
    params = [
        SamplingParams(temperature=1.0, seed=FIRST_SEED + number, max_tokens=DRAW_TOKENS, ignore_eos=True, trace=True)
        for number in range(count)
    ]
    return llm.generate([{"prompt_token_ids": list(prompt)}] * count, params, on_step=on_step)


def evaluate_draws(plan: DrawPlan, outputs: Sequence[RequestOutput], plain: LLM) -> list[DrawTest]:
    """The first token of all draws, and the second after each first token that was drawn (the commonest, if many)."""
    answers = [output.outputs[0] for output in outputs]
    drawn = [token for token, _ in Counter(answer.token_ids[0] for answer in answers).most_common(MAX_STRATA)]
    found = next_distributions(plain, [(*plan.prompt_token_ids, token) for token in drawn])
    after = dict(zip(drawn, found, strict=True))
    following = [output for output in outputs if output.outputs[0].token_ids[0] in after]
    first = [(plan.first, answer.token_ids[0]) for answer in answers]
    second = [(after[output.outputs[0].token_ids[0]], output.outputs[0].token_ids[1]) for output in following]
    return [_test("first token", first, (0, 0)), _test("second token", second, second_token_drafts(following))]


def second_token_drafts(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """How often the second token was drafted, and how often that draft was accepted."""
    rounds = [output.outputs[0].trace[0] for output in outputs if output.outputs[0].trace]
    return sum(bool(each["draft"]) for each in rounds), sum(each["accepted"] > 0 for each in rounds)


def _test(name: str, draws: Sequence[tuple[Distribution, int]], drafts: tuple[int, int]) -> DrawTest:
    return DrawTest(name, len(draws), chi_squared(draws), chi_squared(draws, CONTROL_TEMPERATURE), *drafts)


def chi_squared(draws: Sequence[tuple[Distribution, int]], temperature: float = 1.0) -> float:
    """The p-value of the tokens drawn, each from a distribution of its own.

    Counts by rank have the mean and the covariance of a sum of multinomials; their distance from the mean, in that
    covariance, is chi-squared with one degree of freedom less than there are bins.
    """
    num_bins = len(RANK_EDGES) + 1
    observed, expected = torch.zeros(2, num_bins, dtype=torch.float64)
    covariance = torch.zeros(num_bins, num_bins, dtype=torch.float64)
    for truth, count in Counter(truth for truth, _ in draws).items():
        p = truth.bins(temperature)
        expected += count * p
        covariance += count * (torch.diag(p) - torch.outer(p, p))
    for place, count in Counter(truth.bin_of(token) for truth, token in draws).items():
        observed[place] = count
    merge = _merging(expected)
    if len(merge) < 2:
        return 1.0  # nothing to tell apart
    excess = (merge @ (observed - expected))[:-1]  # the counts add up, so one of them says nothing
    spread = (merge @ covariance @ merge.T)[:-1, :-1]
    statistic = excess @ torch.linalg.solve(spread, excess)
    freedom = torch.tensor(float(len(excess)), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def _merging(expected: Tensor) -> Tensor:
    """[kept, bins] of ones and zeros: neighbours are joined until every bin can expect enough draws."""
    groups: list[list[int]] = [[]]
    for place in range(len(expected)):
        groups[-1].append(place)
        if float(expected[groups[-1]].sum()) >= MIN_EXPECTED:
            groups.append([])
    remainder = groups.pop()
    if groups:
        groups[-1] += remainder
    merge = torch.zeros(len(groups), len(expected), dtype=torch.float64)
    for row, group in zip(merge, groups, strict=True):
        row[group] = 1.0
    return merge
