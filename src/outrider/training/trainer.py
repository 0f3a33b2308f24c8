"""The loop: rows of texts, the target's own states of them, the drafter's loss, a step. It knows no method.
Step n is a function of the seed and n alone, so that a run which was broken off goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from outrider.drafters.base import Drafter
from outrider.drafters.lesson import Lesson, Loss, Noise
from outrider.engine.upload import upload
from outrider.kernels.head_loss import Divergence
from outrider.layers.packing import dense
from outrider.training.optimizer import Optimizer, Rates
from outrider.training.recorded_loss import RecordedLoss, rounded_up
from outrider.training.teacher import Teacher
from outrider.training.texts import Rows


@dataclass(frozen=True)
class Lessons:
    """How much is learnt at a time, and how."""

    num_rows: int  # in a step, of all processes together
    depth: int
    divergence: Divergence = field(default_factory=Divergence)
    parts: int = 1  # a step's rows are read in so many parts, one after the other
    seed: int = 0


@dataclass(frozen=True)
class World:
    """The processes that train together; torchrun starts them."""

    rank: int = 0
    size: int = 1

    def sum(self, tensors: list[Tensor]) -> None:
        """In place, over all processes."""
        if self.size > 1 and tensors:
            flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
            torch.distributed.all_reduce(flat)
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def agreed(self, decision: bool, device: torch.device) -> bool:
        """What the first process has decided."""
        if self.size == 1:
            return decision
        told = torch.tensor([float(decision)], device=device)
        torch.distributed.broadcast(told, src=0)
        return bool(told.item())


ALONE = World()


@dataclass
class Record:
    """Sums of the steps since it was last read, on the device."""

    values: Tensor | None = None
    num_steps: int = 0

    def add(self, loss: Loss) -> None:
        row = torch.cat([loss.total.detach()[None], loss.weight[None], loss.agreed, loss.asked]).double()
        self.values = row if self.values is None else self.values + row
        self.num_steps += 1

    def read(self) -> dict[str, Any]:
        """Waits for the device."""
        assert self.values is not None
        total, weight, *counts = self.values.tolist()
        half = len(counts) // 2
        agreement = [a / n if n else 0.0 for a, n in zip(counts[:half], counts[half:], strict=True)]
        self.values, self.num_steps = None, 0
        return {"loss": total / max(weight, 1e-9), "agreement": agreement}


@dataclass
class Trainer:
    drafter: Drafter  # float32, with its parameters on the target's device
    teacher: Teacher
    rows: Rows
    lessons: Lessons
    rates: Rates
    world: World = ALONE
    train_vocabulary: bool = False  # heads and embeddings of its own too
    records: bool = False  # losses are recorded as CUDA graphs: for lessons of few shapes, on a GPU
    step_number: int = 0
    record: Record = field(default_factory=Record)

    def __post_init__(self) -> None:
        frozen = {name for name, p in self.drafter.named_parameters() if not p.is_floating_point()}
        if not self.train_vocabulary:
            frozen |= set(self.drafter.frozen())
        for name, parameter in self.drafter.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.teacher.target.requires_grad_(False)
        if self.rates.matrices is None:
            self.rates = replace(self.rates, matrices=self.drafter.matrix_rate)
        self.optimizer = Optimizer(self.trained(), self.rates)
        compute = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.head = dense(self.teacher.target.head).detach().to(compute)
        self._recorded: RecordedLoss | None = None
        if self.records and self.device.type == "cuda":
            self._recorded = RecordedLoss(self._judged, list(self.optimizer.parameters.values()))
        self._orders: dict[int, Tensor] = {}  # of rows, by how often all had their turn

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.drafter.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        return self.teacher.device

    @property
    def tokens_per_step(self) -> int:
        return self.lessons.num_rows * self.rows.tokens.shape[1]

    def step(self, progress: float) -> None:
        """`progress`: share of the run that is done."""
        index = self.chosen(self.step_number)
        numbered = torch.stack([index, torch.arange(len(index))], dim=1)
        losses = []
        for part in numbered[self.world.rank :: self.world.size].tensor_split(self.lessons.parts):
            if len(part):
                losses.append(self._learnt(self.lesson(self.rows.take(part[:, 0]), part[:, 1])))
        counts = [sum((getattr(each, name) for each in losses[1:]), start=getattr(losses[0], name).detach())
                  for name in ("weight", "agreed", "asked", "total")]  # fmt: skip
        gradients = [p.grad for p in self.optimizer.parameters.values() if p.grad is not None]
        counts = [each.detach().clone() for each in counts]
        self.world.sum([*counts, *gradients])
        weight, agreed, asked, total = counts
        torch._foreach_div_(gradients, weight.clamp(min=1.0))
        self.optimizer.step(self.rates.scale(progress))
        self.record.add(Loss(total, weight, agreed, asked))
        self.step_number += 1

    def chosen(self, number: int) -> Tensor:
        """The rows of a step: every row once before any comes again, in another order each time."""
        first, count, total = number * self.lessons.num_rows, self.lessons.num_rows, len(self.rows)
        places = torch.arange(first, first + count)
        epochs = (places // total).unique().tolist()
        self._orders = {epoch: self._order(epoch) for epoch in epochs}
        return torch.cat([self._orders[epoch][places[places // total == epoch] % total] for epoch in epochs])

    def _order(self, epoch: int) -> Tensor:
        known = self._orders.get(epoch)
        if known is not None and len(known) == len(self.rows):
            return known
        source = torch.Generator().manual_seed(self.lessons.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.rows), generator=source)

    def loss(self, rows: Rows, numbers: Tensor) -> Loss:
        """`numbers`: which of the step's rows they are."""
        return self._judged(self.lesson(rows, numbers))

    def _judged(self, lesson: Lesson) -> Loss:
        with self._autocast():
            return self.drafter.loss(lesson)

    def _learnt(self, lesson: Lesson) -> Loss:
        """Its gradients are added to those that are there."""
        if self._recorded is not None:
            return self._recorded(lesson)
        loss = self._judged(lesson)
        loss.total.backward()
        return loss

    def lesson(self, rows: Rows, numbers: Tensor) -> Lesson:
        hidden, step = self.teacher.read(rows), self.lessons.seed * 1_000_003 + self.step_number
        shape, here = rows.tokens.shape, rows.to(self.device)
        return Lesson(
            tokens=here.tokens,
            documents=here.documents,
            places=here.places,
            learnt=here.learnt,
            taps=hidden.taps.unflatten(0, shape),
            last=hidden.last.unflatten(0, shape),
            depth=self.lessons.depth,
            divergence=self.lessons.divergence,
            noise=Noise(upload(numbers + step * self.lessons.num_rows, self.device)),
            head=self.head,
            most_learnt=None if self._recorded is None else rounded_up(rows.num_learnt, rows.tokens.numel()),
        )

    def _autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    # what is kept

    def state(self) -> dict[str, Tensor]:
        return self.optimizer.state()

    def restore(self, state: Mapping[str, Tensor], step_number: int) -> None:
        self.optimizer.restore(state, step_number)
        self.step_number = step_number
