"""Triton's interpreter, faster and stricter. Most of its time goes into describing types anew for every operation of
every program, and none of it into numbers. And it reads and writes wherever a pointer points to: here only where the
kernel's arguments are."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from triton._utils import validate_block_shape
from triton.language import core, standard
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class Scope:
    """What was replaced for a kernel, put back once."""

    def __init__(self, parts: list[Any], ended: Callable[[], None]) -> None:
        self._parts, self._ended = parts, ended

    def restore(self) -> None:
        for part in reversed(self._parts):
            part.restore()
        self._ended()


def speed_up() -> None:
    patch_once_a_kernel()
    describe_types_once()
    stay_inside()
    builder = interpreter.interpreter_builder
    # sums are made a second time in 64 bits, and what they show is looked at in debug mode alone
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def patch_once_a_kernel() -> None:
    """It replaces the language's functions anew for every call of a device function; while a kernel runs they are
    replaced already."""
    original, running = interpreter._patch_lang, []

    def patched(fn: Any) -> Any:
        if running:
            return Scope([], lambda: None)  # of a device function
        running.append(fn)
        # functions of the language's own library see it by another name
        return Scope([original(fn), original(standard.sum.fn)], running.clear)

    interpreter._patch_lang = patched


def describe_types_once() -> None:
    """Shapes and names of block types, shapes of tensors and numpy's names of types are kept."""
    described: dict[tuple[Any, ...], dict[str, Any]] = {}
    numpy_types: dict[str, np.dtype[Any]] = {}
    compare, numpy_type = core.tuple.__eq__, interpreter._get_np_dtype
    spread = TritonSemantic.broadcast_impl_value
    scalar = {"shape": core.tuple([]), "numel": core.constexpr(1)}

    def describe(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = (element_ty.name, *sizes)
        if key not in described:
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            numel, plain = validate_block_shape(list(sizes)), core.tuple(sizes)
            wrapped = core.tuple([core.constexpr(size) for size in sizes])
            tensor = {"shape": wrapped, "numel": core.constexpr(math.prod(sizes))}
            name = f"<{plain}, {element_ty}>"
            described[key] = {"shape": plain, "numel": numel, "name": name, "of_tensors": tensor}
        self.element_ty = element_ty
        self.__dict__.update(described[key])

    def same_block(self: Any, other: Any) -> bool:
        return (
            isinstance(other, core.block_type)
            and self.element_ty == other.element_ty
            and self.shape.values == other.shape.values
        )

    def same_tuple(self: Any, other: Any) -> Any:
        if type(other) is core.tuple and type(self) is core.tuple and self.values is other.values:
            return core.constexpr(True)
        if isinstance(other, list | builtins.tuple) and all(type(item) is int for item in other):
            return core.constexpr(self.values == list(other))
        return compare(self, other)

    def same_scalar(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = core._unwrap_if_constexpr(other)
        return isinstance(other, core.dtype) and self.name == other.name

    def hold(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.__dict__.update(type.of_tensors if type.is_block() else scalar)

    def known_numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type)
        return numpy_types[name]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        return (lhs, rhs) if blocks and lhs.type.shape.values == rhs.type.shape.values else spread(self, lhs, rhs)

    core.block_type.__init__, core.block_type.__eq__ = describe, same_block
    core.tuple.__eq__, core.dtype.__eq__ = same_tuple, same_scalar
    core.tensor.__init__ = hold
    interpreter._get_np_dtype = known_numpy_type
    TritonSemantic.broadcast_impl_value = broadcast


def stay_inside() -> None:
    """An error where a kernel touches memory that belongs to none of its arguments; on a GPU that is an illegal access,
    or somebody else's numbers. Storages count as a whole: a view of one may be left."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    begin, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    add = builder.create_atomic_rmw
    storages: dict[str, Any] = {}

    def begun(self: Any, args: Any, kwargs: Any) -> Any:
        found = begin(self, args, kwargs)
        held = {each.untyped_storage() for each in [*found[0], *found[1].values()] if hasattr(each, "untyped_storage")}
        spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in held)
        storages["kernel"] = self.fn.__name__
        storages["begin"], storages["end"] = np.array(spans or [(0, 0)], dtype=np.uint64).T
        return found

    def check(pointers: Any, mask: Any) -> None:
        at, size = pointers.data, max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        number = np.maximum(np.searchsorted(storages["begin"], at, side="right"), 1) - 1
        inside = (at >= storages["begin"][number]) & (at + np.uint64(size) <= storages["end"][number])
        if not (inside | ~mask.data.astype(bool)).all():
            raise IndexError(f"{storages['kernel']} touches memory outside its arguments")

    def checked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *others)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *others)

    def checked_add(self: Any, kind: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        check(pointers, mask)
        return add(self, kind, pointers, value, mask, *others)

    executor._init_args_hst = begun
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw = checked_add
