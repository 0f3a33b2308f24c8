"""Memory that costs nothing until it is used, and weights that are read into place."""

import ctypes
import mmap
import resource
import sys
import zlib
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams, host_memory
from outrider.engine import memory
from outrider.host_memory import (
    LARGE_RESULT,
    MOST_KEPT,
    Arena,
    Results,
    give_back,
    give_back_freed,
    use_large_pages,
    zeros,
)
from outrider.kernels import native, native_library

CPU = torch.device("cpu")
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@only_linux
def test_zeros_are_backed_when_they_are_written() -> None:
    before = resident()
    tensor = zeros((64, 2**20), torch.float32, CPU)  # 256 MiB
    assert tensor.shape == (64, 2**20)
    assert resident() - before < 2**25
    tensor[:32] = 1.0
    assert 2**27 <= resident() - before < 2**27 + 2**25
    assert tensor[:32].eq(1).all()
    del tensor
    assert resident() - before < 2**25


@only_linux
def test_a_cache_takes_what_is_used_of_it() -> None:
    before = resident()
    with LLM(None, None, max_num_seqs=64) as llm:
        llm.generate("Once upon a time", SamplingParams(max_tokens=4))
        assert llm.budget.cache_bytes > 2**28
        assert resident() - before < llm.budget.cache_bytes / 2


@pytest.mark.parametrize("size", [(0,), (3, 5), (2, 3, 2**20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.long])
def test_zeros_are_zeros(size: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = zeros(size, dtype, CPU)
    assert tensor.shape == size
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor += 1
    assert tensor.eq(1).all()


@only_linux
def test_large_pages_are_asked_for_within_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(host_memory, "_madvise", lambda: lambda *call: asked.append(call))
    tensor = torch.empty(3 * 2**20)
    use_large_pages(tensor)
    use_large_pages(torch.empty(1000))
    ((begin, length, advice),) = asked
    assert advice == mmap.MADV_HUGEPAGE
    assert begin % host_memory.LARGE_PAGE == length % host_memory.LARGE_PAGE == 0
    assert tensor.data_ptr() <= begin
    assert begin + length <= tensor.data_ptr() + tensor.numel() * 4


@only_linux
def test_pages_of_a_file_are_given_back(tmp_path: Path) -> None:
    content = bytes(range(256)) * 2**16  # 16 MiB
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    before, whole = resident(), zlib.crc32(content)
    assert zlib.crc32(memory) == whole  # reads it where it lies: a copy would take memory too
    held = resident() - before
    give_back(memory, 100, len(content) - 200)
    assert held >= 2**24
    assert resident() - before < 2**20
    assert zlib.crc32(memory) == whole


@only_linux
@pytest.mark.skipif(host_memory._malloc_trim() is None, reason="a C library that cannot be asked to")
def test_what_was_freed_in_small_pieces_is_given_back() -> None:
    """Small pieces that are still used lie among them, so it is not given back by itself."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    give_back_freed()  # what tests before this one have left would be used again
    before = resident()
    pieces = [library.malloc(4000) for _ in range(20_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 4000)
    for number, piece in enumerate(pieces):
        if number % 100:
            library.free(piece)
    held = resident() - before
    give_back_freed()
    assert held > 20_000 * 2000
    assert resident() - before < held / 4
    for piece in pieces[::100]:
        library.free(piece)


def test_texts_that_have_ended_take_no_more_and_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_AMPLE", 2**20)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(None, None, max_num_seqs=1) as llm:
        ample, pool = llm.budget.num_ample, llm.engine.scheduler.pool
        assert ample is not None
        assert ample < pool.num_pages / 4
        prompts = [{"prompt_token_ids": [5 + number, 7] * 30} for number in range(ample)]  # of four pages each
        llm.generate(prompts, params)
        llm.generate(prompts[-1], params)
        assert pool._num_used == ample + 1
        assert llm.engine.scheduler.prefixes.stats.hit == 48, "the last one is still found"


def test_an_arena_gives_zeros_that_do_not_overlap() -> None:
    arena = Arena(chunk_bytes=1 << 16)
    sizes = [(3, 5), (1, 64), (7, 9000), (1, 1), (100, 2000), (2, 2)]  # some larger than what is left, or than all
    taken = [arena.take(*size) for size in sizes]
    assert all(not each.any() and each.data_ptr() % 64 == 0 for each in taken)
    for number, each in enumerate(taken, start=1):
        each.fill_(number)
    assert [(tuple(each.shape), set(each.unique().tolist())) for each in taken] == [
        (size, {number}) for number, size in enumerate(sizes, start=1)
    ]


def test_large_results_lie_where_earlier_ones_lay() -> None:
    """But never where somebody still looks."""
    memory, count = Results(), LARGE_RESULT // 4 + 1
    first = memory.empty(count)
    part, place = first[7:9].fill_(3.0), first.data_ptr()
    del first
    second = memory.empty(count).fill_(5.0)
    assert second.data_ptr() != place
    assert part.tolist() == [3.0, 3.0]
    del part
    third = memory.empty(1, count)
    assert third.shape == (1, count)
    assert third.data_ptr() == place
    del second, third
    larger = memory.empty(4, count)
    del larger
    assert [len(each) for each in memory._kept] == [16 * count], "what was too small is gone"


@pytest.mark.parametrize("count", [0, LARGE_RESULT // 4, MOST_KEPT // 4 + 1])
def test_what_costs_nothing_or_too_much_is_not_kept(count: int) -> None:
    memory = Results()
    before = list(memory._kept)
    assert memory.empty(count).shape == (count,)
    assert memory._kept == before


def test_logits_of_many_rows_lie_where_those_before_lay() -> None:
    if native_library.library() is None:
        pytest.skip("no C compiler, so no native kernels")
    weight, x = torch.randn(LARGE_RESULT // 16 // 4 + 1, 4), torch.randn(17, 4)
    with torch.inference_mode():
        places = set()
        for _ in range(3):
            logits = native.linear(x, weight)
            torch.testing.assert_close(logits, x @ weight.T)
            places.add(logits.data_ptr())
            del logits
    assert len(places) == 1
