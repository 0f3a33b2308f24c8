"""How kernels are compiled and launched. Some may begin before the launch before them has ended (programmatic dependent
launch): such a kernel waits only where it needs the earlier result, which saves about a microsecond a launch."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def jit_for_any_size(kernel: Callable[..., None]) -> Any:
    """Compiled once, whatever numbers and places it is given. Triton compiles a kernel again where one is a multiple of
    16 that was none before, and everybody waits: for a small one that costs far more than it brings."""
    parameters = inspect.signature(kernel).parameters.values()
    names = [each.name for each in parameters if "constexpr" not in str(each.annotation)]
    return triton.jit(kernel, do_not_specialize=names)


def early(x: Tensor) -> bool:
    """Whether kernels on this tensor's device can be launched early."""
    return x.is_cuda and _is_hopper(x.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def options(is_early: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if is_early else {}


@triton.jit
def prefetch(pointers, SIZE: tl.constexpr):
    """Brings so many bytes from each pointer [N] on nearer, without waiting for them: weights, which no launch before
    this one makes."""
    PIECES: tl.constexpr = 8 if SIZE % 128 == 0 else 1
    at = pointers.to(tl.int64)[:, None] + tl.arange(0, PIECES)[None, :] * (SIZE // PIECES)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [at, tl.full(at.shape, SIZE // PIECES, tl.int32)], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def await_last(EARLY: tl.constexpr):
    """The launch before this one may still be at work: waits for its results."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
