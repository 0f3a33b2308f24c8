"""CPU kernels in C: compiled by the system's compiler at first use, kept in the user's cache, called through ctypes.
A row's result never depends on the rows beside it, nor on the number of threads. Inference only: no gradients."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
# Contraction is off as the source writes its fused multiply-adds out; nothing here lets the compiler reorder a sum.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off")

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, list[type]] = {
    "outrider_linear": [_POINTER] * 4 + [_LONG] * 3 + [_INT],
    "outrider_rms_norm": [_POINTER] * 5 + [_LONG] * 2 + [_FLOAT] * 2 + [_INT],
    "outrider_gated": [_POINTER] * 2 + [_LONG] * 2 + [_INT] * 2,
    "outrider_row_argmax": [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "outrider_rope_write": [ctypes.c_char_p, _INT],
    "outrider_paged_attention": [ctypes.c_char_p, _INT],
}
# The two work structures of native.c: eight bytes a field, and packing is quicker than a ctypes.Structure.
_ROPE_WORK = struct.Struct("@7q 7q 5q 5q")
_ATTENTION_WORK = struct.Struct("@7q 5q 2d 5q 5q")


# ---- build and load ----


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with one warning) where they cannot be had."""
    try:
        loaded = ctypes.CDLL(str(build(cache_directory())))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        warnings.warn(
            "Outrider's native CPU kernels are not available, so the slower torch ones are used and a row's result may "
            f"depend on its batch. Remedy: install a C compiler (gcc) as `cc`. Reason: {detail}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def build(directory: Path) -> Path:
    """Compile native.c into the directory unless this source, compiler and processor have met there before."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler on the path")
    runtime = openmp_runtime()
    target = directory / f"native-{_fingerprint(compiler, runtime)}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=directory) as workplace:
        compiled, linked = Path(workplace, "native.o"), Path(workplace, "native.so")
        _call(compiler, *FLAGS, _processor_flag(), *_openmp_flags(), "-c", str(SOURCE), "-o", str(compiled))
        # Linked without -fopenmp, which would bring a second runtime with a thread pool of its own.
        runtime_flags = [str(runtime), f"-Wl,-rpath,{runtime.parent}"] if runtime else ["-fopenmp"]
        _call(compiler, "-shared", str(compiled), *runtime_flags, "-lm", "-o", str(linked))
        os.replace(linked, target)  # atomic: of several processes that build at once, any may win
    return target


def cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(root) if root else Path.home() / ".cache") / "outrider"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError:
        writable = False
    return directory if writable else Path(tempfile.mkdtemp(prefix="outrider-"))


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded: with the same one, torch and these kernels share their threads."""
    home = Path(torch.__file__).parent
    bundled = [path for folder in ("lib", "../torch.libs") for path in sorted((home / folder).glob("lib*omp*"))]
    maps = Path("/proc/self/maps")
    if maps.exists():
        files = {Path(line.split()[-1]) for line in maps.read_text().splitlines() if "/" in line}
        loaded = sorted(path for path in files if path.name.startswith(("libgomp", "libomp", "libiomp")))
        bundled = [path for path in loaded if path.is_relative_to(home.parent)] or loaded
    return bundled[0].resolve() if bundled else None


def _fingerprint(compiler: str, runtime: Path | None) -> str:
    # The predefined macros name the compiler's version and every extension of this processor.
    macros = _call(compiler, *FLAGS, _processor_flag(), "-dM", "-E", "-x", "c", os.devnull)
    parts = (SOURCE.read_text(), " ".join(FLAGS), compiler, macros, str(runtime))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def _openmp_flags() -> tuple[str, ...]:
    return ("-Xpreprocessor", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def _native() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "ask native.library() first, and use the torch reference where it is None"
    return loaded


# ---- the kernels ----


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, K] times weight [N, K] transposed, plus bias [N]."""
    x = x.contiguous()
    num_rows, depth = x.shape
    num_outputs = weight.shape[0]
    assert weight.shape[1] == depth, (x.shape, weight.shape)
    assert bias is None or bias.shape[0] == num_outputs
    _check(x, weight, bias)
    out = torch.empty(num_rows, num_outputs)
    _native().outrider_linear(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        num_outputs,
        depth,
        torch.get_num_threads(),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [T, H] over its root mean square, times (weight [H] + offset)."""
    x = x.contiguous()
    num_rows, width = x.shape
    assert weight.shape[0] == width, (x.shape, weight.shape)
    _check(x, weight)
    out = torch.empty(num_rows, width)
    _native().outrider_rms_norm(
        x.data_ptr(),
        None,
        weight.data_ptr(),
        out.data_ptr(),
        None,
        num_rows,
        width,
        eps,
        offset,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both new; all [T, H]."""
    x, residual = x.contiguous(), residual.contiguous()
    num_rows, width = x.shape
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert weight.shape[0] == width, (x.shape, weight.shape)
    _check(x, residual, weight)
    out, total = torch.empty(num_rows, width), torch.empty(num_rows, width)
    _native().outrider_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        num_rows,
        width,
        eps,
        offset,
        torch.get_num_threads(),
    )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of gate_up [T, 2I], times the second: [T, I]."""
    return _gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu (tanh form) of the first half of gate_up [T, 2I], times the second: [T, I]."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, double_width = gate_up.shape
    assert double_width % 2 == 0, gate_up.shape
    _check(gate_up)
    out = torch.empty(num_rows, double_width // 2)
    threads = torch.get_num_threads()
    _native().outrider_gated(gate_up.data_ptr(), out.data_ptr(), num_rows, double_width // 2, gelu, threads)
    return out


def row_argmax(x: Tensor) -> Tensor:
    """The index of each row's first maximum, int64 [R]; NaN counts as minus infinity."""
    x = x.contiguous()
    assert x.shape[1] > 0, x.shape
    _check(x)
    out = torch.empty(x.shape[0], dtype=torch.int64)
    _native().outrider_row_argmax(x.data_ptr(), out.data_ptr(), *x.shape, torch.get_num_threads())
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
    interleaved: bool = False,
) -> Tensor:
    """Rotate query [T, Hq, D] (returned, new) and key [T, Hk, D]; write key and value rows into their pages.

    cosine and sine are [T, R/2]: the first R dims rotate, in halves or in interleaved pairs. A write location is
    page * page_size + offset, int64 [T]; a negative one writes nothing. query, key and value may be slices of one
    fused tensor: only their last two dimensions must be dense."""
    num_rows, num_heads, head_dim = query.shape
    half = cosine.shape[1]
    assert cosine.shape == sine.shape == (num_rows, half), (cosine.shape, sine.shape)
    assert 2 * half <= head_dim == key.shape[2], (half, query.shape, key.shape)
    assert key.shape == (num_rows, *key_pages.shape[2:]), (key.shape, key_pages.shape)
    assert value.shape == (num_rows, *value_pages.shape[2:]), (value.shape, value_pages.shape)
    assert value_pages.shape[1] == key_pages.shape[1], (key_pages.shape, value_pages.shape)
    assert write_locations.shape[0] == num_rows, write_locations.shape
    _check(cosine, sine)
    _check(write_locations, dtype=torch.int64)
    out = torch.empty(num_rows, num_heads, head_dim)
    work = _ROPE_WORK.pack(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        cosine.data_ptr(),
        sine.data_ptr(),
        write_locations.data_ptr(),
        out.data_ptr(),
        num_rows,
        _row_stride(query),
        _row_stride(key),
        _row_stride(value),
        num_heads,
        half,
        interleaved,
        *_page_fields(key_pages),
        *_page_fields(value_pages),
    )
    _native().outrider_rope_write(work, torch.get_num_threads())
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
    block_end: Tensor | None = None,
) -> Tensor:
    """Attention of query [T, Hq, D] over key_pages [P, page, Hk, D] and value_pages [P, page, Hk, Dv]: [T, Hq, Dv].

    Request b owns rows query_start[b] to query_start[b+1] (int32 [B+1]) and the pages page_table[b] (int32 [B, M]). Row
    t attends to cache indices first_key to indices[t] (int64 [T]), or to block_end[t] where given, both included, and
    with a window only to the last `window` up to indices[t]. A row with no keys gives zeros. sinks [Hq] are logits that
    take weight and bring no value."""
    query = query.contiguous()
    num_rows, num_heads, head_dim = query.shape
    page_size, num_key_heads = key_pages.shape[1:3]
    assert num_heads % num_key_heads == 0, (query.shape, key_pages.shape)
    assert key_pages.shape[3] == head_dim, (query.shape, key_pages.shape)
    assert value_pages.shape[1:3] == (page_size, num_key_heads), (key_pages.shape, value_pages.shape)
    assert query_start.shape[0] == page_table.shape[0] + 1, (query_start.shape, page_table.shape)
    assert indices.shape[0] == num_rows, (indices.shape, query.shape)
    assert sinks is None or sinks.shape[0] == num_heads
    _check(query, sinks)
    _check(page_table, query_start, dtype=torch.int32)
    _check(indices, block_end, dtype=torch.int64)
    out = torch.empty(num_rows, num_heads, value_pages.shape[3])
    work = _ATTENTION_WORK.pack(
        query.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        page_table.data_ptr(),
        query_start.data_ptr(),
        indices.data_ptr(),
        0 if block_end is None else block_end.data_ptr(),
        out.data_ptr(),
        *page_table.shape,
        num_heads,
        first_key,
        window,
        scale,
        softcap,
        *_page_fields(key_pages),
        *_page_fields(value_pages),
    )
    _native().outrider_paged_attention(work, torch.get_num_threads())
    return out


def _check(*tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> None:
    """C sees addresses only: what it takes for granted is checked here."""
    for tensor in tensors:
        if tensor is not None:
            assert tensor.dtype is dtype, f"{tensor.dtype} where the native kernels take {dtype}"
            assert tensor.is_cpu, tensor.device
            assert tensor.is_contiguous(), tensor.stride()


def _row_stride(rows: Tensor) -> int:
    """Of [T, heads, dim] whose rows may lie apart, but whose heads lie side by side."""
    row, head, last = rows.stride()
    assert rows.dtype is torch.float32, rows.dtype
    assert rows.is_cpu, rows.device
    assert last == 1, rows.stride()
    assert head == rows.shape[2] or rows.shape[1] == 1, rows.stride()
    return row


def _page_fields(pages: Tensor) -> tuple[int, int, int, int, int]:
    """page_view of native.c; pages [P, page, heads, dim] may lie apart, each must be dense."""
    _, page_size, num_heads, dim = pages.shape
    stride = pages.stride()
    assert pages.dtype is torch.float32, pages.dtype
    assert pages.is_cpu, pages.device
    assert stride[1:] == (num_heads * dim, dim, 1), stride
    return pages.data_ptr(), stride[0], page_size, num_heads, dim
