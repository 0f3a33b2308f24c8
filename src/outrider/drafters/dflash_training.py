"""A new drafter of the DFlash family, and DSpark's correction as a part of its head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.drafters.dspark import ConfidenceHead, MarkovHead
from outrider.drafters.fresh import Fresh, Mould, Plan, Tensors, offsets
from outrider.drafters.lesson import Guess, Lesson, Teaching
from outrider.kernels.head_loss import HeadMatrix
from outrider.models.base import Target

MAX_TAPS, NUM_LAYERS, MARKOV_RANK = 5, 2, 64


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """From the second layer to the last but two, evenly; fewer where the target has no more."""
    first, last = min(2, num_layers), max(num_layers - 2, 1)
    spread = [round(first + number * (last - first) / max(count - 1, 1)) for number in range(count)]
    return tuple(sorted(set(spread)))


def fresh_dflash(target: Target, plan: Plan) -> Fresh:
    """In z-lab's dialect. Its embedding is the target's; so is its head, unless it can say few tokens only. In
    DSpark's form, tokens of a block hear the one before."""
    markov = plan.method == "dspark"
    mould, num_layers = Mould.of(target, plan, head_norm=True), plan.num_layers or NUM_LAYERS
    taps = plan.taps or spread_taps(target.num_layers, MAX_TAPS)
    made = Tensors(target, mould, plan)
    tensors = {
        "fc.weight": made.last_of(len(taps)),
        "hidden_norm.weight": made.ones(),
        "norm.weight": made.final_norm(),
    }
    for number in range(num_layers):
        tensors |= made.layer(f"layers.{number}.")
    ids = plan.draft_ids
    if ids is not None:
        known = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)
        tensors |= {"lm_head.weight": made.head(ids), "d2t": offsets(ids), "t2d": known}
    draft_vocab_size = target.vocab_size if ids is None else len(ids)
    config = {
        "architectures": ["DSparkDraftModel" if markov else "DFlashDraftModel"],
        "model_type": "qwen3",
        **mould.config,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "block_size": plan.depth + (0 if markov else 1),
        "num_target_layers": target.num_layers,
        "draft_vocab_size": draft_vocab_size,
        "dflash_config": {"mask_token_id": plan.mask_token or 0, "target_layer_ids": [tap - 1 for tap in taps]},
    }
    if markov:
        tensors |= {
            "markov_head.markov_w1.weight": made.matrix(target.vocab_size, MARKOV_RANK),
            "markov_head.markov_w2.weight": torch.zeros(draft_vocab_size, MARKOV_RANK),
            "confidence_head.proj.weight": torch.zeros(1, mould.hidden_size + MARKOV_RANK),
            "confidence_head.proj.bias": torch.zeros(1),
        }
        config |= {"markov_rank": MARKOV_RANK, "markov_head_type": "vanilla", "sample_from_anchor": True}
        config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return Fresh(config, tensors)


def corrected(
    lesson: Lesson, markov: MarkovHead, taught: Teaching, guesses: list[Guess], scale: float = 1.0
) -> tuple[Teaching, list[Guess]]:
    """A bias W2 W1[token before] is a head that is W2 wider, over states that are W1[token before] longer. `scale`: of
    the states, for the head."""
    head = taught.head
    wide = HeadMatrix(torch.cat([head.weight, markov.output.weight.to(head.weight.dtype)], dim=1), head.softcap)
    longer = []
    for guess in guesses:
        heard = markov.heard(guess.hidden, tokens_before(lesson, guess)).to(guess.hidden.dtype)
        longer.append(replace(guess, hidden=torch.cat([guess.hidden * scale, heard], dim=-1)))
    return replace(taught, head=wide), longer


def tokens_before(lesson: Lesson, guess: Guess) -> Tensor:
    """[R, A] the token before the one that is guessed."""
    return lesson.tokens.gather(1, guess.columns.clamp(max=lesson.shape[1] - 1))


def chances(
    lesson: Lesson, confidence: ConfidenceHead | None, markov: MarkovHead | None, guesses: list[Guess]
) -> list[Tensor] | None:
    """Of each guess the chance [R, A], as logits, that its token will stand: what the confidence head learns to tell,
    and nothing else learns from."""
    if confidence is None:
        return None
    found = []
    for guess in guesses:
        hidden, latent = guess.hidden.detach().flatten(0, 1), None
        if markov is not None:
            latent = markov.embed(tokens_before(lesson, guess)).detach().flatten(0, 1)
        found.append(confidence.logits(hidden, latent).view(guess.anchors.shape))
    return found
