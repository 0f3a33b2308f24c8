"""Attention of requests that decode, over pages of 16 bits, in several forms, on one GPU in a minute.

    PYTHONPATH=src python scripts/h200/decode.py [COUNTxCONTEXTxROWS...]       none: those of CASES

Llama-3.1-8B's heads. Every form is checked against torch, then timed in a CUDA graph over eight layers' pages. A line
for each case: us that its bytes take, then every form from the fastest on, as keys . warps . stages . programs; `now`:
what is chosen today. What is best goes into forms_for() in kernels/gpu/attention.py."""

from __future__ import annotations

import sys
from functools import partial

import torch
from common import SMOKE, attempt, say
from pages import DIM, HEADS, KIND, KV_HEADS, LAYERS, PAGE
from products import DEVICE, TERABYTES, timed
from torch import Tensor

from outrider.kernels.gpu import attention
from outrider.kernels.gpu.attention_work import ANY, Form, Keys

Case = tuple[int, int, int]  # requests, tokens that each has, rows of each
CASES: list[Case] = [
    (16, 4000, 1), (16, 4000, 3), (16, 600, 1), (8, 530, 6), (32, 530, 6), (32, 600, 1), (128, 600, 1), (128, 600, 3),
    (1, 32_000, 1),
]  # fmt: skip
FORMS = [
    (128, 4, 2, 264), (128, 4, 3, 264), (128, 8, 2, 264), (128, 8, 3, 264), (128, 4, 2, 528), (64, 4, 2, 264),
    (64, 4, 3, 264), (64, 4, 4, 264), (64, 4, 2, 528), (64, 4, 3, 528), (64, 2, 3, 528), (64, 2, 4, 264),
    (32, 2, 4, 528), (32, 4, 4, 528), (32, 2, 6, 528), (64, 4, 3, 792),
]  # fmt: skip
if SMOKE:
    CASES, FORMS = [(3, 70, 1), (2, 40, 3)], [(32, 4, 2, 264)]
NOW = attention.forms_for
Layers = list[tuple[Tensor, Tensor]]


def keys_of(case: Case) -> Keys:
    """The last rows of each request; pages are scattered, as an engine's are after a while."""
    count, context, rows = case
    pages = -(-context // PAGE)
    table = (torch.randperm(count * pages, device=DEVICE) + 1).int().view(count, pages)
    start = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * rows
    indices = torch.arange(context - rows, context, device=DEVICE).repeat(count)
    return Keys(table, start, indices, None, 0, PAGE, rows, {})


def wanted(q: Tensor, pages: tuple[Tensor, Tensor], keys: Keys, case: Case) -> Tensor:
    """Of the last request."""
    _, context, rows = case
    k, v = (each[keys.page_table[-1].long()].flatten(0, 1)[:context].float() for each in pages)
    query = q[-rows:].float().view(rows, KV_HEADS, HEADS // KV_HEADS, DIM)
    score = torch.einsum("rhgd,nhd->rhgn", query, k) * DIM**-0.5
    seen = torch.arange(context, device=DEVICE) <= keys.indices[-rows:, None, None, None]
    share = score.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("rhgn,nhd->rhgd", share, v).reshape(rows, HEADS, DIM)


def us(case: Case, form: tuple[int, int, int, int] | None, layers: Layers, q: Tensor, keys: Keys) -> float:
    """Of a layer; what is wrong is an error."""
    if form is not None:
        lanes = case[2] * HEADS // KV_HEADS
        own = Form(ANY, next(size for size in (16, 32, 64, 128) if lanes <= size), *form)
        attention.forms_for = lambda *given, **named: [own]
    try:
        keys.memo.clear()
        found = attention.paged_attention(q, layers[0], keys, DIM**-0.5)[-case[2] :]
        right = wanted(q, layers[0], keys, case)
        error = float((found.float() - right).abs().max() / right.abs().max())
        if error > 0.03:
            raise ValueError(f"off by {error:.3f}")

        def run(_: int) -> None:
            keys.memo.clear()  # a pass lists its work once
            for pages in layers:
                attention.paged_attention(q, pages, keys, DIM**-0.5)

        return timed(run, 1) / LAYERS
    finally:
        attention.forms_for = NOW


def measure(case: Case) -> None:
    count, context, rows = case
    torch.manual_seed(0)
    keys = keys_of(case)
    shape = (keys.page_table.numel() + 1, PAGE, KV_HEADS, DIM)
    layers = [(torch.randn(shape, device=DEVICE).to(KIND), torch.randn(shape, device=DEVICE).to(KIND))
              for _ in range(LAYERS)]  # fmt: skip
    q = torch.randn(count * rows, HEADS, DIM, device=DEVICE).to(KIND)
    found: list[tuple[float, str]] = []

    def attend(form: tuple[int, int, int, int] | None) -> None:
        found.append((us(case, form, layers, q, keys), "now" if form is None else ".".join(map(str, form))))

    for form in (None, *FORMS):
        attempt(f"{case} {form}", partial(attend, form))
    bytes_us = count * context * KV_HEADS * DIM * 2 * KIND.itemsize / TERABYTES / 1e6
    each = " ".join(f"{took:.1f} {name}" for took, name in sorted(found))
    say(f"{count} x {context}, {rows} rows: {bytes_us:.1f}; {each}")


def main() -> None:
    asked = [tuple(map(int, word.split("x"))) for word in sys.argv[1:]]
    for case in asked or CASES:
        measure(case)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
