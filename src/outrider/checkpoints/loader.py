"""From a name to modules with weights: builds target and drafter, then fills every parameter, strictly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import outrider.drafters
import outrider.models  # noqa: F401  (registers the targets)
from outrider.checkpoints.checkpoint import SafetensorsCheckpoint
from outrider.checkpoints.finite import FiniteCheck, check_kind
from outrider.checkpoints.gguf import GgufCheckpoint
from outrider.checkpoints.gguf_levels import quantised_of
from outrider.checkpoints.quantised import QuantisedCheckpoint
from outrider.checkpoints.shares import fill_share
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, drafters, recognised
from outrider.host_memory import use_large_pages
from outrider.kernels.dispatch import use_native, use_triton
from outrider.kernels.packed import HALVES, Packed, pack_blocks, pack_quantised, pack_tiles
from outrider.kernels.quantised import Kind, Quantised, joined, quantise
from outrider.layers.embedding import Embedding
from outrider.layers.linear import give_memory, take_memory
from outrider.layers.packing import Packing, gains_from_packing, mixtures, packable
from outrider.layers.split import cut_of, whole_shape
from outrider.models.base import Target, targets
from outrider.threads import threads
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
        raise ValueError(f"{checkpoint.path}: config.json: architectures must name one, not {architectures!r}")
    return targets[architectures[0]].from_config(checkpoint.config)


def build_drafter(settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Drafter:
    method = resolve_method(settings, checkpoint)
    if settings.parallel_drafting and not drafters[method].drafts_in_parallel:
        raise ValueError(f"method {method} has no use for parallel_drafting: remove it")
    settings.refuse_unknown(drafters[method].own_settings)
    return drafters[method].build(settings, target, checkpoint)


def weights_in_target(settings: SpeculativeConfig) -> bool:
    """Whether the drafter's weights are in the target's own checkpoint."""
    return settings.model is None and drafters[resolve_method(settings, None)].weights_in_target


def resolve_method(settings: SpeculativeConfig, checkpoint: Checkpoint | None) -> str:
    """The method the user named, or the one whose checkpoints look like this; or one that claims to be meant by it."""
    method = settings.method if settings.method is not None else _recognised(checkpoint)
    config = checkpoint.config if checkpoint is not None else {}
    return next((name for name in drafters if drafters[name].replaces(method, settings, config)), method)


def _recognised(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None, "settings without a method have a model"
    best, sureness = recognised(checkpoint.config)
    if not sureness:
        raise ValueError(
            f'{checkpoint.path} does not say which kind of drafter it is: give "method", one of {", ".join(drafters)}'
        )
    return best


KeptBlocks = dict[nn.Parameter, Packed | Quantised]  # weights that stay in few bits, instead of floats


@dataclass(frozen=True)
class Forms:
    """In which forms matrices may be kept, instead of as numbers of the model's own precision, whose memory they then
    do without."""

    kept: KeptBlocks = field(default_factory=dict)  # those that were
    as_stored: bool = False  # quantised ones that can be used as they are
    tiled: bool = False  # laid out for dot products in whole numbers, where they are a GGUF file's
    kind: Kind | None = None  # others are rounded to numbers of this kind
    packing: Packing | None = None  # others are packed, where nothing is lost by it


def load_weights(
    module: Target | Drafter, checkpoint: Checkpoint, progress: Progress | None = None, forms: Forms | None = None
) -> None:
    """Fills every parameter. A missing, surplus or misshapen tensor is an error that names it, and so is one that holds
    what no weight can be."""
    forms = forms or Forms()
    weights = module.weights()
    parameters = dict(module.named_parameters())
    is_part = isinstance(module, Target) and module.is_part  # of its layers
    assert weights.keys() == parameters.keys() or is_part, weights.keys() ^ parameters.keys()
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
    keepable = {layer.weight for layer in packable(module)}
    if is_for_gpu(next(module.parameters())) or isinstance(checkpoint, QuantisedCheckpoint):
        keepable |= {parameter for routed in mixtures(module) for parameter in (routed.up, routed.down)}
    if is_for_gpu(next(module.parameters())) or not isinstance(checkpoint, GgufCheckpoint):
        # rows of an embedding are looked up, not computed with
        keepable -= {layer.weight for layer in packable(module) if isinstance(layer, Embedding)}
    # a part of a matrix is read from floats: blocks may reach across its borders
    blocks = {parameter for parameter in keepable if cut_of(parameter) is None}
    multiplied = {layer.weight for layer in packable(module) if not isinstance(layer, Embedding)}
    check = FiniteCheck(checkpoint)
    weights = {name: weight for name, weight in weights.items() if name in parameters}
    for done, (name, weight) in enumerate(weights.items()):
        stored = replace(weight, names=tuple(actual[source] for source in weight.names))
        parameter = parameters[name]
        form = None
        if forms.as_stored and parameter in blocks:
            tiled = forms.tiled and parameter in multiplied
            form = _as_stored(parameter, checkpoint, name, stored, tiled=tiled)
        if form is not None:
            check.note_kept(form, stored.names)
        if isinstance(form, Quantised) and not is_for_gpu(parameter):
            form = pack_quantised(form)
        if not _keep(parameter, form, forms):
            dtype = parameter.dtype
            _fill(parameter, checkpoint, name, stored, _narrow_dtype(parameter, checkpoint, stored, forms))
            check.note(parameter, stored.names)
            if forms.packing is not None:
                _keep(parameter, forms.packing.packed(parameter), forms, dtype)
            elif forms.kind is not None and forms.as_stored and parameter in keepable:
                _keep(parameter, quantise(parameter.detach(), forms.kind), forms)
        threads.adjust()
        if progress is not None:
            progress(str(checkpoint.path), done + 1, len(weights))
    check.complain()


def can_keep_blocks(module: Target | Drafter, checkpoint: Checkpoint, *, small_too: bool = False) -> bool:
    """Whether quantised weights can be computed with as they are: on a GPU, or by native kernels, and if it is worth it
    there (or it need not be)."""
    floats = next(module.parameters())
    if is_for_gpu(floats) or not isinstance(checkpoint, GgufCheckpoint | QuantisedCheckpoint):
        return is_for_gpu(floats)
    with torch.inference_mode():
        return use_native(floats) and (small_too or gains_from_packing(module))


def is_for_gpu(floats: Tensor) -> bool:
    """Whether Triton's kernels compute with these."""
    with torch.inference_mode():
        return use_triton(floats)


