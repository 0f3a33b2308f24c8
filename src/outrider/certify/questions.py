"""What is asked of both sides: prompts x sampling options x temperatures x seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.bench.prompts import PromptText, PromptVocabulary, random_prompts
from outrider.sampling_params import SamplingParams

FIRST_SEED = 20_261


@dataclass(frozen=True)
class ProofEffort:
    """How much is asked."""

    num_prompts: int
    num_seeds: int  # for each temperature above 0
    max_tokens: int
    alone_every: int  # one question of so many is also asked alone: a batch of one is the slowest way to ask
    others_every: int  # one question of so many is asked in the other ways again, but for the most usual one
    max_draws: int  # samples for the statistical part, at most

    def __post_init__(self) -> None:
        if self.max_tokens < 4:
            raise ValueError(f"max_tokens must be at least 4, not {self.max_tokens}: drafts need room to be judged")


QUICK = ProofEffort(num_prompts=4, num_seeds=1, max_tokens=16, alone_every=4, others_every=2, max_draws=1500)
FULL = ProofEffort(num_prompts=12, num_seeds=2, max_tokens=32, alone_every=4, others_every=2, max_draws=6000)
TEMPERATURES = (0.0, 0.7, 1.0)

_raw = partial(PromptText, is_chat=False)
# A quick run asks the first ones only. Many repeat themselves, so that an n-gram drafter has something to find.
PROMPTS = (
    _raw("one two three four one two three four one two three four one two"),
    PromptText("What is a good way to learn the names of birds?", is_chat=True),
    _raw("The cat sat on the mat. The dog sat on the rug. The cat sat on the mat. The dog sat on"),
    PromptText("Say the sentence three times: The bus leaves at seven from the old market square.", is_chat=True),
    _raw("In the morning the harbour was quiet, and only the gulls knew that"),
    _raw("x = 1\ny = 2\nprint(x + y)\nx = 2\ny = 3\nprint(x + y)\nx = 3\ny = 4\n"),
    PromptText("Name three vegetables and say how to cook each of them.", is_chat=True),
    _raw("Row, row, row your boat. Row, row, row your boat. Row, row,"),
    PromptText("Two people stand at a river. There is one small boat. How do they both cross?", is_chat=True),
    _raw("name: Ada, age: 36, city: London\nname: Ben, age: 41, city: Paris\nname: Cleo, age: 29, city:"),
    PromptText("Why do leaves fall in autumn?", is_chat=True),
    _raw("A recipe for bread: flour, water, salt and time. First mix the flour and the water. Then add"),
)

Extra = Callable[[Sequence[int], int], dict[str, Any]]  # prompt ids, max_tokens -> sampling options


def _filters(ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {"top_k": 20, "top_p": 0.9, "min_p": 0.02}


def _penalties(ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}


def _bias_and_bars(ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Pairs of the prompt's own tokens are barred: just what a drafter would like to propose."""
    common = _common(ids)
    pairs = [list(pair) for pair in zip(ids[1::3], ids[2::3], strict=False)]
    return {"logit_bias": {common[0]: 2.0, common[-1]: -4.0}, "bad_words": pairs[:6] or [[common[0]]]}


def _minimum_and_stop(ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {"min_tokens": max_tokens // 4, "stop_token_ids": _common(ids)[:6], "ignore_eos": False}


def _common(ids: Sequence[int]) -> list[int]:
    """The prompt's tokens, the most common first: those that are likely to come again."""
    return [token for token, _ in Counter(ids).most_common()]


OPTIONS: dict[str, Extra] = {
    "plain": lambda ids, max_tokens: {},
    "top-k, top-p, min-p": _filters,
    "penalties": _penalties,
    "bias, bad words": _bias_and_bars,
    "min tokens, stop id": _minimum_and_stop,
    "stop text": lambda ids, max_tokens: {"stop": [". ", ",", "\n"], "min_tokens": 3, "ignore_eos": False},
    "two answers": lambda ids, max_tokens: {"n": 2},
    "logprobs": lambda ids, max_tokens: {"logprobs": 5},
}
NEEDS_TOKENIZER = frozenset({"stop text"})
UNADJUSTED = frozenset({"plain", "two answers", "logprobs"})  # the choice is made on the target's logits as they are


@dataclass(frozen=True)
class ProofRequest:
    """One request that is put to both sides."""

    prompt_number: int
    prompt_token_ids: tuple[int, ...]
    option: str
    params: SamplingParams

    @property
    def temperature(self) -> float:
        return self.params.temperature

    @property
    def prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompt_token_ids)}

    @property
    def final_len(self) -> int:
        assert self.params.max_tokens is not None
        return len(self.prompt_token_ids) + self.params.max_tokens


def built_in_prompts(vocabulary: PromptVocabulary, effort: ProofEffort) -> list[PromptText]:
    if vocabulary.tokenizer is None:
        return random_prompts(vocabulary.size, effort.num_prompts)
    return list(PROMPTS[: effort.num_prompts])


def ask(prompts: Sequence[Sequence[int]], effort: ProofEffort, *, has_tokenizer: bool) -> list[ProofRequest]:
    """Every question, those of one prompt side by side: a batch then mixes all options and temperatures."""
    questions = []
    for number, ids in enumerate(prompts):
        for option, extra in OPTIONS.items():
            if option in NEEDS_TOKENIZER and not has_tokenizer:
                continue
            given = {"ignore_eos": True, "max_tokens": effort.max_tokens, **extra(ids, effort.max_tokens)}
            for temperature in TEMPERATURES:
                for seed in range(effort.num_seeds if temperature else 1):
                    params = SamplingParams(temperature=temperature, seed=FIRST_SEED + 100 * number + seed, **given)
                    questions.append(ProofRequest(number, tuple(ids), option, params))
    return questions
