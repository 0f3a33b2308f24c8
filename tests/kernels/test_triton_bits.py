"""What exact mode rests on: on a real device, a row's bits do not depend on how many rows there are, in sizes where
every kind of tile is used."""

import pytest
import torch
from test_triton import batch_of, keys_of, random

from outrider.kernels.attention import EXACT_PARTS
from outrider.kernels.gpu import attention, filter, linear, norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
ROWS = [1, 6, 16, 17, 32, 33, 64, 65, 96, 128, 129, 300]
BFLOAT = torch.bfloat16


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("columns", "inner"), [(512, 576), (4096, 2048), (12288, 512), (20480, 1024), (2048, 14336)])
def test_linear(columns: int, inner: int, gated: bool) -> None:
    x, weight = random(max(ROWS), inner, dtype=BFLOAT), random(columns, inner, dtype=BFLOAT, seed=2)
    residual = None if gated else random(max(ROWS), columns, dtype=BFLOAT, seed=3)
    whole = linear.linear(x, weight, None, residual, gated=gated)
    for count in ROWS:
        part = linear.linear(x[:count], weight, None, None if residual is None else residual[:count], gated=gated)
        assert torch.equal(part, whole[:count]), count


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (8, 4, 256), (16, 1, 576)])
def test_attention(heads: int, kv_heads: int, dim: int) -> None:
    """The last rows of a text: one by one, six at a time, as a prompt, in company."""
    length, page_size, value_dim = 700, 16, min(dim, 512)
    pages = (
        random(1400, page_size, kv_heads, dim, dtype=BFLOAT),
        random(1400, page_size, kv_heads, value_dim, dtype=BFLOAT, seed=5),
    )
    q = random(length, heads, dim, dtype=BFLOAT, seed=7)

    def attend(begin: int, end: int, others: int = 0) -> torch.Tensor:
        batch = batch_of([end - begin, *[3] * others], [begin, *[40] * others], page_size, BFLOAT)
        batch.page_table[0] = torch.arange(1, batch.page_table.shape[1] + 1)
        rows = torch.cat([q[begin:end], q[: 3 * others]])
        return attention.paged_attention(rows, pages, keys_of(batch), dim**-0.5, parts=EXACT_PARTS)[: end - begin]

    whole = attend(0, length)
    for begin, end, others in ((699, 700, 0), (694, 700, 0), (650, 700, 0), (699, 700, 5), (694, 700, 30)):
        assert torch.equal(attend(begin, end, others), whole[begin:end]), (begin, end, others)


def test_norms_and_filters() -> None:
    x, weight = random(max(ROWS), 4096, dtype=BFLOAT), random(4096, dtype=BFLOAT)
    logits, requests = random(max(ROWS), 50_000), torch.zeros(max(ROWS), dtype=torch.long, device="cuda")
    heat, share = torch.tensor([0.8], device="cuda"), torch.tensor([0.9], device="cuda")
    filters = torch.tensor([40_000], device="cuda"), share, torch.tensor([1e-4], device="cuda")
    whole, (cut, last) = norm.rms_norm(x, weight, 1e-5), filter.cuts(logits, heat, filters, requests, least=1e-5)
    for count in ROWS:
        assert torch.equal(norm.rms_norm(x[:count], weight, 1e-5), whole[:count])
        found = filter.cuts(logits[:count], heat, filters, requests[:count], least=1e-5)
        assert found[0].equal(cut[:count])
        assert found[1].equal(last[:count])