def keeps_few_bits(checkpoint: Checkpoint, device: torch.device, kind: Kind | None) -> bool:
    """Whether matrices of this checkpoint stay in few bits on a GPU."""
    is_able = is_for_gpu(torch.empty(0, device=device))
    if kind is not None and not is_able:
        raise ValueError(f"quantization {kind.value} is for GPUs, with Triton: leave it out, or use a quantised file")
    return is_able and (kind is not None or isinstance(checkpoint, QuantisedCheckpoint | GgufCheckpoint))


def _as_stored(
    parameter: nn.Parameter, checkpoint: Checkpoint, name: str, weight: Weight, *, tiled: bool
) -> Packed | Quantised | None:
    """The tensors of a weight as they are stored; None where not all are quantised, or they have no common form."""
    if weight.combine is not None:
        return _combined_as_stored(parameter, checkpoint, weight)
    if isinstance(checkpoint, GgufCheckpoint):
        if not all(map(checkpoint.in_blocks, weight.names)):
            return None
        _parts(parameter, checkpoint, name, weight)  # complains about shapes
        if is_for_gpu(parameter):
            return quantised_of([checkpoint.blocks(source) for source in weight.names], parameter.device)
        if tiled:
            return pack_tiles([checkpoint.tiles(source) for source in weight.names])
        return pack_blocks([checkpoint.blocks(source) for source in weight.names])
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return None
    _parts(parameter, checkpoint, name, weight)
    parts = [checkpoint.quantised(source, parameter.device) for source in weight.names]
    found = [part for part in parts if part is not None]
    return joined(found) if len(found) == len(parts) else None


def _combined_as_stored(parameter: nn.Parameter, checkpoint: Checkpoint, weight: Weight) -> Quantised | None:
    """Experts, which are more than joined; as many numbers as the parameter has."""
    if weight.combine_quantised is None or not isinstance(checkpoint, QuantisedCheckpoint):
        return None
    parts: list[Quantised] = []
    for source in weight.names:
        part = checkpoint.quantised(source, parameter.device)
        if part is None or part.num_columns != parameter.shape[-1]:
            return None  # to be dense, or complained about
        parts.append(part)
    found = weight.combine_quantised(parts)
    if found is None or len(found.data) * found.num_columns != parameter.numel():
        return None
    return found


def _keep(
    parameter: nn.Parameter, form: Packed | Quantised | None, forms: Forms, dtype: torch.dtype | None = None
) -> bool:
    """Keeps a matrix in another form instead of the parameter's own memory."""
    if form is None:
        return False
    forms.kept[parameter] = form
    take_memory(parameter, dtype)
    return True


def stored_bytes(module: Target | Drafter, checkpoint: Checkpoint, packing: Packing | None) -> int:
    """What the weights will take, at most, of those that are read by themselves."""
    parameters, forms, total = dict(module.named_parameters()), Forms(packing=packing), 0
    names = {module.canonical(name): name for name in checkpoint.names()}
    for name, weight in module.weights().items():
        if name in parameters:
            dtype = parameters[name].dtype
            if all(source in names for source in weight.names):  # others are complained about as they are read
                stored = replace(weight, names=tuple(names[source] for source in weight.names))
                if packing is not None and isinstance(checkpoint, QuantisedCheckpoint):
                    total += int(parameters[name].numel() * checkpoint.bytes_per_number(stored.names))
                    continue
                dtype = _narrow_dtype(parameters[name], checkpoint, stored, forms) or dtype
            total += parameters[name].numel() * dtype.itemsize
    return total


