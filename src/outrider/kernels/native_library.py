"""The CPU kernels in C as a library: compiled by the system's compiler at first use, kept in the user's cache. It is
native.py that calls what is in it."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("native.c")
SOURCES = sorted(SOURCE.parent.glob("*.c"))  # native.c includes the others
# Contraction is off as the source writes its fused multiply-adds out; nothing here lets the compiler reorder a sum.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off")
_OPERATIONS = (
    "linear",
    "rms_norm",
    "gated",
    "row_argmax",
    "draw",
    "logprobs",
    "add_bias",
    "restrict",
    "penalise",
    "rope_write",
    "paged_attention",
    "block",
    "stack",
    "chain",
    "experts",
    "mamba",
    "dequantise",
    "tile",
    "look_up",
    "lay_out",
    "judge",
    "write_outcome",
    "extension_rows",
    "keep_taps",
    "keep_missed",
    "shift_taps",
    "rows_ahead",
    "lookup",
)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (with one warning) where they cannot be had."""
    try:
        loaded = ctypes.CDLL(str(build(cache_directory())))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        warnings.warn(
            "Outrider's native CPU kernels are not available, so the slower torch ones are used and a row's result may "
            f"depend on its batch. Remedy: install a C compiler (gcc) as `cc`. Reason: {detail}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    for name in _OPERATIONS:
        function = loaded[f"outrider_{name}"]
        function.argtypes, function.restype = [ctypes.c_char_p], None
        setattr(loaded, name, function)
    return loaded


def build(directory: Path) -> Path:
    """Compile native.c into the directory unless this source, compiler and processor have met there before. A library
    that is not what was built, as a full disk leaves one, is built again: loading it would end the process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler on the path")
    runtime = openmp_runtime()
    target = directory / f"native-{_fingerprint(compiler, runtime)}.so"
    digest = target.with_suffix(".sha256")
    if _is_whole(target, digest):
        return target
    with tempfile.TemporaryDirectory(dir=directory) as workplace:
        compiled, linked = Path(workplace, "native.o"), Path(workplace, "native.so")
        _call(compiler, *FLAGS, _processor_flag(), *_openmp_flags(), "-c", str(SOURCE), "-o", str(compiled))
        # Linked without -fopenmp, which would bring a second runtime with a thread pool of its own.
        runtime_flags = [str(runtime), f"-Wl,-rpath,{runtime.parent}"] if runtime else ["-fopenmp"]
        _call(compiler, "-shared", str(compiled), *runtime_flags, "-lm", "-o", str(linked))
        written = Path(workplace, "native.sha256")
        written.write_text(_digest(linked))
        os.replace(linked, target)  # atomic: of several processes that build at once, any may win
        os.replace(written, digest)
    return target


def _is_whole(library: Path, digest: Path) -> bool:
    try:
        return digest.read_text() == _digest(library)
    except (OSError, UnicodeDecodeError):
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
    parts = (*(path.read_text() for path in SOURCES), " ".join(FLAGS), compiler, macros, str(runtime))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def _openmp_flags() -> tuple[str, ...]:
    return ("-Xpreprocessor", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
