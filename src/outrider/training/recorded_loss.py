"""The loss of a lesson and its gradients as CUDA graphs: recorded once for every shape of lesson, then replayed. A
drafter is small, and a GPU done with its two thousand launches long before the host has made them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.drafters.lesson import Lesson, Loss, Noise

NUM_SIZES = 16  # of how many places are learnt: a recording for each that comes up


def rounded_up(count: int, total: int) -> int:
    """To one of NUM_SIZES sizes."""
    size = -(-total // NUM_SIZES)
    return min(-(-count // size) * size, total)


@dataclass(frozen=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    lesson: Lesson  # what it reads
    loss: Loss
    gradients: list[Tensor | None]


class RecordedLoss:
    """loss(lesson).total.backward(), replayed. What cannot be recorded is computed as it is, after a warning."""

    def __init__(self, loss: Callable[[Lesson], Loss], parameters: Sequence[nn.Parameter]) -> None:
        self._loss, self._parameters = loss, list(parameters)
        self._recordings: dict[tuple[int | None, ...], Recording] = {}
        self._stream = torch.cuda.Stream(self._parameters[0].device)
        self._pool: Any = None
        self._is_lent = False  # whether gradients lie where the next replay writes
        self.refused: str | None = None  # why nothing is recorded

    def __call__(self, lesson: Lesson) -> Loss:
        """Gradients are added to those that are there."""
        if self.refused is None:
            key = (*lesson.shape, lesson.most_learnt)
            if key not in self._recordings:
                self._keep()
                recording = self._record(lesson)
                if recording is not None:
                    self._recordings[key] = recording
            if key in self._recordings:
                return self._replay(self._recordings[key], lesson)
        loss = self._loss(lesson)
        loss.total.backward()
        return loss

    def _replay(self, recording: Recording, lesson: Lesson) -> Loss:
        self._keep()
        for place, values in zip(_tensors(recording.lesson), _tensors(lesson), strict=True):
            place.copy_(values, non_blocking=True)
        recording.graph.replay()
        for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad += gradient
        self._is_lent = True
        loss = recording.loss
        return Loss(*(each.detach().clone() for each in (loss.total, loss.weight, loss.agreed, loss.asked)))

    def _keep(self) -> None:
        """Of gradients of other parts of the same step: recordings share their memory."""
        if self._is_lent:
            for parameter in self._parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        self._is_lent = False

    def _record(self, lesson: Lesson) -> Recording | None:
        """Once as it is, so that nothing is made only once while it is recorded; then recorded."""
        device = self._parameters[0].device
        before = [parameter.grad for parameter in self._parameters]
        lesson = _copied(lesson)
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                self._backward(lesson)
            torch.cuda.synchronize(device)
            self._forget()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="relaxed"):
                loss = self._backward(lesson)
            gradients = [parameter.grad for parameter in self._parameters]
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0]
            _end_recording_of_random_numbers(device)
            warnings.warn(
                f"a step of this drafter cannot be recorded as a CUDA graph ({self.refused}): training goes on, slower",
                stacklevel=2,
            )
            return None
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
        self._pool = self._pool or graph.pool()
        return Recording(graph, lesson, loss, gradients)

    def _backward(self, lesson: Lesson) -> Loss:
        self._forget()
        loss = self._loss(lesson)
        loss.total.backward()
        return loss

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _end_recording_of_random_numbers(device: torch.device) -> None:
    """A recording that is broken off leaves torch's generator in the belief that it goes on: whoever draws from it next
    would fail. Its state is taken over without that."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(generator.clone_state().graphsafe_get_state())


def _tensors(lesson: Lesson) -> list[Tensor]:
    """All that differs from lesson to lesson."""
    return [lesson.tokens, lesson.documents, lesson.places, lesson.learnt, lesson.taps, lesson.last, lesson.noise.seeds]


def _copied(lesson: Lesson) -> Lesson:
    tokens, documents, places, learnt, taps, last, seeds = (each.clone() for each in _tensors(lesson))
    return replace(
        lesson, tokens=tokens, documents=documents, places=places, learnt=learnt, taps=taps, last=last,
        noise=Noise(seeds),
    )  # fmt: skip
