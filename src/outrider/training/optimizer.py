"""Muon for matrices, AdamW for the rest, and the average of the weights that is served.
State is plain tensors by name, so that a run can be written down and taken up again to the last bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that brings singular values near one in few steps
NUM_ITERATIONS = 5
LEAST_SIZE = 0.3  # of a matrix's numbers, where those of a random one, which keeps the size of what it reads, are one


@dataclass(frozen=True)
class Rates:
    matrices: float | None = None  # Muon: of the size of a matrix's numbers, so much is what a step changes; None: the
    # drafter's own
    others: float = 1e-3  # AdamW
    weight_decay: float = 0.0
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    warm_up: float = 0.02  # share of the run
    averaging: float = 0.999  # decay of the average

    def scale(self, progress: float) -> float:
        """Of the learning rates, when this share of the run is done: up, then down to nothing in a line."""
        if progress < self.warm_up:
            return max(progress / self.warm_up, 0.01)
        return max(1 - (progress - self.warm_up) / (1 - self.warm_up), 0.0)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices [..., m, n] whose singular values are about one (Newton and Schulz' iteration)."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Optimizer:
    """Over named parameters. No step asks the device for anything."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rates: Rates) -> None:
        self.rates = rates
        self.parameters = dict(parameters)
        # stacks too; but embeddings and heads are tables of vectors, whose rows are seen at very different rates
        self.matrices = {name: p for name, p in parameters.items() if p.dim() >= 2 and not _is_table(name)}
        self.others = {name: p for name, p in parameters.items() if name not in self.matrices}
        self.sizes = {name: _size(p) for name, p in self.matrices.items()}
        self._alike: dict[torch.Size, list[str]] = {}
        for name, matrix in self.matrices.items():
            self._alike.setdefault(matrix.shape, []).append(name)
        self.momenta = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.others.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.others.items()}
        self.average = {name: p.detach().clone() for name, p in parameters.items()}
        self.num_steps = 0

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """`scale`: of the learning rates. Returns the norm of the gradient before it was clipped."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.rates.clip, norm)
        self.num_steps += 1
        for names in self._alike.values():
            self._step_matrices([name for name in names if self.matrices[name].grad is not None], scale)
        self._step_others(self.rates.others * scale)
        decay = min(self.rates.averaging, (1 + self.num_steps) / (10 + self.num_steps))
        average, now = list(self.average.values()), [p.detach() for p in self.parameters.values()]
        torch._foreach_lerp_(average, now, 1 - decay)
        for parameter in self.parameters.values():
            parameter.grad = None
        return norm

    def _step_matrices(self, names: list[str], scale: float) -> None:
        """Of one shape, all at once."""
        if not names:
            return
        parameters: list[Tensor] = [self.matrices[name] for name in names]
        gradients, momenta = [p.grad for p in parameters if p.grad is not None], [self.momenta[name] for name in names]
        torch._foreach_lerp_(momenta, gradients, 1 - self.rates.momentum)
        directions = orthogonal(torch.stack(torch._foreach_lerp(gradients, momenta, self.rates.momentum)))
        assert self.rates.matrices is not None
        rate = self.rates.matrices * scale
        torch._foreach_mul_(parameters, 1 - rate * self.rates.weight_decay)
        # numbers of an orthogonal matrix, times this, are about one
        unit = math.sqrt(max(directions.shape[-2:]))
        moves = torch._foreach_mul(list(directions.unbind()), [-rate * unit * self.sizes[name] for name in names])
        torch._foreach_add_(parameters, moves)

    def _step_others(self, rate: float) -> None:
        names = [name for name, p in self.others.items() if p.grad is not None]
        if not names:
            return
        parameters: list[Tensor] = [self.others[name] for name in names]
        gradients = [p.grad for p in parameters if p.grad is not None]
        first, second = [self.first[name] for name in names], [self.second[name] for name in names]
        (low, high), count = self.rates.betas, self.num_steps
        torch._foreach_lerp_(first, gradients, 1 - low)
        torch._foreach_mul_(second, high)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - high)
        size = torch._foreach_sqrt(torch._foreach_div(second, 1 - high**count))
        torch._foreach_add_(size, 1e-8)
        torch._foreach_mul_(parameters, 1 - rate * self.rates.weight_decay)
        torch._foreach_addcdiv_(parameters, first, size, -rate / (1 - low**count))

    # state

    @torch.no_grad()
    def begin_again(self, values: Mapping[str, Tensor]) -> None:
        """From these weights, as if nothing had been learnt since."""
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])
            self.average[name].copy_(values[name])
        for kept in (self.momenta, self.first, self.second):
            torch._foreach_zero_(list(kept.values()))
        self.num_steps = 0

    def state(self) -> dict[str, Tensor]:
        kinds: dict[str, Mapping[str, Tensor]] = {
            "parameter": self.parameters,
            "average": self.average,
            "momentum": self.momenta,
            "first": self.first,
            "second": self.second,
        }
        return {f"{kind}.{name}": value.detach() for kind, values in kinds.items() for name, value in values.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        mine = self.state()
        if mine.keys() != state.keys():
            odd = sorted(mine.keys() ^ state.keys())
            raise ValueError(f"the checkpoint to resume is of another drafter: {', '.join(odd[:3])}; begin anew")
        for name, value in mine.items():
            value.copy_(state[name])
        self.num_steps = num_steps


def _size(matrix: Tensor) -> float:
    """Of its numbers: a step is a share of that. Weights of one target's layers are twenty times as large as those of
    another, whose norms make up for it. What begins as nothing, or next to it, counts as larger."""
    size = float(matrix.detach().square().mean().sqrt())
    return max(size, LEAST_SIZE * matrix.shape[-1] ** -0.5)


def _is_table(name: str) -> bool:
    return name.endswith(("embed.weight", "head.weight"))
