"""Latent attention, absorbed and in pages, against every head's keys and values written out; and the same bits for a
row whatever is computed beside it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.kernels import native_library
from outrider.layers.mla import INNER_EPS, LatentAttention, LatentShape, latent_weights
from outrider.layers.rotary import Rotary
from outrider.types import Batch, Latent

PAGE_SIZE = 4
SHAPE = LatentShape(
    hidden_size=48,
    num_heads=20,  # more than the native kernel takes at a time
    latent_dim=24,
    nope_dim=10,
    rotary_dim=6,
    value_dim=12,
    query_rank=16,
    scale=0.31,
    bias=True,
)
SHAPES = {
    "query in two steps": SHAPE,
    "query in one step": replace(SHAPE, query_rank=None),
    "halves": replace(SHAPE, interleaved=False),
    "plain": replace(SHAPE, query_rank=None, bias=False, scale=None),
}
ROTARY = {"rope_theta": 100.0}


def random_tensors(shape: LatentShape) -> dict[str, Tensor]:
    """As a checkpoint holds them."""
    generator = torch.Generator().manual_seed(2)
    query, latent = shape.query_width, shape.latent_dim
    rows = {"kv_a_proj_with_mqa": latent + shape.rotary_dim, "o_proj": shape.hidden_size}
    if shape.query_rank is None:
        sizes = {"q_proj.weight": (query, shape.hidden_size)}
    else:
        rows["q_a_proj"] = shape.query_rank
        sizes = {
            "q_a_proj.weight": (shape.query_rank, shape.hidden_size),
            "q_a_layernorm.weight": (shape.query_rank,),
            "q_b_proj.weight": (query, shape.query_rank),
        }
    sizes |= {
        "kv_a_proj_with_mqa.weight": (latent + shape.rotary_dim, shape.hidden_size),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (shape.num_heads * (shape.nope_dim + shape.value_dim), latent),
        "o_proj.weight": (shape.hidden_size, shape.num_heads * shape.value_dim),
    }
    if shape.bias:
        sizes |= {f"{name}.bias": (count,) for name, count in rows.items()}
    return {name: 0.3 * torch.randn(size, generator=generator) for name, size in sizes.items()}


def make_layer(shape: LatentShape, tensors: dict[str, Tensor]) -> LatentAttention:
    layer = LatentAttention(shape, Rotary.from_config(ROTARY, shape.rotary_dim))
    weights, parameters = latent_weights(shape, "", ""), dict(layer.named_parameters())
    assert weights.keys() == parameters.keys()
    assert {name for weight in weights.values() for name in weight.names} == tensors.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            parts = [tensors[source] for source in weight.names]
            value = weight.combine(parts) if weight.combine is not None else torch.cat(parts)
            assert value.shape == parameters[name].shape, name
            parameters[name].copy_(value)
    return layer


def run(layer: LatentAttention, rows: Sequence[Tensor], chunk: int) -> list[Tensor]:
    """Every request's rows [n, H] -> [n, H], computed `chunk` rows at a time, all requests together."""
    longest = -(-max(map(len, rows)) // PAGE_SIZE)
    order = torch.randperm(len(rows) * longest, generator=torch.Generator().manual_seed(1)) + 1
    table = order.view(len(rows), longest).int()
    spec = layer.spec
    assert isinstance(spec, Latent)
    pages = torch.zeros(len(order) + 1, PAGE_SIZE, 1, spec.dim)
    layer.bind(pages, pages[..., : spec.value_dim])
    found: list[list[Tensor]] = [[] for _ in rows]
    for start in range(0, longest * PAGE_SIZE, chunk):
        parts = {number: each[start : start + chunk] for number, each in enumerate(rows) if len(each) > start}
        if not parts:
            break
        counts = torch.tensor([len(part) for part in parts.values()])
        request = torch.repeat_interleave(counts)
        query_start = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        indices = start + torch.arange(len(request)) - query_start[request]
        mine = table[list(parts)]
        batch = Batch(
            input_ids=indices,
            positions=indices,
            indices=indices,
            query_start=query_start.int(),
            request=request,
            row_slots=torch.tensor(list(parts))[request],
            slots=torch.tensor(list(parts)),
            page_table=mine,
            write_locations=mine[request, indices // PAGE_SIZE].long() * PAGE_SIZE + indices % PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_len=int(indices.max()) + 1,
            max_rows=int(counts.max()),
        )
        with torch.inference_mode():
            out = layer(torch.cat(list(parts.values())), batch)
        for number, part in zip(parts, out.split(counts.tolist()), strict=True):
            found[number].append(part)
    return [torch.cat(parts) for parts in found]


def turned(x: Tensor, shape: LatentShape) -> Tensor:
    """x [n, heads, rotary_dim] as complex numbers, each turned by its position times its frequency."""
    half = shape.rotary_dim // 2
    pairs = x.unflatten(-1, (half, 2)) if shape.interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    angles = torch.arange(len(x))[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    numbers = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(numbers).flatten(-2)


def obvious(shape: LatentShape, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Attention over one request's rows [n, H], with keys and values of every head, in float64."""
    tensors, x = {name: tensor.double() for name, tensor in tensors.items()}, x.double()

    def project(name: str, rows: Tensor) -> Tensor:
        return rows @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(1, dtype=torch.float64))

    def norm(name: str, rows: Tensor) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + INNER_EPS).sqrt() * tensors[f"{name}.weight"]

    if shape.query_rank is None:
        query = project("q_proj", x)
    else:
        query = project("q_b_proj", norm("q_a_layernorm", project("q_a_proj", x)))
    query = query.unflatten(-1, (shape.num_heads, -1))
    latent, key = project("kv_a_proj_with_mqa", x).split([shape.latent_dim, shape.rotary_dim], dim=-1)
    both = project("kv_b_proj", norm("kv_a_layernorm", latent)).unflatten(-1, (shape.num_heads, -1))
    plain_keys, values = both.split([shape.nope_dim, shape.value_dim], dim=-1)
    plain_queries, turning = query.split([shape.nope_dim, shape.rotary_dim], dim=-1)
    queries = torch.cat([plain_queries, turned(turning, shape)], dim=-1)
    keys = torch.cat([plain_keys, turned(key[:, None], shape).expand(-1, shape.num_heads, -1)], dim=-1)
    scale = shape.scale or (shape.nope_dim + shape.rotary_dim) ** -0.5
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return project("o_proj", torch.einsum("hqk,khd->qhd", weights, values).flatten(1))


def make_rows(lengths: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(length, SHAPE.hidden_size, generator=generator) for length in lengths]


@pytest.mark.parametrize("chunk", [100, 6, 1])
@pytest.mark.parametrize("kind", SHAPES)
def test_against_keys_and_values_of_every_head(kind: str, chunk: int, kernels: str) -> None:
    shape, rows = SHAPES[kind], make_rows((19, 7, 12))
    tensors = random_tensors(shape)
    for found, each in zip(run(make_layer(shape, tensors), rows, chunk), rows, strict=True):
        expected = obvious(shape, tensors, each)
        assert expected.std() > 0.3
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
@pytest.mark.parametrize("kind", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(kind: str) -> None:
    rows = make_rows((19, 7, 12))
    layer = make_layer(SHAPES[kind], random_tensors(SHAPES[kind]))
    alone = [run(layer, [each], 100)[0] for each in rows]
    for chunk in (100, 6, 1):
        assert all(torch.equal(a, b) for a, b in zip(run(layer, rows, chunk), alone, strict=True)), chunk


def test_one_vector_a_token_is_cached() -> None:
    spec = LatentAttention(SHAPE, Rotary.none()).spec
    assert spec == Latent(dim=24 + 6, value_dim=24)
    assert spec.bytes_per_token(2) == 60
