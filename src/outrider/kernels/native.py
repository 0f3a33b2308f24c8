"""CPU kernels in C (native_library.py), called through ctypes.
A row's result never depends on the rows beside it, nor on the number of threads. Inference only: no gradients."""

import ctypes
import struct

import torch
from torch import Tensor

from outrider.host_memory import results
from outrider.kernels import native_library
from outrider.kernels.packed import Blocks, Packed

# The work structures of native.c, eight bytes a field. One packed argument is quicker to pass than its fields.
MATRIX = "5q"  # matrix of unpack.c
PAGES = "7q"  # page_view of rows.c
_LINEAR = struct.Struct(f"@3q 4q {MATRIX}")
_NORM = struct.Struct("@5q 3q 2d")
_GATED = struct.Struct("@2q 4q")
_ARGMAX = struct.Struct("@2q 3q")
_ROPE = struct.Struct(f"@7q 7q {PAGES} {PAGES}")
_ATTENTION = struct.Struct(f"@7q 6q 2d {PAGES} {PAGES}")
_DEQUANTISE = struct.Struct("@2q 6q")
_LOOK_UP = struct.Struct(f"@2q 3q {MATRIX}")


def _native() -> ctypes.CDLL:
    loaded = native_library.library()
    assert loaded is not None, "ask native_library.library() first, and use the torch reference where it is None"
    return loaded


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Packed | None = None) -> Tensor:
    """x [R, K] times weight [N, K] transposed, plus bias [N]. `packed` is the same weight, quicker to read."""
    x = x.contiguous()
    num_rows, depth = x.shape
    num_outputs, weight_depth = weight.shape
    assert weight_depth == depth, (x.shape, weight.shape)
    out = results.empty(num_rows, num_outputs)
    inputs = _address(x), 0 if bias is None else _address(bias, size=num_outputs)
    sizes = num_rows, num_outputs, depth, torch.get_num_threads()
    _native().linear(_LINEAR.pack(*inputs, out.data_ptr(), *sizes, *matrix_fields(weight, packed)))
    return out


def matrix_fields(weight: Tensor, packed: Packed | None) -> tuple[int, int, int, int, int]:
    """matrix of unpack.c: the weight, or its other form."""
    if packed is None:
        return _address(weight), 0, 0, 0, 0
    scales = 0 if packed.scales is None else packed.scales.data_ptr()
    return 0, packed.data.data_ptr(), scales, packed.kind, packed.shift


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [T, H] over its root mean square, times (weight [H] + offset)."""
    x = x.contiguous()
    num_rows, width = x.shape
    out = x.new_empty(num_rows, width)
    addresses = _address(x), 0, _address(weight, size=width), out.data_ptr(), 0
    _native().rms_norm(_NORM.pack(*addresses, num_rows, width, torch.get_num_threads(), eps, offset))
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of gate_up [T, 2I], times the second: [T, I]."""
    return _gated(gate_up, False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu (tanh form) of the first half of gate_up [T, 2I], times the second: [T, I]."""
    return _gated(gate_up, True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, double_width = gate_up.shape
    assert double_width % 2 == 0, gate_up.shape
    width = double_width // 2
    out = gate_up.new_empty(num_rows, width)
    _native().gated(_GATED.pack(_address(gate_up), out.data_ptr(), num_rows, width, gelu, torch.get_num_threads()))
    return out


def row_argmax(x: Tensor) -> Tensor:
    """The index of each row's first maximum, int64 [R]; NaN counts as minus infinity."""
    x = x.contiguous()
    num_rows, width = x.shape
    assert width > 0, x.shape
    out = x.new_empty(num_rows, dtype=torch.int64)
    _native().row_argmax(_ARGMAX.pack(_address(x), out.data_ptr(), num_rows, width, torch.get_num_threads()))
    return out


def rope_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    write_locations: Tensor,
) -> Tensor:
    """Rotate query [T, Hq, D] (returned, new) and key [T, Hk, D]; write key and value rows into their pages.

    cosine and sine are [T, R/2]: the first R dims rotate, in halves. A write location is
    page * page_size + offset, int64 [T]; a negative one writes nothing. query, key and value may be slices of one
    fused tensor: only their last two dimensions must be dense."""
    num_rows, num_heads, dim = query.shape
    num_angles, half = cosine.shape
    keys, values = page_view(key_pages), page_view(value_pages)
    assert num_angles == num_rows, (cosine.shape, query.shape)
    assert 2 * half <= dim == keys[5], (cosine.shape, query.shape, key_pages.shape)
    assert keys[3] == values[3], (key_pages.shape, value_pages.shape)
    out = query.new_empty(num_rows, num_heads, dim)
    work = _ROPE.pack(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        _address(cosine),
        _address(sine, size=num_rows * half),
        _address(write_locations, torch.int64, num_rows),
        out.data_ptr(),
        num_rows,
        _row_stride(query, num_rows, num_heads, dim),
        _row_stride(key, num_rows, *keys[4:6]),
        _row_stride(value, num_rows, *values[4:6]),
        num_heads,
        half,
        torch.get_num_threads(),
        *keys,
        *values,
    )
    _native().rope_write(work)
    return out


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    indices: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    first_key: int = 0,
    last_key: Tensor | None = None,
) -> Tensor:
    """Attention of query [T, Hq, D] over key_pages [P, page, Hk, D] and value_pages [P, page, Hk, Dv]: [T, Hq, Dv].

    Request b owns rows query_start[b] to query_start[b+1] (int32 [B+1]) and the pages page_table[b] (int32 [B, M]). Row
    t attends to cache indices first_key to indices[t] (int64 [T]), or to last_key[t] where given, both included, and
    with a window only to the last `window` up to indices[t]. A row with no keys gives zeros. sinks [Hq] are logits that
    take weight and bring no value."""
    query = query.contiguous()
    num_rows, num_heads, dim = query.shape
    keys, values = page_view(key_pages), page_view(value_pages)
    num_requests, table_width = page_table.shape
    assert keys[3:5] == values[3:5], (key_pages.shape, value_pages.shape)
    assert keys[5] == dim, (query.shape, key_pages.shape)
    assert num_heads % keys[4] == 0, (query.shape, key_pages.shape)
    out = query.new_empty(num_rows, num_heads, values[5])
    work = _ATTENTION.pack(
        _address(query),
        0 if sinks is None else _address(sinks, size=num_heads),
        _address(page_table, torch.int32),
        _address(query_start, torch.int32, num_requests + 1),
        _address(indices, torch.int64, num_rows),
        0 if last_key is None else _address(last_key, torch.int64, num_rows),
        out.data_ptr(),
        num_requests,
        table_width,
        num_heads,
        first_key,
        window,
        torch.get_num_threads(),
        scale,
        softcap,
        *keys,
        *values,
    )
    _native().paged_attention(work)
    return out


