"""The native CPU kernels against plain float64 references, and the promise that a row's bits are its own:
alone or in a batch, on one thread or several."""

import ctypes
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from older_processors import MARCHES, use_older_processor
from torch import Tensor
from torch.nn import functional

from outrider.kernels import native, native_library

needs_compiler = pytest.mark.skipif(
    native_library.library() is None, reason="no C compiler: the native kernels are not built"
)
examples = settings(max_examples=25, deadline=None)
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def keep_num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assert_close(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Within a few roundings of fp32 at the size of the terms that were summed."""
    torch.testing.assert_close(actual.double(), expected, rtol=3e-6, atol=3e-6 * scale)


# ---- linear ----


@needs_compiler
@examples
@given(num_rows=sizes, num_outputs=st.integers(1, 120), depth=st.integers(1, 2300), biased=st.booleans(), seed=seeds)
def test_linear_equals_float64(num_rows: int, num_outputs: int, depth: int, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(num_rows, depth), torch.randn(num_outputs, depth)
    bias = torch.randn(num_outputs) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_close(native.linear(x, weight, bias), expected, scale=depth**0.5)


@needs_compiler
@pytest.mark.parametrize(("num_outputs", "depth"), [(97, 576), (61, 577), (48, 31), (7, 1536), (200, 1037), (1, 1)])
def test_linear_rows_keep_their_bits(num_outputs: int, depth: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, depth), torch.randn(num_outputs, depth), torch.randn(num_outputs)
    torch.set_num_threads(1)
    alone = torch.cat([native.linear(x[row : row + 1], weight, bias) for row in range(40)])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_rows in range(1, 41):
            assert torch.equal(native.linear(x[:num_rows], weight, bias), alone[:num_rows]), (num_threads, num_rows)


@needs_compiler
def test_linear_rows_keep_their_bits_in_a_long_prompt() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(203, 600), torch.randn(130, 600)
    alone = torch.cat([native.linear(x[row : row + 1], weight) for row in range(203)])
    assert torch.equal(native.linear(x, weight), alone)
    assert torch.equal(native.linear(x[100:], weight), alone[100:])


@needs_compiler
def test_linear_outputs_do_not_depend_on_their_neighbours() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(5, 333), torch.randn(50, 333)
    whole = native.linear(x, weight)
    for column in range(50):
        assert torch.equal(native.linear(x, weight[column : column + 1]), whole[:, column : column + 1])


@needs_compiler
def test_nothing_and_other_default_types() -> None:
    assert native.linear(torch.randn(0, 3), torch.randn(4, 3)).shape == (0, 4)
    assert native.linear(torch.randn(2, 3), torch.randn(0, 3)).shape == (2, 0)
    assert native.linear(torch.randn(2, 0), torch.randn(4, 0)).tolist() == [[0.0] * 4] * 2
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert native.linear(x, weight).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


# ---- norms and activations ----


@needs_compiler
@examples
@given(num_rows=sizes, width=st.integers(1, 700), offset=st.sampled_from([0.0, 1.0]), seed=seeds)
def test_rms_norm_equals_float64(num_rows: int, width: int, offset: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(num_rows, width), torch.randn(width)

    def reference(rows: Tensor) -> Tensor:
        rows = rows.double()
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5) * (weight.double() + offset)

    assert_close(native.rms_norm(x, weight, 1e-5, offset), reference(x))


@needs_compiler
@examples
@given(num_rows=sizes, width=st.integers(1, 300), spread=st.sampled_from([1.0, 10.0, 60.0]), seed=seeds)
def test_gated_activations_equal_float64(num_rows: int, width: int, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = torch.randn(num_rows, 2 * width) * spread
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(
        native.silu_mul(gate_up).double(), functional.silu(gate) * up, rtol=6e-7, atol=1e-30, check_dtype=False
    )
    assert_close(native.gelu_tanh_mul(gate_up), functional.gelu(gate, approximate="tanh") * up)


@needs_compiler
def test_row_operations_keep_their_bits() -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(300, 402), torch.randn(402)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for row in range(0, 300, 7):
            one = slice(row, row + 1)
            assert torch.equal(native.rms_norm(x[one], weight, 1e-6), native.rms_norm(x, weight, 1e-6)[one])
            assert torch.equal(native.silu_mul(x[one]), native.silu_mul(x)[one])
            assert torch.equal(native.gelu_tanh_mul(x[one]), native.gelu_tanh_mul(x)[one])


@needs_compiler
@examples
@given(num_rows=sizes, width=st.integers(1, 200), seed=seeds)
def test_row_argmax_takes_the_first_maximum(num_rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randint(-3, 3, (num_rows, width)).float()  # full of ties
    x[torch.rand(num_rows, width) < 0.2] = float("nan")
    x[torch.rand(num_rows, width) < 0.1] = -float("inf")
    expected = torch.nan_to_num(x, nan=-float("inf"), neginf=-float("inf")).tolist()
    actual = native.row_argmax(x).tolist()
    for row, choice in zip(expected, actual, strict=True):
        first = row.index(max(row))
        assert choice == first or (max(row) == -float("inf") and row[choice] == max(row))


# ---- rotary embedding and cache write ----


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    out, half = x.double().clone(), cosine.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first].double(), x[..., second].double()
    cosine, sine = cosine[:, None].double(), sine[:, None].double()
    out[..., first], out[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return out


@needs_compiler
@examples
@given(
    num_rows=st.integers(1, 40),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([2, 10, 64]),
    half=st.integers(1, 32),
    seed=seeds,
)
def test_rope_write(num_rows: int, key_heads: int, group: int, dim: int, half: int, seed: int) -> None:
    torch.manual_seed(seed)
    half, page_size, heads = min(half, dim // 2), 4, key_heads * group
    fused = torch.randn(num_rows, (heads + 2 * key_heads) * dim)
    query, key, value = fused.split([heads * dim, key_heads * dim, key_heads * dim], dim=1)
    query, key, value = (part.unflatten(1, (-1, dim)) for part in (query, key, value))
    angles = torch.randn(num_rows, half)
    pages = torch.full((2, 12, page_size, key_heads, dim), 7.0)
    locations = torch.randperm(12 * page_size)[:num_rows]
    locations[torch.rand(num_rows) < 0.2] = -1
    out = native.rope_write(query, key, value, angles.cos(), angles.sin(), pages[0], pages[1], locations)
    assert_close(out, rotate(query, angles.cos(), angles.sin()))
    expected = torch.full((2, 12 * page_size, key_heads, dim), 7.0, dtype=torch.float64)
    written = locations >= 0
    expected[0][locations[written]] = rotate(key, angles.cos(), angles.sin())[written]
    expected[1][locations[written]] = value[written].double()
    assert_close(pages.flatten(1, 2), expected)
    halves = torch.full_like(pages, 7.0, dtype=torch.float16)
    assert native.rope_write(query, key, value, angles.cos(), angles.sin(), *halves, locations).equal(out)
    assert halves.equal(pages.half())


@needs_compiler
@pytest.mark.parametrize("march", [None, *MARCHES])
def test_pages_of_half_precision_hold_the_nearest_number(
    march: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halfway between two, the even one; what is too large becomes the largest; NaN stays NaN."""
    if march is not None:
        use_older_processor(march, tmp_path, monkeypatch)
    exact = torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16).float()  # all that are finite, from 0 on
    halfway = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(halfway, torch.tensor(end)) for end in (0.0, torch.inf)]
    odd = torch.tensor([65519.0, 65520.0, 1e30, torch.inf, torch.nan, 1e-30, 0.1])
    x = torch.cat([exact, halfway, *beside, odd])
    x = functional.pad(torch.cat([x, -x]), (0, -2 * len(x) % 21)).view(-1, 3, 7)
    nothing, pages = torch.zeros(len(x), 1), torch.zeros(2, 1, len(x), 3, 7, dtype=torch.float16)
    native.rope_write(x, x, x, nothing.cos(), nothing, *pages, torch.arange(len(x)))
    expected = x.clamp(-65504, 65504).half()
    assert torch.equal(pages[1, 0].nan_to_num(1.0), expected.nan_to_num(1.0))
    assert pages[1, 0].isnan().equal(x.isnan())
    assert pages[0].nan_to_num(1.0).equal(pages[1].nan_to_num(1.0))  # turned by nothing


