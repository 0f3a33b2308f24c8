"""Gluon, which has no interpreter, as far as our kernels speak it: blocks are numpy arrays, partitions of warps are
threads, and what is asynchronous is done as late as it may be. Whoever reads what was not waited for finds NaN, whoever
waits for what never comes is told so, and an access outside an argument is an error."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from outrider.kernels.gpu.widen import FP4_SMALL_ASM, INT4_ASM, LARGER_ASM, RAISED_ASM, UINT4_ASM
from outrider.kernels.quantised import FP4_VALUES

PATIENCE = 20.0  # seconds
here = threading.local()  # program, number of programs, products under way


class Block(np.ndarray):
    """A tensor of a kernel."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else self.astype(dtype)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)


def block(values: Any) -> Any:
    array = np.asarray(values)
    return array.view(Block) if array.ndim else array.item()


@dataclass
class Pointer:
    """Places in an argument's memory."""

    memory: np.ndarray
    at: Any

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        at, mask = np.broadcast_arrays(self.at, mask)
        if ((at < 0) | (at >= len(self.memory)))[mask].any():
            raise IndexError("a kernel touches memory outside its arguments")
        return at, mask


def load(pointer: Pointer, mask: Any = True, other: Any = 0, cache_modifier: str = "") -> Any:
    at, mask = pointer.places(mask)
    return block(np.where(mask, pointer.memory[np.where(mask, at, 0)], np.asarray(other, pointer.memory.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, mask = pointer.places(np.broadcast_to(mask, np.broadcast_shapes(np.shape(pointer.at), np.shape(mask))))
    pointer.memory[at[mask]] = np.broadcast_to(value, at.shape)[mask]


LOCK = threading.RLock()


def atomic_add(pointer: Pointer, value: int, sem: str = "acq_rel") -> int:
    if not value:
        time.sleep(0.001)  # whoever only looks, waits
    with LOCK:
        found = load(pointer)
        store(pointer, found + value)
        return int(found)


@dataclass
class Shared:
    """Shared memory, or a part of it. SWIZZLED: columns beyond the 64th come after all rows of the first 64."""

    memory: np.ndarray
    start: int
    shape: tuple[int, ...]
    swizzled: bool
    order: tuple[int, ...] | None = None  # of its dimensions, as they are seen

    @property
    def dtype(self) -> Any:
        return self.memory.dtype

    def index(self, number: int) -> Shared:
        if not 0 <= number < self.shape[0]:
            raise IndexError("a kernel touches shared memory that is not there")
        size = int(np.prod(self.shape[1:]))
        return Shared(self.memory, self.start + int(number) * size, self.shape[1:], self.swizzled)

    def permute(self, order: Any) -> Shared:
        return Shared(self.memory, self.start, self.shape, self.swizzled, tuple(order))

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        assert np.prod(shape) == np.prod(self.shape)
        return Shared(self.memory, self.start, tuple(shape), layout == "swizzled")

    def view(self) -> np.ndarray:
        flat = self.memory[self.start : self.start + int(np.prod(self.shape))]
        if not self.swizzled:
            return flat.reshape(self.shape)
        *rows, columns = self.shape
        halves = flat.reshape(columns // 64, -1, 64)
        return halves.reshape(*rows, 64) if columns == 64 else halves.transpose(1, 0, 2)

    def load(self, layout: Any = None) -> Any:
        found = self.view().reshape(self.shape).copy().view(Block)
        return found if self.order is None else found.transpose(self.order)

    def store(self, value: Any) -> None:
        self.view()[...] = np.asarray(value)


def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any) -> Shared:
    memory: np.ndarray = np.zeros(int(np.prod(shape)), dtype=object if layout == "barriers" else dtype)
    return Shared(memory, 0, tuple(shape), layout == "swizzled")


class Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def change(self, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += num_bytes
            assert self.missing >= 0
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE):
                raise TimeoutError("a barrier is waited for that nobody completes")


def of(place: Shared) -> Barrier:
    return place.memory[place.start]


class Mbarrier:
    MBarrierLayout = staticmethod(lambda: "barriers")

    @staticmethod
    def init(place: Shared, count: int) -> None:
        place.memory[place.start] = Barrier(count)

    @staticmethod
    def expect(place: Shared, num_bytes: int) -> None:
        of(place).change(1, num_bytes)

    @staticmethod
    def arrive(place: Shared, count: int = 1, pred: bool = True) -> None:
        if pred:
            of(place).change(count, 0)

    @staticmethod
    def wait(place: Shared, phase: int) -> None:
        of(place).wait(phase)


@dataclass
class Described:
    """A tensor as the copy engine knows it."""

    array: np.ndarray
    box: list[int]

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def copy(described: Described, corner: list[int], place: Shared, to: Shared) -> None:
    to.view()[...] = np.nan
    assert list(to.shape) == described.box

    def run() -> None:
        time.sleep(random.random() * 0.002)
        found = np.zeros(described.box, dtype=described.dtype)
        pairs = zip(corner, described.box, described.array.shape, strict=True)
        spans = [(at, max(min(at + size, end), at)) for at, size, end in pairs]
        part = described.array[tuple(slice(*span) for span in spans)]
        found[tuple(slice(0, size) for size in part.shape)] = part
        to.view()[...] = found
        of(place).change(0, -found.nbytes)

    threading.Thread(target=run).start()


def async_load(to: Shared, pointer: Pointer, mask: Any = True) -> None:
    """It is there when its group has been waited for."""
    to.view()[...] = np.nan
    here.copies.append((to, pointer, mask))


def commit_group() -> None:
    here.groups.append(here.copies)
    here.copies = []


def wait_group(num_outstanding: int) -> None:
    while len(here.groups) > num_outstanding:
        for to, pointer, mask in here.groups.pop(0):
            to.view()[...] = load(pointer, mask)


@dataclass
class Product:
    """Of two matrices, under way: made when it is waited for."""

    a: Any
    b: Shared
    total: Any
    use_acc: bool
    result: Any = None

    def finish(self) -> None:
        a = self.a.load() if isinstance(self.a, Shared) else self.a
        found = block(a.astype(np.float32) @ self.b.load().astype(np.float32))
        self.result = found + self.total if self.use_acc else found


def warpgroup_mma(a: Any, b: Shared, total: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    assert not isinstance(total, Product)
    here.products.append(Product(a, b, total, use_acc))
    return here.products[-1]


def warpgroup_mma_wait(num_outstanding: int, deps: list[Any]) -> Any:
    while len(here.products) > num_outstanding:
        here.products.pop(0).finish()
    found = [each.result if isinstance(each, Product) else each for each in deps]
    assert all(each is not None for each in found)
    return found[0] if len(found) == 1 else tuple(found)


SMALL = 2.0**-126  # what numbers of fp4 are widened to, where nobody multiplies them
SIGNED_FP4 = np.array([*FP4_VALUES, *(-value for value in FP4_VALUES)], np.float32)
FP4_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))  # where a word has each number's bits


def widened(assembly: str, constraints: str, words: list[Any], kinds: Any, is_pure: bool, pack: int) -> Any:
    """The only assembly that is spoken here, widen's: whole numbers of 4 bits as n / 8, with 16, 0 or -1 beside it;
    fp4; and inputs made larger."""
    (bits,) = words
    if assembly == LARGER_ASM.value:
        return block(bits * np.float32(2.0**96))
    if assembly == FP4_SMALL_ASM.value:
        numbers = [sum((bits >> at & 1) << 3 - n for n, at in enumerate(places)) for places in FP4_PLACES]
        return tuple(block(SIGNED_FP4[number] * np.float32(SMALL)) for number in numbers)
    more = np.float32({RAISED_ASM.value: 16, UINT4_ASM.value: 0, INT4_ASM.value: -1}[assembly])
    return tuple(block((bits >> shift & 15) / np.float32(8) + more) for shift in (0, 4, 8, 12))


Program = tuple[tuple[int, ...], tuple[int, ...]]  # its place in a grid, and the grid


def side_by_side(calls: list[tuple[Callable[..., None], tuple[Any, ...]]], program: Program) -> None:
    wrong: list[BaseException] = []

    def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        here.program, here.products = program, []
        try:
            with np.errstate(divide="ignore"):
                function(*args)
            assert not here.products
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]


def reduced(function: Any) -> Callable[[Any, int], Any]:
    return lambda x, axis: block(function(x, axis=axis))


LANGUAGE = SimpleNamespace(
    int32=np.int32, int64=np.int64, float32=np.float32, load=load, store=store, atomic_add=atomic_add,
    allocate_shared_memory=allocate_shared_memory, static_range=range, debug_barrier=lambda: None,
    convert_layout=lambda x, layout, assert_trivial=False: x,
    arange=lambda begin, end, layout=None: block(np.arange(begin, end, dtype=np.int32)),
    full=lambda shape, value, dtype, layout=None: block(np.full(shape, value, dtype)),
    zeros=lambda shape, dtype, layout=None: block(np.zeros(shape, dtype)),
    full_like=lambda x, value: block(np.full_like(x, value)), zeros_like=lambda x: block(np.zeros_like(x)),
    max=reduced(np.max), min=reduced(np.min), sum=reduced(np.sum), exp=lambda x: block(np.exp(x)),
    exp2=lambda x: block(np.exp2(x)), int16=np.int16, bfloat16=np.float32, inline_asm_elementwise=widened,
    cast=lambda x, dtype: dtype(x), join=lambda a, b: block(np.stack((a, b), -1)),
    permute=lambda x, order: block(x.transpose(order)), split=lambda x: (block(x[..., 0]), block(x[..., 1])),
    reshape=lambda x, shape: block(x.reshape(shape)), DistributedLinearLayout=lambda *args: None,
    where=lambda mask, a, b: block(np.where(mask, a, b)), maximum=lambda a, b: block(np.maximum(a, b)),
    minimum=lambda a, b: block(np.minimum(a, b)), program_id=lambda axis: here.program[0][axis],
    num_programs=lambda axis: here.program[1][axis], BlockedLayout=lambda *args: None, SliceLayout=lambda *args: None,
    DotOperandLayout=lambda *args: None, NVMMADistributedLayout=lambda *args: None,
    SwizzledSharedLayout=lambda *args: "flat", NVMMASharedLayout=lambda *args, rank: "swizzled",
    warp_specialize=lambda calls, warps, registers: side_by_side(calls, here.program),
)  # fmt: skip
WORDS = {
    "gl": LANGUAGE, "tl": LANGUAGE, "mbarrier": Mbarrier, "copy": copy, "barrier": lambda: None,
    "fence_async_shared": lambda: None, "reinterpret": Shared.reinterpret, "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait, "async_load": async_load, "commit_group": commit_group,
    "wait_group": wait_group, "mma_v2": lambda a, b, total: block(a @ b + total),
}  # fmt: skip


class Kernel:
    """A kernel of some modules that is launched as on a device, and runs here; a few programs at a time."""

    at_a_time = 3

    def __init__(self, name: str, *modules: Any) -> None:
        names: dict[str, Any] = {}
        for each, value in (pair for module in modules for pair in vars(module).items()):
            function = getattr(value, "fn", None)
            if isinstance(function, FunctionType):
                names[each] = FunctionType(function.__code__, names, each, function.__defaults__)
            else:
                names[each] = getattr(value, "value", value)
        self.run = names[name]
        names.update(WORDS)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, maxnreg: int | None = None, **constants: Any) -> None:
            known = [as_argument(each) for each in args]

            def program(number: int) -> None:
                place = tuple(int(each) for each in np.unravel_index(number, grid, order="F"))
                here.program, here.products, here.copies, here.groups = (place, grid), [], [], []
                self.run(*known, **constants)

            def several(first: int, step: int) -> None:
                for number in range(first, int(np.prod(grid)), step):
                    program(number)

            side_by_side([(several, (first, self.at_a_time)) for first in range(self.at_a_time)], ((0,), grid))

        return launch


def as_argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        return Pointer(memory.numpy(), value.storage_offset())
    if hasattr(value, "block_shape"):
        base = value.base
        memory = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage()).numpy()[base.storage_offset() :]
        strides = [stride * memory.itemsize for stride in value.strides]
        assert sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True)) < len(memory)
        return Described(as_strided(memory, value.shape, strides), list(value.block_shape))
    return value
