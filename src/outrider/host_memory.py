"""Memory of the CPU, taken so that only what is used costs anything: zeros that the system backs when they are first
written, large pages for the weights, results that lie where earlier ones lay, and file pages that are given back once
they are read."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LARGE_PAGE = 2 * 2**20
LARGE_RESULT = 2**25  # bytes from which the C library gives memory back whenever it is freed
MOST_KEPT = 2**28  # bytes of a result whose memory is kept
_IS_LINUX = sys.platform == "linux"


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros, but on a CPU nothing is written: a page of memory is taken when it is first written to.

    A cache may so be as large as it can ever be needed, and take no more than requests have used of it."""
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or num_bytes < LARGE_PAGE:
        return torch.zeros(*size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*size)  # which keeps the memory until it is gone itself


class Results:
    """Memory for large results that are soon gone, such as the logits of many rows. The C library would give it back to
    the system each time, and to be given it anew, in pages that are zeroed, takes as long as computing what stands in
    it."""

    def __init__(self) -> None:
        self._kept = [mmap.mmap(-1, mmap.PAGESIZE)]
        self._lock = threading.Lock()
        self._num_own = self._num_holders(0)

    def empty(self, *size: int) -> Tensor:
        """float32 [size] on the CPU. Its memory is used again once no tensor looks at it any more."""
        count = math.prod(size)
        if not LARGE_RESULT < 4 * count <= MOST_KEPT:
            return torch.empty(size, dtype=torch.float32, device="cpu")
        with self._lock:
            found = torch.frombuffer(self._memory(4 * count), dtype=torch.float32, count=count)
        return found.view(size)

    def _memory(self, num_bytes: int) -> mmap.mmap:
        """Of what nobody looks at, the first that is large enough; or all of it goes, and more is taken."""
        unused = [place for place in range(len(self._kept)) if self._num_holders(place) == self._num_own]
        for place in unused:
            if len(self._kept[place]) >= num_bytes:
                return self._kept[place]
        self._kept = [memory for place, memory in enumerate(self._kept) if place not in unused]
        self._kept.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return self._kept[-1]

    def _num_holders(self, place: int) -> int:
        """The list that keeps it, and each tensor's memory."""
        return sys.getrefcount(self._kept[place])


results = Results()


class Arena:
    """Bytes for many tensors, side by side in large pages: a few megabytes by themselves would get none, or half of
    them. All are zero. A chunk of it is freed as a whole, and its last large page is used in part."""

    def __init__(self, chunk_bytes: int = 128 * 2**20) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._taken = 0

    def take(self, num_rows: int, row_bytes: int) -> Tensor:
        """[num_rows, row_bytes] uint8, at a multiple of 64 bytes."""
        num_bytes = num_rows * row_bytes
        if self._taken + num_bytes > len(self._chunk):
            size = max(self._chunk_bytes, num_bytes)
            memory = zeros((size + LARGE_PAGE,), torch.uint8, torch.device("cpu"))
            self._chunk, self._taken = memory[-memory.data_ptr() % LARGE_PAGE :][:size], 0
            use_large_pages(self._chunk)
        found = self._chunk[self._taken : self._taken + num_bytes].view(num_rows, row_bytes)
        self._taken += -(-num_bytes // 64) * 64
        return found


def use_large_pages(tensor: Tensor) -> None:
    """Asks for large pages under a tensor that was not written yet: it is then filled, and later read, much faster.
    They are a matter of speed alone: where there are none, nothing happens."""
    if not (_IS_LINUX and tensor.is_cpu):
        return
    begin = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // LARGE_PAGE * LARGE_PAGE
    if end > begin:
        _madvise()(begin, end - begin, mmap.MADV_HUGEPAGE)


def give_back(memory: mmap.mmap, offset: int, num_bytes: int) -> None:
    """What was read of a file no longer counts as this program's memory. It can be read again."""
    if _IS_LINUX:
        begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def give_back_freed() -> None:
    """What was freed in small pieces, and is kept for more of them: after a large vocabulary was read, for instance, up
    to a hundred megabytes. Only the C library of most Linux systems can be asked to."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    function = getattr(ctypes.CDLL(None), "malloc_trim", None) if _IS_LINUX else None
    if function is not None:
        function.argtypes = [ctypes.c_size_t]
    return function


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
