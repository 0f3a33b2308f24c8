"""The statistical part: sampled tokens, drafts and all, against the target's own probabilities by a chi-squared test.
A wrong distribution is put to the same test and must fail it: else the test could not have seen anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.llm import LLM
from outrider.outputs import RequestOutput
from outrider.sampling_params import SamplingParams

SIGNIFICANCE = 1e-4  # a sampler that is right fails once in ten thousand
CONTROL_TEMPERATURE = 1.3  # what the wrong distribution looks like
NUM_BINS = 20  # the likeliest tokens, each by itself; the others are one bin
MIN_EXPECTED = 5.0  # draws in a bin, or the test's mathematics does not hold
MIN_DRAWS = 400
REST = -1  # the bin of all other tokens
FIRST_SEED = 7_000_000


@dataclass(frozen=True)
class Distribution:
    """Probabilities of the likeliest tokens after a text, and of all others together."""

    probabilities: dict[int, float]  # with REST

    @property
    def best(self) -> int:
        return max((token for token in self.probabilities if token != REST), key=self.probabilities.__getitem__)

    def flattened(self, temperature: float) -> Distribution:
        powers = {token: p ** (1 / temperature) if p > 0 else 0.0 for token, p in self.probabilities.items()}
        total = sum(powers.values())
        return Distribution({token: power / total for token, power in powers.items()})

    def distance(self, other: Distribution) -> float:
        """What one draw from self adds, on average, to the chi-squared statistic against `other`."""
        pairs = [(p, other.probabilities[token]) for token, p in self.probabilities.items()]
        return sum((p - q) ** 2 / q for p, q in pairs if q > 0)


@dataclass(frozen=True)
class DrawPlan:
    """A prompt, its first token's distribution, and the second's after the likeliest first one."""

    prompt_token_ids: tuple[int, ...]
    first: Distribution
    second: Distribution

    @property
    def sharpness(self) -> float:
        """How much one draw tells right from wrong where drafts matter: at the second token."""
        share = self.first.probabilities[self.first.best]
        return share * self.second.distance(self.second.flattened(CONTROL_TEMPERATURE))

    def num_draws(self, at_most: int) -> int:
        enough = 50 + 10 * math.sqrt(2 * NUM_BINS)  # the control's excess, well beyond any threshold
        return max(min(MIN_DRAWS, at_most), min(at_most, math.ceil(enough / max(self.sharpness, 1e-9))))


@dataclass(frozen=True)
class DrawTest:
    name: str
    draws: int
    bins: int
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
            "bins": self.bins,
            "p_value": self.p_value,
            "control_p_value": self.control_p_value,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "same": not self.differs,
            "control_rejected": self.control_rejected,
        }


def chi_squared(observed: Sequence[float], expected: Sequence[float]) -> float:
    """The p-value of Pearson's test with one degree of freedom less than there are bins."""
    seen, awaited = (torch.tensor(values, dtype=torch.float64) for values in (observed, expected))
    statistic = ((seen - awaited) ** 2 / awaited).sum()
    freedom = torch.tensor(max(len(observed) - 1, 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def binned(tokens: Counter[int], distribution: Distribution) -> tuple[list[float], list[float]]:
    """Observed and expected counts; tokens too rare to count by themselves join the rest."""
    total = sum(tokens.values())
    expected = {token: p * total for token, p in distribution.probabilities.items()}
    own = [token for token in expected if token != REST and expected[token] >= MIN_EXPECTED]
    observed_bins, expected_bins = [float(tokens[token]) for token in own], [expected[token] for token in own]
    rest_seen, rest_expected = total - sum(observed_bins), total - sum(expected_bins)
    if rest_expected >= MIN_EXPECTED or not own:
        return [*observed_bins, rest_seen], [*expected_bins, rest_expected]
    smallest = expected_bins.index(min(expected_bins))
    observed_bins[smallest] += rest_seen
    expected_bins[smallest] += rest_expected
    return observed_bins, expected_bins


def next_distribution(plain: LLM, prompts: Sequence[Sequence[int]]) -> list[Distribution]:
    """What the target thinks of the next token of each prompt, read from its log-probabilities."""
    wanted = min(NUM_BINS, plain.target.vocab_size - 1)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=wanted)
    outputs = plain.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
    found = []
    for output in outputs:
        assert output.outputs[0].logprobs is not None
        probabilities = {token: math.exp(entry.logprob) for token, entry in output.outputs[0].logprobs[0].items()}
        found.append(Distribution(probabilities | {REST: max(1 - sum(probabilities.values()), 0.0)}))
    return found


def plan_draws(plain: LLM, prompts: Sequence[Sequence[int]]) -> list[DrawPlan]:
    """Every prompt's plan, the sharpest first."""
    firsts = next_distribution(plain, prompts)
    seconds = next_distribution(plain, [[*ids, first.best] for ids, first in zip(prompts, firsts, strict=True)])
    plans = [DrawPlan(tuple(ids), a, b) for ids, a, b in zip(prompts, firsts, seconds, strict=True)]
    return sorted(plans, key=lambda plan: plan.sharpness, reverse=True)


def draw(
    llm: LLM, prompt: Sequence[int], count: int, on_step: Callable[[int, int], None] | None = None
) -> list[RequestOutput]:
    """Many short answers at temperature 1, each with a seed of its own; three tokens let the second one be drafted."""
    params = [
        SamplingParams(temperature=1.0, seed=FIRST_SEED + number, max_tokens=3, ignore_eos=True, trace=True)
        for number in range(count)
    ]
    return llm.generate([{"prompt_token_ids": list(prompt)}] * count, params, on_step=on_step)


def evaluate_draws(plan: DrawPlan, outputs: Sequence[RequestOutput]) -> list[DrawTest]:
    """The first token of all draws, and the second of those that began with the likeliest first one."""
    answers = [output.outputs[0] for output in outputs]
    first = Counter(answer.token_ids[0] for answer in answers)
    following = [answer for answer in answers if answer.token_ids[0] == plan.first.best]
    second = Counter(answer.token_ids[1] for answer in following)
    rounds = [answer.trace[0] for answer in following if answer.trace]
    drafted = sum(bool(each["draft"]) for each in rounds)
    accepted = sum(each["accepted"] > 0 for each in rounds)
    return [
        _test("first token", first, plan.first, (0, 0)),
        _test("second token", second, plan.second, (drafted, accepted)),
    ]


def _test(name: str, tokens: Counter[int], truth: Distribution, drafts: tuple[int, int]) -> DrawTest:
    if not tokens:
        return DrawTest(name, 0, 0, 1.0, 1.0, *drafts)
    observed, expected = binned(tokens, truth)
    control = binned(tokens, truth.flattened(CONTROL_TEMPERATURE))
    return DrawTest(name, tokens.total(), len(observed), chi_squared(observed, expected), chi_squared(*control), *drafts)
