"""Attention of one row over a long context in pages of 16 and 8 bits, in several forms, on one GPU in half a minute.

    PYTHONPATH=src python scripts/h200/pages.py

Llama-3.1-8B's shape. Every form is checked against torch, then timed in a CUDA graph over eight layers' pages, which
are more than the L2 holds. A line: us of a layer with a short context and with a long one, the growth, and what it is
of the growth in 16 bits; forms in 8 bits from the smallest growth on, as keys . warps . stages . programs; `now`: what
is chosen today. What is best goes into FP8_FORM in kernels/gpu/attention.py."""

from __future__ import annotations

import torch
from common import SMOKE, attempt, say
from products import DEVICE, TERABYTES, timed
from torch import Tensor

from outrider.kernels.gpu import attention
from outrider.kernels.gpu.attention_work import Keys

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SHORT, LONG, LAYERS = (40, 300, 2) if SMOKE else (512, 32_000, 8)
KIND = torch.float32 if SMOKE else torch.bfloat16
Form = tuple[int, int, int, int]  # keys, warps, stages, programs
FORMS: list[Form] = [
    (128, 4, 4, 264), (128, 4, 3, 264), (128, 4, 5, 264), (128, 8, 3, 264), (128, 2, 3, 264), (128, 4, 4, 396),
    (64, 2, 3, 528), (64, 2, 4, 528), (64, 2, 4, 396), (64, 2, 3, 264), (64, 4, 3, 396), (256, 8, 3, 264),
]  # fmt: skip
if SMOKE:
    FORMS = [(128, 4, 3, 264), (64, 4, 3, 396)]
Pages = list[tuple[Tensor, Tensor]]


def pages_of(dtype: torch.dtype, length: int) -> tuple[Pages, Tensor]:
    """Of every layer; and the table, which is scattered as an engine's is after a while."""
    torch.manual_seed(0)
    count = -(-length // PAGE)
    table = (torch.randperm(count, device=DEVICE) + 1).int()[None]
    shape = (count + 1, PAGE, KV_HEADS, DIM)
    return [(_random(shape, dtype), _random(shape, dtype)) for _ in range(LAYERS)], table


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32 if SMOKE else torch.float16).to(dtype)


def keys_of(table: Tensor, length: int) -> Keys:
    start = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    return Keys(table, start, torch.tensor([length - 1], device=DEVICE), None, 0, PAGE, 1, {})


def wanted(q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, length: int) -> Tensor:
    k, v = (each[table[0].long()].flatten(0, 1)[:length].float() for each in pages)
    query = q[0].float().view(KV_HEADS, HEADS // KV_HEADS, DIM)
    share = (torch.einsum("hgd,nhd->hgn", query, k) * DIM**-0.5).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", share, v).view(1, HEADS, DIM)


def us(dtype: torch.dtype, form: Form | None, length: int, q: Tensor) -> float:
    """Of a layer's attention with so long a context; what is wrong is an error."""
    layers, table = pages_of(dtype, length)
    attention.FP8_FORM = form
    found = attention.paged_attention(q, layers[0], keys_of(table, length), DIM**-0.5)
    right = wanted(q, layers[0], table, length)
    error = float((found.float() - right).abs().max() / right.abs().max())
    if error > 0.03:
        raise ValueError(f"off by {error:.3f}")

    def run(_: int) -> None:
        keys = keys_of(table, length) if SMOKE else known
        keys.memo.clear()  # a pass lists its work once
        for pages in layers:
            attention.paged_attention(q, pages, keys, DIM**-0.5)

    known = keys_of(table, length)
    return timed(run, 1) / LAYERS


def growth(dtype: torch.dtype, form: Form | None, q: Tensor) -> tuple[float, float, float]:
    short, long = us(dtype, form, SHORT, q), us(dtype, form, LONG, q)
    return long - short, short, long


def main() -> None:
    torch.manual_seed(1)
    q = torch.randn(1, HEADS, DIM, device=DEVICE).to(KIND)
    whole, short, long = growth(KIND, None, q)
    num_bytes = (LONG - SHORT) * KV_HEADS * DIM * 2
    say(f"16 bits: {short:.1f}, {long:.1f}, growth {whole:.1f} (bytes {2 * num_bytes / TERABYTES / 1e6:.1f})")
    found: list[tuple[float, float, float, str]] = []

    def attend(form: Form | None) -> None:
        name = "now" if form is None else ".".join(map(str, form))
        found.append((*growth(torch.float8_e4m3fn, form, q), name))

    for form in (None, *FORMS):
        attempt(f"fp8 {form}", lambda form=form: attend(form))  # type: ignore[misc]
    for grown, short, long, name in sorted(found):
        say(f"fp8 {name}: {short:.1f}, {long:.1f}, growth {grown:.1f} ({grown / whole:.3f} of 16 bits')")
    say(f"fp8: bytes {num_bytes / TERABYTES / 1e6:.1f}; wanted <= 0.6")


if __name__ == "__main__":
    main()