def _narrow_dtype(parameter: nn.Parameter, checkpoint: Checkpoint, weight: Weight, forms: Forms) -> torch.dtype | None:
    """Of a matrix that is packed: what all its tensors are stored as, if that has 16 bits and can be kept."""
    if forms.packing is None or parameter not in forms.packing.parameters:
        return None
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        return None
    dtypes = {checkpoint.dtype(name) for name in weight.names}
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return dtype if dtype in HALVES else None


def _fill(
    parameter: nn.Parameter, checkpoint: Checkpoint, name: str, weight: Weight, dtype: torch.dtype | None
) -> None:
    """`dtype`: of the memory that the parameter gets, None: its own."""
    if dtype is None:
        give_memory(parameter)
    else:
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    use_large_pages(parameter)
    cut = cut_of(parameter)

    def combined() -> Tensor:
        whole = _combined(checkpoint, weight, parameter)
        _check_shape(parameter, tuple(whole.shape), checkpoint, name, weight)
        return whole

    with torch.no_grad():
        if cut is not None:
            if weight.combine is None:
                _parts(parameter, checkpoint, name, weight)  # complains about shapes
            fill_share(parameter, cut, checkpoint, weight, combined)
            return
        if weight.combine is not None:
            parameter.copy_(combined())
            return
        for source, part in zip(weight.names, _parts(parameter, checkpoint, name, weight), strict=True):
            _read(checkpoint, source, part)


def _read(checkpoint: Checkpoint, source: str, out: Tensor) -> None:
    """Fills a part of a parameter, with as few copies as the format allows."""
    if isinstance(checkpoint, GgufCheckpoint):
        checkpoint.read_into(source, out)
        return
    tensor = checkpoint.tensor(source)
    assert tensor.shape == out.shape, (source, tensor.shape, out.shape)
    check_kind(checkpoint, source, tensor, out)
    out.copy_(tensor)


def _parts(parameter: nn.Parameter, checkpoint: Checkpoint, name: str, weight: Weight) -> Sequence[Tensor]:
    """The rows of a parameter that each of its tensors fills, one below the other."""
    shapes = [checkpoint.shape(source) for source in weight.names]  # a name may occur twice
    if len(shapes) == 1:
        _check_shape(parameter, shapes[0], checkpoint, name, weight)
        return [parameter]
    if len({shape[1:] for shape in shapes}) > 1 or () in shapes:
        raise _do_not_fit(checkpoint, dict(zip(weight.names, shapes, strict=True)))
    num_rows = [shape[0] for shape in shapes]
    _check_shape(parameter, (sum(num_rows), *shapes[0][1:]), checkpoint, name, weight)
    return parameter.split(num_rows) if cut_of(parameter) is None else []


def _check_shape(
    parameter: nn.Parameter, shape: tuple[int, ...], checkpoint: Checkpoint, name: str, weight: Weight
) -> None:
    wanted = whole_shape(parameter)
    if shape != wanted:
        raise ValueError(
            f"{checkpoint.path}: {_listed(weight.names, ' + ')} has shape {shape}, but config.json "
            f"asks for {wanted} (parameter {name})"
        )


def _combined(checkpoint: Checkpoint, weight: Weight, parameter: nn.Parameter) -> Tensor:
    assert weight.combine is not None
    tensors = [checkpoint.tensor(source) for source in weight.names]
    for source, tensor in zip(weight.names, tensors, strict=True):
        check_kind(checkpoint, source, tensor, parameter)
    try:
        return weight.combine(tensors)
    except RuntimeError as error:
        shapes = {source: tuple(tensor.shape) for source, tensor in zip(weight.names, tensors, strict=True)}
        raise _do_not_fit(checkpoint, shapes) from error


def _do_not_fit(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> ValueError:
    return ValueError(f"{checkpoint.path}: tensors that belong together do not fit: {_misfits(shapes)}")


def _misfits(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """The shapes of tensors that do not fit together; of many (experts), only those unlike the most."""
    ((usual, _),) = Counter(shapes.values()).most_common(1)
    return shapes if len(shapes) <= 4 else {name: shape for name, shape in shapes.items() if shape != usual}


def _listed(names: Sequence[str], between: str) -> str:
    return between.join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _complain(checkpoint: Checkpoint, verb: str, names: Iterable[str], remedy: str) -> None:
    listed = sorted(names)
    if listed:
        raise ValueError(f"{checkpoint.path} {verb} tensor {_listed(listed, ', ')}: {remedy}")
