"""From a name to modules with weights: builds target and drafter, then fills every parameter, strictly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

import outrider.drafters
import outrider.models  # noqa: F401  (registers the targets)
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, drafters
from outrider.models.base import Target, targets
from outrider.types import Checkpoint, Weight

Progress = Callable[[str, int, int], None]  # what, done, total


@contextmanager
def building(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Modules made inside get their (still empty) parameters on this device, in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build_target(checkpoint: Checkpoint) -> Target:
    architectures = checkpoint.config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(f"{checkpoint.path}: config.json must name one architecture, not {architectures!r}")
    return targets[architectures[0]].from_config(checkpoint.config)


def build_drafter(settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Drafter:
    method = resolve_method(settings, checkpoint)
    if settings.parallel_drafting and not drafters[method].drafts_in_parallel:
        raise ValueError(f"method {method} has no use for parallel_drafting: remove it")
    return drafters[method].build(settings, target, checkpoint)


def lives_in_target(settings: SpeculativeConfig) -> bool:
    """Whether the drafter's weights are in the target's own checkpoint."""
    return settings.model is None and drafters[resolve_method(settings, None)].lives_in_target


def resolve_method(settings: SpeculativeConfig, checkpoint: Checkpoint | None) -> str:
    """The method the user named, or the one whose checkpoints look like this; or one that claims to be meant by it."""
    method = settings.method if settings.method is not None else _recognised(checkpoint)
    config = checkpoint.config if checkpoint is not None else {}
    return next((name for name in drafters if drafters[name].stands_for(method, settings, config)), method)


def _recognised(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None, "settings without a method have a model"
    sureness = {name: drafters[name].recognises(checkpoint.config) for name in drafters}
    best = max(sureness, key=lambda name: sureness[name])
    if not sureness[best]:
        raise ValueError(
            f'{checkpoint.path} does not say which kind of drafter it is: give "method", one of {", ".join(sureness)}'
        )
    return best


def load_weights(module: Target | Drafter, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Fills every parameter. A missing, surplus or misshapen tensor is an error that names it."""
    weights = module.weights()
    parameters = dict(module.named_parameters())
    assert weights.keys() == parameters.keys(), weights.keys() ^ parameters.keys()
    actual: dict[str, str] = {}  # names on disk, by the module's own
    for name in checkpoint.names():
        other = actual.setdefault(module.canonical(name), name)
        if other != name:
            raise ValueError(f"{checkpoint.path} holds {other} and {name}, which are the same weight: remove one")
    used = {name for weight in weights.values() for name in weight.names}
    present = set(actual)
    _complain(checkpoint, "lacks", used - present, "the download is incomplete or the architecture is another")
    surplus = {actual[name] for name in present - used if not module.ignores(name)}
    _complain(checkpoint, "has, but nothing uses,", surplus, "the config.json does not describe these weights")
    for done, (name, weight) in enumerate(weights.items()):
        stored = replace(weight, names=tuple(actual[source] for source in weight.names))
        _fill(parameters[name], checkpoint, name, stored)
        if progress is not None:
            progress(str(checkpoint.path), done + 1, len(weights))


def _fill(parameter: nn.Parameter, checkpoint: Checkpoint, name: str, weight: Weight) -> None:
    tensors = [checkpoint.tensor(source) for source in weight.names]
    try:
        combined = _combined(weight, tensors)
    except RuntimeError as error:
        misfits = _misfits(weight.names, tensors)
        raise ValueError(f"{checkpoint.path}: tensors that belong together do not fit: {misfits}") from error
    if combined.shape != parameter.shape:
        raise ValueError(
            f"{checkpoint.path}: {_listed(weight.names, ' + ')} has shape {tuple(combined.shape)}, but config.json "
            f"asks for {tuple(parameter.shape)} (parameter {name})"
        )
    with torch.no_grad():
        parameter.copy_(combined)


def _combined(weight: Weight, tensors: list[Tensor]) -> Tensor:
    if weight.combine is not None:
        return weight.combine(tensors)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _misfits(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors that do not fit together; of many (experts), only those unlike the most."""
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(names, tensors, strict=True)}
    ((usual, _),) = Counter(shapes.values()).most_common(1)
    return shapes if len(shapes) <= 4 else {name: shape for name, shape in shapes.items() if shape != usual}


def _listed(names: Sequence[str], between: str) -> str:
    return between.join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _complain(checkpoint: Checkpoint, verb: str, names: Iterable[str], remedy: str) -> None:
    listed = sorted(names)
    if listed:
        raise ValueError(f"{checkpoint.path} {verb} tensor {_listed(listed, ', ')}: {remedy}")
