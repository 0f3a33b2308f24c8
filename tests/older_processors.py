"""The native kernels as they are built for processors that can do less than this one."""

import platform
from pathlib import Path

import pytest

from outrider.kernels import native_library

MARCHES = ["x86-64-v3", "x86-64"]  # AVX2; no fused multiply-add


def use_older_processor(march: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    if platform.machine() != "x86_64":
        pytest.skip("other kinds of x86 are compared")
    if march == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX2 here")
    monkeypatch.setattr(native_library, "_processor_flag", lambda: f"-march={march}")
    monkeypatch.setattr(native_library, "FLAGS", (*native_library.FLAGS, "-O1"))
    monkeypatch.setattr(native_library, "cache_directory", lambda: directory)
    built = native_library.library.__wrapped__()
    assert built is not None
    monkeypatch.setattr(native_library, "library", lambda: built)