def dequantise(blocks: Blocks, out: Tensor, num_heads: int = 0) -> None:
    """Rows of GGUF blocks as floats [N, K] in `out`. With num_heads, rows lie in the interleaved pairs of rotary
    dimensions, and are written in halves."""
    num_rows, row_bytes = blocks.data.shape
    assert out.shape == (num_rows, blocks.row_len), (out.shape, blocks.data.shape, blocks.row_len)
    assert num_heads == 0 or num_rows % (2 * num_heads) == 0, (out.shape, num_heads)
    addresses = _address(blocks.data, torch.uint8), _address(out)
    sizes = blocks.type_number, num_rows, blocks.row_len, row_bytes, num_heads, torch.get_num_threads()
    _native().dequantise(_DEQUANTISE.pack(*addresses, *sizes))


def look_up(weight: Tensor, packed: Packed | None, ids: Tensor) -> Tensor:
    """Rows of a matrix [N, K] by number, whatever form it is kept in: ids [...] -> floats [..., K]."""
    rows, depth = ids.flatten().contiguous(), weight.shape[1]
    out = torch.empty(len(rows), depth, dtype=torch.float32, device="cpu")
    addresses = _address(rows, torch.int64), out.data_ptr()
    sizes = len(rows), depth, torch.get_num_threads()
    _native().look_up(_LOOK_UP.pack(*addresses, *sizes, *matrix_fields(weight, packed)))
    return out.view(*ids.shape, depth)


def dense(weight: Tensor, packed: Packed | None) -> Tensor:
    """[N, K]: all of a matrix as floats."""
    return weight if packed is None else look_up(weight, packed, torch.arange(len(weight), device="cpu"))


# C sees addresses only: what it takes for granted is checked as they are taken.


def _address(tensor: Tensor, dtype: torch.dtype = torch.float32, size: int | None = None) -> int:
    as_taken = tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()
    assert as_taken, f"expected dense {dtype} on the CPU: {tensor.dtype}, {tensor.device}, strides {tensor.stride()}"
    assert size is None or tensor.numel() == size, (tensor.shape, size)
    return tensor.data_ptr()


def _row_stride(rows: Tensor, num_rows: int, num_heads: int, dim: int) -> int:
    """Of [T, heads, dim] whose rows may lie apart, but whose heads lie side by side."""
    row, head, last = rows.stride()
    as_taken = rows.dtype is torch.float32 and rows.is_cpu and last == 1 and (head == dim or num_heads == 1)
    assert as_taken, f"expected dense heads of float32 on the CPU: {rows.dtype}, {rows.device}, strides {rows.stride()}"
    assert rows.shape == (num_rows, num_heads, dim), (rows.shape, num_rows, num_heads, dim)
    return row


def page_view(pages: Tensor) -> tuple[int, int, int, int, int, int, int]:
    """page_view of rows.c; pages [P, page, heads, dim] of float32 or float16, and their rows, may lie apart, each row
    must be dense."""
    _, page_size, num_heads, dim = pages.shape
    stride, halves = pages.stride(), pages.dtype is torch.float16
    is_dense = stride[3] == 1 and (stride[2] == dim or num_heads == 1)
    as_taken = (halves or pages.dtype is torch.float32) and pages.is_cpu and is_dense
    assert as_taken, f"expected dense rows on the CPU: {pages.dtype}, {pages.device}, strides {stride}"
    return pages.data_ptr(), stride[0], stride[1], page_size, num_heads, dim, int(halves)
