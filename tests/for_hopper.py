"""Gluon's kernels as the compiler of a Hopper makes them, on any machine: nothing is run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def made(kernel: Any, constants: dict[str, Any], types: dict[str, str], odd: Collection[str]) -> Any:
    """Other arguments than those that `types` names are whole numbers; all but `odd` ones are multiples of 16."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    even = [name for name in names if name not in constants and name not in odd]
    whole = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = GluonASTSource(kernel, signature, values, whole)
    options = {"num_warps": constants["WARPS"], "launch_pdl": True}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assert_all_compile(code: str, forms: Sequence[str]) -> None:
    """`code` makes each of the forms that it is given, and prints those that are as they should be. In a process of its
    own: in this one Triton may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", code, *forms], capture_output=True, text=True, timeout=300, env=environment
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == list(forms)
