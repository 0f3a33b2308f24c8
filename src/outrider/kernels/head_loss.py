"""How far a drafter's next-token distributions are from the target's: both heads and the divergence in one operation.
Some rows at a time, forwards and backwards, so that no large tensor of [rows, vocabulary] is ever kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.dispatch import use_triton

CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}  # logits that are looked at at a time
KEPT_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # where there are no more, slopes are kept for the way back
FADING = 3.0  # of the Kullback-Leibler divergence in the LK hybrid, with the overlap


@dataclass(frozen=True)
class Divergence:
    """soft: Kullback-Leibler divergence from the target's distribution; hard: cross entropy to its best token. lk: soft
    is the LK hybrid: the more of the two distributions overlaps, the more of it is total variation, which is what keeps
    sampled drafts from standing, and the less is that divergence, which leads there from afar."""

    soft: float = 1.0
    hard: float = 0.0
    lk: bool = False


@dataclass(frozen=True)
class HeadMatrix:
    """A head as numbers: logits are weight [V, H] times a state, capped where softcap > 0."""

    weight: Tensor
    softcap: float = 0.0

    def product(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.weight.dtype) @ self.weight.T

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.product(hidden).float()
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


@dataclass(frozen=True)
class HeadLoss:
    loss: Tensor  # [N] with gradients
    surprise: Tensor  # [N] cross entropy to the target's best token
    agreed: Tensor  # [N] bool: both name the same token first


def head_loss(
    hidden: Tensor, head: HeadMatrix, teacher: Tensor, teacher_head: HeadMatrix, divergence: Divergence
) -> HeadLoss:
    """hidden [N, H]: states of the drafter; teacher [N, H_t]: the target's that say the same tokens, normed. Both heads
    speak of the same V tokens. Gradients reach hidden, and the drafter's head if it is trained."""
    chunks = _Chunks(head, teacher, teacher_head, divergence)
    loss, surprise, agreed = _HeadLoss.apply(hidden, head.weight, chunks)  # type: ignore[no-untyped-call]
    return HeadLoss(loss, surprise, agreed)


def head_loss_reference(
    hidden: Tensor, head: HeadMatrix, teacher: Tensor, teacher_head: HeadMatrix, divergence: Divergence
) -> HeadLoss:
    """All at once."""
    logits, taught = head.logits(hidden), teacher_head.logits(teacher)
    log_probs, wanted, best = logits.log_softmax(-1), taught.log_softmax(-1), taught.argmax(-1)
    surprise = -log_probs.gather(-1, best[:, None])[:, 0]
    soft = (wanted.exp() * (wanted - log_probs)).sum(-1)
    if divergence.lk:
        overlap = torch.minimum(wanted.exp(), log_probs.exp()).sum(-1)
        share = torch.exp(-FADING * overlap.detach())
        soft = share * soft + (1 - share) * (1 - overlap)
    return HeadLoss(divergence.soft * soft + divergence.hard * surprise, surprise.detach(), logits.argmax(-1) == best)


@dataclass(frozen=True)
class _Chunks:
    head: HeadMatrix
    teacher: Tensor
    teacher_head: HeadMatrix
    divergence: Divergence

    def rows(self, hidden: Tensor) -> list[slice]:
        size = max(CHUNK_ELEMENTS[hidden.device.type] // len(self.head.weight), 1)
        return [slice(begin, begin + size) for begin in range(0, len(hidden), size)]

    def compare(self, hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [n, H] -> loss, surprise and agreement [n], and the loss' gradient by the head's product [n, V]."""
        divergence, cap = self.divergence, self.head.softcap
        soft, hard, states = divergence.soft, divergence.hard, self.teacher[rows]
        if use_triton(hidden):
            from outrider.kernels.gpu import head_loss as gpu

            capped = self.teacher_head.softcap != 0
            taught = self.teacher_head.logits(states) if capped else self.teacher_head.product(states)
            slope = self.head.product(hidden)
            return *gpu.compare(slope, taught, soft, hard, cap, FADING if divergence.lk else 0.0), slope
        logits, taught = self.head.logits(hidden), self.teacher_head.logits(states)
        log_probs, wanted, best = logits.log_softmax(-1), taught.log_softmax(-1), taught.argmax(-1)[:, None]
        surprise = -log_probs.gather(-1, best)[:, 0]
        probs = wanted.exp()
        loss, said = soft * (probs * (wanted - log_probs)).sum(-1), log_probs.exp_()
        if divergence.lk:
            less = said < probs
            overlap, covered = torch.where(less, said, probs).sum(-1), (said * less).sum(-1, keepdim=True)
            share = torch.exp(-FADING * overlap)
            loss, share = share * loss + (1 - share) * soft * (1 - overlap), share[:, None]
            slope = soft * (share * (said - probs) + (1 - share) * said * (covered - less.float())) + hard * said
        else:
            slope = said.mul_(soft + hard).sub_(probs, alpha=soft)
        loss += hard * surprise
        slope.scatter_add_(-1, best, torch.full_like(best, -hard, dtype=slope.dtype))
        if cap:
            slope *= 1 - (logits / cap).square()
        return loss, surprise, logits.argmax(-1) == best[:, 0], slope


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, chunks: _Chunks) -> tuple[Tensor, Tensor, Tensor]:
        loss, surprise = (torch.empty(len(hidden), device=hidden.device) for _ in range(2))
        agreed = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        gradient, slopes = torch.empty_like(hidden), []
        keeps = ctx.needs_input_grad[1] and len(hidden) * len(weight) <= KEPT_ELEMENTS[hidden.device.type]
        for rows in chunks.rows(hidden):
            loss[rows], surprise[rows], agreed[rows], slope = chunks.compare(hidden[rows], rows)
            gradient[rows] = (slope.to(weight.dtype) @ weight).to(hidden.dtype)
            slopes += [slope] if keeps else []
        ctx.chunks = chunks
        ctx.save_for_backward(gradient, *([hidden, weight, *slopes] if ctx.needs_input_grad[1] else []))
        ctx.mark_non_differentiable(surprise, agreed)
        return loss, surprise, agreed

    @staticmethod
    def backward(ctx: Any, wanted_loss: Tensor, *others: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gradient, *trained = ctx.saved_tensors
        by_weight = None
        if trained:  # what each row weighs is known only now: logits that were too many to be kept are computed again
            hidden, weight, *slopes = trained
            by_weight = torch.zeros_like(weight, dtype=torch.float32)
            for number, rows in enumerate(ctx.chunks.rows(hidden)):
                slope = slopes[number] if slopes else ctx.chunks.compare(hidden[rows], rows)[-1]
                weighed = (hidden[rows] * wanted_loss[rows, None]).to(weight.dtype)
                by_weight += (slope.to(weight.dtype).T @ weighed).float()
            by_weight = by_weight.to(weight.dtype)
        return gradient * wanted_loss[:, None].to(gradient.dtype), by_weight, None
