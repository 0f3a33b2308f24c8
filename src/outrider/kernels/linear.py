"""y = x W^T + b. On the CPU a native kernel whose rows do not depend on each other."""

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.activation import Activation, silu_mul
from outrider.kernels.dispatch import use_native, use_triton
from outrider.kernels.norm import Normed
from outrider.kernels.packed import Packed
from outrider.kernels.quantised import Quantised

MANY_ROWS = 256  # of the input: widening a matrix in few bits, for a library's product, is faster


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type == "cpu" and x.dtype != torch.float32:
        # oneDNN's 16-bit path dies of an illegal instruction on virtual machines that promise AMX and lack it.
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)
    return F.linear(x, weight, bias)


def linear(
    x: Tensor | Normed,
    weight: Tensor,
    bias: Tensor | None = None,
    packed: Packed | Quantised | None = None,
    *,
    residual: Tensor | None = None,
    exact: bool = False,
    out: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """x [T, in], weight [out, in], bias [out] -> [T, out], plus residual [T, out]; rows may be normed on the way;
    `packed` is the same weight in a smaller form. `exact`: on a GPU too, a row's bits do not depend on how many others
    there are. `out`: where to put the result. `overwrite`: nobody needs the residual afterwards."""
    if isinstance(x, Normed):
        y = _normed_linear(x, weight, bias, packed, None, out) if residual is None and not exact else None
        if y is not None:
            return y
        x = x.tensor()
    if isinstance(packed, Quantised):
        if _is_widened(x, exact):
            dense = packed.dense(x.dtype)
            return linear(x, dense, bias, residual=residual, exact=exact, out=out, overwrite=overwrite)
        from outrider.kernels.gpu import quantised

        return quantised.linear(x, packed, bias, residual, exact=exact, out=out)
    if use_native(x):
        y = native.linear(x, weight, bias, packed)
    elif _in_triton(x, weight, exact, bias):
        from outrider.kernels.gpu import linear as gpu

        return gpu.linear(x, weight, bias, residual, exact=exact, out=out)
    elif residual is not None and bias is None and x.is_cuda:
        if overwrite and out is None and not torch.is_grad_enabled():
            return residual.addmm_(x, weight.T)  # the library's product would copy it first
        return torch.addmm(residual, x, weight.T, out=out)
    elif out is not None and bias is None and x.is_cuda:
        return torch.mm(x, weight.T, out=out)
    else:
        y = linear_reference(x, native.dense(weight, packed), bias)
    if residual is not None:
        is_free = overwrite and out is None and not torch.is_grad_enabled()
        y = residual.add_(y) if is_free else residual + y
    return y if out is None else out.copy_(y)


def gated_linear(
    x: Tensor | Normed,
    weight: Tensor,
    bias: Tensor | None = None,
    packed: Packed | Quantised | None = None,
    activation: Activation = silu_mul,
    *,
    exact: bool = False,
) -> Tensor:
    """What the activation makes of gate and up, the halves of x W^T + b: weight [2 I, in] -> [T, I]. Rows may be normed
    on the way."""
    if isinstance(x, Normed):
        y = _normed_linear(x, weight, bias, packed, activation, None) if not exact else None
        if y is not None:
            return y
        x = x.tensor()
    if isinstance(packed, Quantised) and _is_widened(x, exact):
        return gated_linear(x, packed.dense(x.dtype), bias, None, activation, exact=exact)
    if use_triton(x):
        from outrider.kernels.gpu import gates, quantised
        from outrider.kernels.gpu import linear as gpu

        gate = gates.on_the_way(activation)
        if gate and isinstance(packed, Quantised):
            return quantised.linear(x, packed, bias, gated=gate, exact=exact)
        if gate and _in_triton(x, weight, exact, bias, gate):
            return gpu.linear(x, weight, bias, gated=gate, exact=exact)
    return activation(linear(x, weight, bias, packed, exact=exact))


def _normed_linear(
    x: Normed,
    weight: Tensor,
    bias: Tensor | None,
    packed: Packed | Quantised | None,
    activation: Activation | None,
    out: Tensor | None,
) -> Tensor | None:
    """In one launch, where that is worth it."""
    from outrider.kernels.gpu import normed

    form = packed if isinstance(packed, Quantised) else weight
    return normed.linear(x, form, bias, activation, out=out) if normed.is_for(x, form, activation) else None


def _is_widened(x: Tensor, exact: bool) -> bool:
    """Whether a matrix in few bits is widened first: for many rows, where it does not matter for their bits."""
    return not use_triton(x) or (not exact and len(x) > MANY_ROWS)


def _in_triton(x: Tensor, weight: Tensor, exact: bool, bias: Tensor | None, gate: int = 0) -> bool:
    """Few rows, or any number where bits must not depend on it; many are the library's business."""
    if not use_triton(x) or x.dtype != weight.dtype:
        return False
    from outrider.kernels.gpu import linear as gpu

    return exact or gpu.is_faster(len(x), weight, gate, has_bias=bias is not None)
