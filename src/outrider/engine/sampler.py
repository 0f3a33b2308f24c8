"""The one pipeline between logits and tokens. It runs on every row, drafts included, each with its own prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.request import Request
from outrider.kernels.sampling import GREEDY_TEMPERATURE, choose
from outrider.sampling_params import SamplingParams
from outrider.types import Batch, Sampling, SlotState


@dataclass(frozen=True)
class Masks:
    """Which tokens a grammar allows, for those rows of the logits that a grammar has a say in."""

    rows: Tensor  # [G]
    bits: Tensor  # [G, ceil(V / 32)] int32, lowest bit first


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature <= GREEDY_TEMPERATURE


def is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def sampling_of(requests: Sequence[Request], vocab_size: int, device: torch.device) -> Sampling:
    """The options of these requests as tensors."""
    params = [request.params for request in requests]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    ends = [barred_ids(request) for request in requests]
    return Sampling(
        temperature=column([p.temperature for p in params]),
        top_k=column([p.top_k if p.top_k > 0 else vocab_size for p in params], torch.long),
        top_p=column([p.top_p for p in params]),
        min_p=column([p.min_p for p in params]),
        seed=column([request.seed for request in requests], torch.long),
        repetition=column([p.repetition_penalty for p in params]),
        presence=column([p.presence_penalty for p in params]),
        frequency=column([p.frequency_penalty for p in params]),
        prompt_len=column([len(request.prompt) for request in requests], torch.long),
        min_len=column([len(r.prompt) + r.params.min_tokens for r in requests], torch.long),
        end_ids=torch.tensor(_padded(ends), dtype=torch.long, device=device),
        bias=_bias(requests, vocab_size, device),
        bad_words=_bad_words(requests, device),
        greedy=all(map(is_greedy, params)),
        filtered=any(map(is_filtered, params)),
        penalised=any(map(is_penalised, params)),
        bounded=any(p.min_tokens > 0 for p in params),
    )


def adjusts(request: Request) -> bool:
    """Whether this request's logits are changed before a token is chosen."""
    params = request.params
    bounds = params.logit_bias is not None or params.allowed_token_ids is not None or params.min_tokens > 0
    return bounds or bool(request.bad_words) or is_penalised(params)


def adjust(logits: Tensor, sampling: Sampling, batch: Batch, rows: Tensor, state: SlotState) -> Tensor:
    """Bias, bars and penalties on logits [R, V] of batch rows `rows` [R]: row j is judged by tokens[: j + 1]."""
    if not sampling.adjusts:
        return logits
    request = batch.request[rows]
    logits = logits.float()
    if sampling.bias is not None:
        logits = logits + sampling.bias[request]
    if sampling.bounded:
        short = (batch.indices[rows] + 1 < sampling.min_len[request])[:, None]
        logits = _bar(logits, sampling.end_ids[request], short)
    if sampling.bad_words is None and not sampling.penalised:
        return logits
    # Only now is the text itself needed: [R, L], each row's own prefix
    tokens = state.tokens[batch.slots[request], : batch.max_len]
    end = batch.indices[rows][:, None]
    if sampling.bad_words is not None:
        logits = _bar_bad_words(logits, sampling.bad_words[request], tokens, end)
    if sampling.penalised:
        logits = _penalise(logits, sampling, request, tokens, end)
    return logits


def sample(
    logits: Tensor, sampling: Sampling, batch: Batch, rows: Tensor, state: SlotState, masks: Masks | None = None
) -> Tensor:
    """The target's own token after each of `rows` [R]; logits [R, V] -> [R]."""
    adjusted = adjust(logits, sampling, batch, rows, state)
    if masks is not None:
        adjusted = restrict(adjusted, logits, masks)
    return choose(adjusted, sampling, batch.request[rows], batch.indices[rows] + 1)


def restrict(adjusted: Tensor, logits: Tensor, masks: Masks) -> Tensor:
    """-inf where a grammar forbids. It has the last word: where the other options leave nothing of what it allows
    (an end token under min_tokens, say), they yield, and the target's own logits [R, V] count."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    forbidden = (masks.bits[:, ids // 32] >> (ids % 32)) & 1 == 0  # [G, V]
    adjusted = adjusted.float()
    kept = adjusted[masks.rows].masked_fill(forbidden, -torch.inf)
    nothing = kept.amax(-1, keepdim=True) == -torch.inf
    own = logits[masks.rows].float().masked_fill(forbidden, -torch.inf)
    return adjusted.index_copy(0, masks.rows, torch.where(nothing, own, kept))


def _bar(logits: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """-inf at `ids` [R, E] (-1: none) where `where` broadcasts to true."""
    barred = torch.where(where & (ids >= 0), ids, logits.shape[-1])
    padded = torch.cat([logits, logits[:, :1]], dim=-1)  # a column to bar when there is nothing to bar
    return padded.scatter(-1, barred, -torch.inf)[:, :-1]


def _bar_bad_words(logits: Tensor, words: Tensor, tokens: Tensor, end: Tensor) -> Tensor:
    """words [R, W, M] aligned right. A word's last token is barred where the text ends with all the others."""
    length = words.shape[-1] - 1
    place = end - torch.arange(length - 1, -1, -1, device=end.device)  # [R, M - 1]
    tail = torch.where(place >= 0, tokens.gather(1, place.clamp(min=0)), -2)  # [R, M - 1]
    matches = ((words[..., :-1] == tail[:, None]) | (words[..., :-1] == -1)).all(-1)  # [R, W]
    return _bar(logits, words[..., -1], matches)


def _penalise(logits: Tensor, sampling: Sampling, request: Tensor, tokens: Tensor, end: Tensor) -> Tensor:
    index = torch.arange(tokens.shape[1], device=tokens.device)
    said = index <= end  # [R, L]
    answer = said & (index >= sampling.prompt_len[request][:, None])
    empty = torch.zeros_like(logits)
    seen = empty.scatter_add(1, tokens, said.to(logits.dtype)) > 0
    count = empty.scatter_add(1, tokens, answer.to(logits.dtype))
    repetition = sampling.repetition[request][:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - sampling.frequency[request][:, None] * count
    return logits - sampling.presence[request][:, None] * (count > 0)


def barred_ids(request: Request) -> list[int]:
    return sorted(request.end_ids | set(request.params.stop_token_ids)) if request.params.min_tokens else []


def _padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(1, *(len(row) for row in rows)) if rows else 1
    return [[*row, *[-1] * (width - len(row))] for row in rows]


def _bias(requests: Sequence[Request], vocab_size: int, device: torch.device) -> Tensor | None:
    if not any(r.params.logit_bias or r.params.allowed_token_ids is not None for r in requests):
        return None
    bias = torch.zeros(len(requests), vocab_size, device=device)
    for row, request in zip(bias, requests, strict=True):
        if request.params.allowed_token_ids is not None:
            row.fill_(-torch.inf)
            row[list(request.params.allowed_token_ids)] = 0.0
        for token, value in (request.params.logit_bias or {}).items():
            row[token] += value
    return bias


def _bad_words(requests: Sequence[Request], device: torch.device) -> Tensor | None:
    words = [request.bad_words for request in requests]
    if not any(words):
        return None
    num_words = max(len(ws) for ws in words)
    length = max(len(w) for ws in words for w in ws)
    table = torch.full((len(words), num_words, length), -1, dtype=torch.long)
    for number, ws in enumerate(words):
        for place, word in enumerate(ws):
            table[number, place, length - len(word) :] = torch.tensor(word)
    return table.to(device)
