"""Rotate queries and keys by their position, and write keys and values into their pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.dispatch import use_native, use_triton
from outrider.kernels.norm import Normed, materialised, rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], cos and sin [T, R / 2]: rotates pairs (j, j + R / 2) of the first R dimensions."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def tables_reference(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    angles = positions.float() * inv_freq
    return angles.cos() * scaling, angles.sin() * scaling


def tables(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] of positions [T, 1], or [T, R / 2] where every frequency has its own."""
    if use_triton(positions) and positions.shape[1] == 1:
        from outrider.kernels.gpu import rope as gpu

        return gpu.tables(positions[:, 0], inv_freq, scaling)
    return tables_reference(positions, inv_freq, scaling)


@dataclass(frozen=True)
class PageScales:
    """What a 1 in pages of 8 bits stands for; pages of more bits hold numbers as they are."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = PageScales()


def rope_write_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    locations: Tensor,
    scales: PageScales = UNSCALED,
) -> Tensor:
    cos, sin = rotary
    k_pages, v_pages = pages
    for pages_of, rows, scale in ((k_pages, rotate(k, cos, sin), scales.key), (v_pages, v, scales.value)):
        pages_of.view(-1, *pages_of.shape[2:])[locations] = rounded(rows, pages_of.dtype, scale)
    return rotate(q, cos, sin)


def rounded(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """As pages of this type hold it: the largest number stands for what is larger."""
    most = torch.finfo(dtype).max
    if dtype.itemsize == 1:
        x = x.float() * (1 / scale)
    return (x.clamp(-most, most) if most < torch.finfo(x.dtype).max else x).to(dtype)


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of every query and key head, before they are turned."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float
    offset: float = 0.0
    wide: bool = False


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor | Normed,
    rotary: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    locations: Tensor,
    norms: HeadNorms | None = None,
    out: Tensor | None = None,
    scales: PageScales = UNSCALED,
) -> Tensor:
    """q [T, heads, D] and k, v [T, kv heads, D] -> normed and turned q; k and v go to `locations` [T] of the pages, v
    normed on the way where it is to be. `out`: where to put the queries."""
    if use_triton(q):
        from outrider.kernels.gpu import rope as gpu

        return gpu.rope_write(q, k, v, rotary, pages, locations, norms, out, scales)
    v = materialised(v)
    if norms is not None:
        q, k = (
            rms_norm(x, weight, norms.eps, offset=norms.offset, wide=norms.wide)
            for x, weight in ((q, norms.q), (k, norms.k))
        )
    if use_native(q):
        turned = native.rope_write(q, k, v, *rotary, *pages, locations)
    else:
        turned = rope_write_reference(q, k, v, rotary, pages, locations, scales)
    return turned if out is None else out.copy_(turned)
