"""A mixture's router, and its experts of one row and of a few, as a GPU's compiler sees them. Nothing is run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")
CODE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.kernels.gpu import few_experts, gates, lone_experts, router

TYPES = dict.fromkeys(("x", "weight", "bias"), "*bf16") | dict.fromkeys(("norm", "logits", "shares"), "*fp32")
TYPES |= dict.fromkeys(("counter", "ids"), "*i32") | {"out": "*bf16"}
TYPES |= {"data": "*bf16", "residual": "*bf16"}
TYPES |= {"scale": "*fp32", "offset": "fp32"}
TYPES |= dict.fromkeys(("norm_offset", "eps", "alpha", "limit"), "fp32")
KERNELS = [
    (router._route, dict(
        NORM=False, HAS_BIAS=True, ROUND=True, RENORMALISE=True, BLOCK_N=2, BLOCK_K=2048, BLOCK_M=8, BLOCK=128,
        EARLY=True,
    ), 8),
    (router._softmax_top, dict(RENORMALISE=False, BLOCK_M=8, BLOCK=128, EARLY=True), 8),
    (lone_experts._up, dict(
        GATE=gates.SILU, TWO=True, HAS_BIAS=True, NORM=True, BLOCK_N=8, BLOCK_K=256, PIECES=8, EVEN=True, EARLY=True,
    ), 4),
    (few_experts._chosen, dict(
        KIND=5, PART=128, GROUP=0, EVEN=True, POWERS=False, HAS_SCALE=False, HAS_OFFSET=False, GATE=gates.SILU,
        TWO=True, HAS_BIAS=False, NORM=True, IEEE=False, FAST=True, SLICES=4, BLOCK_M=8, BLOCK_N=16, BLOCK_P=64,
        STAGES=3, KNOWN=False, EARLY=True,
    ), 4),
    (few_experts._chosen, dict(
        KIND=5, PART=128, GROUP=0, EVEN=True, POWERS=False, HAS_SCALE=False, HAS_OFFSET=False, GATE=gates.NONE,
        TWO=False, HAS_BIAS=False, NORM=False, IEEE=False, FAST=True, SLICES=2, BLOCK_M=8, BLOCK_N=32, BLOCK_P=64,
        STAGES=3, KNOWN=True, EARLY=True,
    ), 2),
    (lone_experts._down, dict(
        KIND=5, PART=128, GROUP=0, EVEN=True, POWERS=False, HAS_SCALE=False, HAS_OFFSET=False, HAS_BIAS=False,
        HAS_RESIDUAL=True, IEEE=False, FAST=True, EXPERTS=8, SPLIT=1, BLOCK_M=8, BLOCK_N=16, STAGES=4, KNOWN=True,
        EARLY=True,
    ), 4),
]
for kernel, constants, warps in KERNELS:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    even = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name not in constants}
    even = {place: value for place, value in even.items() if signature[names[place[0]]] != "fp32"}
    source = ASTSource(kernel, signature, constexprs=values, attrs=even)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    if constants.get("KNOWN"):
        assert "ld.global" in code.partition("griddepcontrol.wait")[0], "a choice that waits for the way up"
    print(kernel.__name__)
"""


def test_routers_and_experts_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["_route", "_softmax_top", "_up", "_chosen", "_chosen", "_down"]
