"""One answer against another: where they part, and how close the choice was there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.certify.questions import UNADJUSTED, ProofRequest
from outrider.kernels.sampling import gumbel
from outrider.llm import LLM
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.sampling_params import MAX_LOGPROBS, SamplingParams

LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}


@dataclass(frozen=True)
class Difference:
    """Where two completions of one prompt part."""

    kind: str  # "token", "length", "finish", "text" or "logprob"
    completion: int  # which of the n
    position: int  # of the first token that differs
    plain: Any
    speculative: Any


@dataclass(frozen=True)
class Divergence:
    """A difference with everything that is needed to look into it."""

    case: str
    prompt: int
    option: str
    temperature: float
    seed: int
    difference: Difference
    prompt_token_ids: tuple[int, ...]
    common: tuple[int, ...]  # the tokens that both sides said before it
    context: str = ""  # the end of the text before it
    plain_text: str = ""
    speculative_text: str = ""
    top_two_gap: float | None = None  # of the target's two best logits there; near 0: a tie that rounding may decide
    choice_margin: float | None = None  # score of the plain choice less the other's, noise included

    def to_dict(self) -> dict[str, Any]:
        difference = self.difference
        return {
            "case": self.case,
            "prompt": self.prompt,
            "option": self.option,
            "temperature": self.temperature,
            "seed": self.seed,
            "kind": difference.kind,
            "completion": difference.completion,
            "position": difference.position,
            "plain": difference.plain,
            "speculative": difference.speculative,
            "plain_text": self.plain_text,
            "speculative_text": self.speculative_text,
            "context": self.context,
            "prompt_token_ids": list(self.prompt_token_ids),
            "common_token_ids": list(self.common),
            "top_two_gap": self.top_two_gap,
            "choice_margin": self.choice_margin,
        }


def differences(plain: RequestOutput, found: RequestOutput, tolerance: float) -> Iterator[Difference]:
    """The first difference of each completion that has one."""
    assert len(plain.outputs) == len(found.outputs)
    assert plain.prompt_token_ids == found.prompt_token_ids
    for left, right in zip(plain.outputs, found.outputs, strict=True):
        difference = compare(left, right, tolerance)
        if difference is not None:
            yield difference


def compare(plain: CompletionOutput, found: CompletionOutput, tolerance: float) -> Difference | None:
    """Tokens first, then how they ended and what they read like, then their log-probabilities."""
    for position, (left, right) in enumerate(zip(plain.token_ids, found.token_ids, strict=False)):
        if left != right:
            return Difference("token", plain.index, position, left, right)
    lengths = len(plain.token_ids), len(found.token_ids)
    if lengths[0] != lengths[1]:
        return Difference("length", plain.index, min(lengths), *lengths)
    ends = [(each.finish_reason, each.stop_reason) for each in (plain, found)]
    if ends[0] != ends[1]:
        return Difference("finish", plain.index, lengths[0], *map(list, ends))
    if plain.text != found.text:
        return Difference("text", plain.index, lengths[0], plain.text, found.text)
    for position, own, other in _logprob_pairs(plain, found):
        if not abs(own - other) <= tolerance:  # also where one of them is no number
            return Difference("logprob", plain.index, position, own, other)
    return None


def largest_logprob_difference(plain: RequestOutput, found: RequestOutput) -> float:
    """Over the tokens that both sides said; 0 where no log-probabilities were asked for."""
    pairs = zip(plain.outputs, found.outputs, strict=True)
    return max((abs(a - b) for left, right in pairs for _, a, b in _logprob_pairs(left, right)), default=0.0)


def _logprob_pairs(plain: CompletionOutput, found: CompletionOutput) -> Iterator[tuple[int, float, float]]:
    """Position and both sides' values, up to the first token that differs: of the token, and of the best few."""
    if plain.logprobs is None or found.logprobs is None:
        return
    rows = zip(plain.logprobs, found.logprobs, plain.token_ids, found.token_ids, strict=False)
    for position, (left, right, own, other) in enumerate(rows):
        if own != other:
            return
        yield position, left[own].logprob, right[own].logprob
        ranked = [sorted((entry.logprob for entry in row.values()), reverse=True) for row in (left, right)]
        yield from ((position, a, b) for a, b in zip(*ranked, strict=False))


def corrupted(output: RequestOutput, position: int, vocab_size: int) -> RequestOutput:
    """The same answer with one wrong token: what a comparison must notice."""
    first = output.outputs[0]
    ids = list(first.token_ids)
    ids[position] = (ids[position] + 1) % vocab_size
    return replace(output, outputs=[replace(first, token_ids=ids), *output.outputs[1:]])


def describe(question: ProofRequest, plain: RequestOutput, difference: Difference, case: str) -> Divergence:
    output = plain.outputs[difference.completion]
    return Divergence(
        case=case,
        prompt=question.prompt_number,
        option=question.option,
        temperature=question.temperature,
        seed=output.seed,
        difference=difference,
        prompt_token_ids=question.prompt_token_ids,
        common=tuple(output.token_ids[: difference.position]),
    )


def explain(divergence: Divergence, plain: LLM) -> Divergence:
    """Adds the text around it, and what the target itself thinks of the two tokens."""
    difference, tokenizer = divergence.difference, plain.tokenizer
    before = [*divergence.prompt_token_ids, *divergence.common]
    if tokenizer is not None:
        divergence = replace(divergence, context=tokenizer.decode(before[-24:], skip_special_tokens=False))
    if difference.kind != "token" or len(before) >= plain.max_model_len:
        return divergence
    wanted = min(MAX_LOGPROBS, plain.target.vocab_size)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=wanted)
    (output,) = plain.generate({"prompt_token_ids": before}, params)
    assert output.outputs[0].logprobs is not None
    scores = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
    best = sorted(scores.values(), reverse=True)
    return replace(
        divergence,
        plain_text=tokenizer.token(difference.plain) if tokenizer is not None else "",
        speculative_text=tokenizer.token(difference.speculative) if tokenizer is not None else "",
        top_two_gap=best[0] - best[1] if len(best) > 1 else None,
        choice_margin=_margin(divergence, scores, len(before)),
    )


def _margin(divergence: Divergence, scores: dict[int, float], position: int) -> float | None:
    """By how much the plain choice wins over the other, where the choice is made on the target's own logits."""
    pair = [divergence.difference.plain, divergence.difference.speculative]
    if divergence.option not in UNADJUSTED or not all(token in scores for token in pair):
        return None
    logits = torch.tensor([scores[token] for token in pair])
    if divergence.temperature > 0:
        seed, place = torch.tensor([divergence.seed]), torch.tensor([position])
        logits = logits / divergence.temperature + gumbel(seed, place, torch.tensor(pair))[0]
    return float(logits[0] - logits[1])