@needs_compiler
def test_rope_write_into_pages_that_lie_apart() -> None:
    pages = torch.zeros(5, 2, 4, 1, 8)  # keys and values of a page side by side
    rows, angles = torch.randn(3, 1, 8), torch.randn(3, 4)
    native.rope_write(rows, rows, rows, angles.cos(), angles.sin(), pages[:, 0], pages[:, 1], torch.tensor([0, 7, 18]))
    assert torch.equal(pages[:, 1].flatten(0, 1)[[0, 7, 18]], rows)
    assert_close(pages[:, 0].flatten(0, 1)[[0, 7, 18]], rotate(rows, angles.cos(), angles.sin()))


# ---- attention ----

Heads = tuple[int, int, int, int]  # of queries, of keys, dim of keys, dim of values
OPTIONS = [{}, {"window": 37}, {"softcap": 5.0, "first_key": 3}, {"sinks": 1, "last_key": 1}]


class Scene:
    """Requests over permuted pages. What no row may see holds NaN; unused entries of the page table are nonsense."""

    def __init__(self, seed: int, rows: list[int], lengths: list[int], page_size: int, heads: Heads) -> None:
        torch.manual_seed(seed)
        query_heads, key_heads, self.dim, value_dim = heads
        self.lengths, self.page_size = lengths, page_size
        counts = [-(-length // page_size) for length in lengths]
        self.key_pages = torch.full((sum(counts) + 2, page_size, key_heads, self.dim), float("nan"))
        self.value_pages = torch.full((sum(counts) + 2, page_size, key_heads, value_dim), float("nan"))
        self.page_table = torch.full((len(rows), max(counts) + 1), -(2**30), dtype=torch.int32)
        order = torch.randperm(sum(counts) + 2)
        for request, length in enumerate(lengths):
            mine = order[sum(counts[:request]) :][: counts[request]]
            self.page_table[request, : counts[request]] = mine.int()
            places = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            self.key_pages.flatten(0, 1)[places] = torch.randn(length, key_heads, self.dim)
            self.value_pages.flatten(0, 1)[places] = torch.randn(length, key_heads, value_dim)
        self.query_start = torch.tensor([sum(rows[:request]) for request in range(len(rows) + 1)], dtype=torch.int32)
        self.indices = torch.cat(
            [torch.arange(length - num_rows, length) for num_rows, length in zip(rows, lengths, strict=True)]
        )
        self.query = torch.randn(sum(rows), query_heads, self.dim)
        self.sinks = torch.randn(query_heads)
        self.last_key = (self.indices + torch.randint(-3, 4, self.indices.shape)).clamp(
            max=torch.repeat_interleave(torch.tensor(lengths), torch.tensor(rows)) - 1
        )

    def attend(self, rows: slice | None = None, **options: object) -> Tensor:
        """All rows, or a slice of one request's alone."""
        query, indices, start, table = self.query, self.indices, self.query_start, self.page_table
        if rows is not None:
            request = int((start[1:] <= rows.start).sum())
            query, indices, table = query[rows], indices[rows], table[request : request + 1]
            start = torch.tensor([0, len(query)], dtype=torch.int32)
            if options.get("last_key") is not None:
                options["last_key"] = self.last_key[rows]
        scale = self.dim**-0.5
        pages = self.key_pages, self.value_pages
        return native.paged_attention(query, *pages, table, start, indices, scale, **options)  # type: ignore[arg-type]

    def reference(
        self,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        first_key: int = 0,
        last_key: Tensor | None = None,
    ) -> Tensor:
        num_rows, query_heads, _ = self.query.shape
        out = torch.zeros(num_rows, query_heads, self.value_pages.shape[3], dtype=torch.float64)
        group = query_heads // self.key_pages.shape[2]
        for request in range(len(self.lengths)):
            pages = self.page_table[request, : -(-self.lengths[request] // self.page_size)].long()
            length = self.lengths[request]
            keys = self.key_pages[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            values = self.value_pages[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            rows = slice(int(self.query_start[request]), int(self.query_start[request + 1]))
            index, key = self.indices[rows, None], torch.arange(len(keys))
            seen = (key >= first_key) & (key <= (index if last_key is None else last_key[rows, None]))
            if window:
                seen &= key > index - window
            scores = torch.einsum("thd,khd->thk", self.query[rows].double(), keys) * self.dim**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen[:, None], -float("inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None].expand(len(index), -1, 1)], dim=2)
            weights = scores.softmax(dim=2)[..., : len(keys)].nan_to_num()
            out[rows] = torch.einsum("thk,khd->thd", weights, values)
        return out


@needs_compiler
@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    extra=st.lists(st.integers(0, 300), min_size=4, max_size=4),
    page_size=st.sampled_from([4, 16, 5]),
    key_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8, 33]),
    dims=st.sampled_from([(64, 64), (16, 16), (24, 40), (7, 3), (80, 128)]),
    window=st.sampled_from([0, 0, 1, 17, 200]),
    softcap=st.sampled_from([0.0, 0.0, 3.0, 50.0]),
    with_sinks=st.booleans(),
    first_key=st.sampled_from([0, 0, 1, 40, 130]),
    with_last_key=st.booleans(),
    num_threads=st.integers(1, 3),
    halves=st.booleans(),
    seed=seeds,
)
def test_attention_equals_float64(
    rows: list[int],
    extra: list[int],
    page_size: int,
    key_heads: int,
    group: int,
    dims: tuple[int, int],
    window: int,
    softcap: float,
    with_sinks: bool,
    first_key: int,
    with_last_key: bool,
    num_threads: int,
    halves: bool,
    seed: int,
) -> None:
    """Pages of half precision give what floats of the same value give, to the last bit."""
    torch.set_num_threads(num_threads)
    lengths = [num_rows + more for num_rows, more in zip(rows, extra, strict=False)]
    scene = Scene(seed, rows, [max(1, length) for length in lengths], page_size, (group * key_heads, key_heads, *dims))
    options = {
        "window": window,
        "softcap": softcap,
        "first_key": first_key,
        "sinks": scene.sinks if with_sinks else None,
        "last_key": scene.last_key if with_last_key else None,
    }
    pages = scene.key_pages.half(), scene.value_pages.half()
    if halves:
        scene.key_pages, scene.value_pages = (each.float() for each in pages)
    attended = scene.attend(**options)
    assert_close(attended, scene.reference(**options))  # type: ignore[arg-type]
    if halves:
        scene.key_pages, scene.value_pages = pages
        assert scene.attend(**options).equal(attended)


@needs_compiler
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads", [(9, 3, 64, 64), (4, 4, 20, 20), (40, 1, 16, 24)])
def test_attention_rows_keep_their_bits(options: dict[str, object], heads: Heads) -> None:
    scene = Scene(5, [40, 1, 7], [190, 300, 129], 16, heads)
    options = options | {name: getattr(scene, name) for name in ("sinks", "last_key") if name in options}
    torch.set_num_threads(1)
    together = scene.attend(**options)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(scene.attend(**options), together)
        for row in range(48):
            assert torch.equal(scene.attend(slice(row, row + 1), **options), together[row : row + 1])
        for end in (2, 6, 11, 39):
            assert torch.equal(scene.attend(slice(0, end), **options), together[:end])


@needs_compiler
def test_a_later_row_that_is_not_a_number_stays_alone() -> None:
    scene = Scene(6, [6], [140], 4, (6, 2, 32, 32))
    clean = scene.attend()
    last = int(scene.page_table[0, 139 // 4])
    scene.key_pages[last, 139 % 4] = scene.value_pages[last, 139 % 4] = float("nan")
    spoilt = scene.attend()
    assert torch.equal(spoilt[:5], clean[:5])
    assert spoilt[5].isnan().all()
    scene.query[2] = float("nan")
    assert scene.attend()[2].isnan().all()


@needs_compiler
def test_rows_without_keys_give_zeros() -> None:
    scene = Scene(7, [3], [20], 4, (2, 1, 8, 8))
    scene.indices = torch.tensor([-1, 4, -1])
    out = scene.attend(sinks=scene.sinks)
    assert (out[[0, 2]] == 0).all()
    assert (out[1] != 0).all()
    assert (scene.attend(first_key=5) == 0).all()


# ---- build ----


SHORT = '__attribute__((visibility("default"))) int outrider_answer(void) { return 42; }'


@needs_compiler
def test_two_processes_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "short.c"  # quicker to compile
    source.write_text(SHORT)
    monkeypatch.setattr(native_library, "SOURCE", source)
    tmp_path = tmp_path / "built"
    tmp_path.mkdir()
    processes = multiprocessing.get_context("fork")
    builders = [processes.Process(target=native_library.build, args=(tmp_path,)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(timeout=120)
    assert [builder.exitcode for builder in builders] == [0, 0]
    digest, built = sorted(tmp_path.iterdir())  # one library, and nothing left over
    assert (digest.suffix, built.suffix) == (".sha256", ".so")
    assert ctypes.CDLL(str(built)).outrider_answer() == 42
    assert native_library.build(tmp_path) == built


@needs_compiler
def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading half a library ends the process with SIGBUS, at every start: it is looked at before."""
    source = tmp_path / "short.c"  # quicker to compile
    source.write_text(SHORT)
    monkeypatch.setattr(native_library, "SOURCE", source)
    built = native_library.build(tmp_path)
    whole, first = built.read_bytes(), built.stat().st_mtime_ns
    assert native_library.build(tmp_path).stat().st_mtime_ns == first  # found, not built
    for damaged in (whole[: len(whole) // 3], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        built.write_bytes(damaged)
        assert native_library.build(tmp_path) == built
        assert len(built.read_bytes()) == len(whole)
    built.with_suffix(".sha256").unlink()  # as an earlier version left it
    assert native_library.build(tmp_path) == built
    assert built.with_suffix(".sha256").exists()
    assert ctypes.CDLL(str(built)).outrider_answer() == 42


def test_without_a_compiler_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library.shutil, "which", lambda name: None)
    native_library.library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="install a C compiler"):
            assert native_library.library() is None
        assert native_library.library() is None  # a second warning would be an error here
    finally:
        native_library.library.cache_clear()


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_torch_and_the_kernels_share_one_openmp() -> None:
    """Loading the kernels brings no OpenMP runtime beside the one torch has loaded."""
    script = """
import torch
from pathlib import Path

from outrider.kernels import native, native_library

def runtimes():
    files = {Path(line.split(maxsplit=5)[-1]) for line in Path("/proc/self/maps").read_text().splitlines()}
    return {file for file in files if file.name.startswith(("libgomp", "libomp", "libiomp"))}  # wherever it lies

torch.randn(300, 300) @ torch.randn(300, 300)
before = runtimes()
native.linear(torch.randn(4, 300), torch.randn(300, 300))
assert native_library.openmp_runtime() in {file.resolve() for file in before}, before
assert runtimes() == before, runtimes() - before
"""
    subprocess.run([sys.executable, "-c", script], check=True)
