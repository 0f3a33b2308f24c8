"""Kernels as a GPU's compiler sees them: an interpreter does not mind that a name has one type in one branch, and
another in the other. Nothing is run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")
CODE = """
import sys
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.kernels.gpu import attention, attention_work, rope

NUMBERS = {"scale", "softcap", "value_scale", "eps", "offset", "v_eps", "v_offset", "key_inverse", "value_inverse"}
POINTERS = {"q", "k", "v", "out", "sinks", "q_weight", "k_weight", "v_weight", "k_pages", "v_pages"}
POINTERS = dict.fromkeys(POINTERS, "*bf16") | dict.fromkeys(("cos", "sin", "partial", "maxima", "sums"), "*fp32")
POINTERS |= dict.fromkeys(("items", "counters", "page_table"), "*i32")
POINTERS |= dict.fromkeys(("locations", "indices", "last_keys"), "*i64")
KERNELS = {
    rope._rope_write: dict(
        NORM=True, WIDE=False, V_NORM=False, V_WIDE=False, HEADS=2, BLOCK_HALF=16, BLOCK_REST=16, BLOCK_VALUE=32,
        EARLY=True,
    ),
    attention._attend: dict(
        PAGE=16, WIDE=False, ITEM=attention_work.ITEM, SPLIT=True, GROUP=4, WINDOW=0, HAS_LAST=False, HAS_SINKS=True,
        SOFTCAP=False, DIM=64, MAIN=64, REST=0, VALUE=64, SAME=False, BLOCK_VALUE=64, BLOCK_M=64, BLOCK_N=32,
        IEEE=False, LANES=16, WARPS=4, EARLY=True,
    ),
}
pages = sys.argv[1]
for kernel, constants in KERNELS.items():
    types = POINTERS | {"k_pages": f"*{pages}", "v_pages": f"*{pages}"} | dict.fromkeys(NUMBERS, "fp32")
    names = kernel.arg_names
    constants |= {name: False for name in names if name.isupper() and name not in constants}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    compile(ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__)
"""


@pytest.mark.parametrize("pages", ["bf16", "fp8e4nv"])
def test_pages_of_any_type_compile(pages: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", CODE, pages], capture_output=True, text=True, timeout=120, env=environment
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["_rope_write", "_attend"]


FEW_ROWS = """
import re
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.kernels.gpu import attention, attention_work

kernel, (rows, dim, is_latent) = attention._attend, map(int, sys.argv[1:])
constants = dict(
    PAGE=16, ITEM=attention_work.ITEM, GROUP=4, WINDOW=90, HAS_SINKS=True, SOFTCAP=True, DIM=dim, MAIN=dim // 64 * 64,
    REST=dim % 64, VALUE=dim // 64 * 64, SAME=bool(is_latent), BLOCK_VALUE=dim // 64 * 64, BLOCK_M=rows, BLOCK_N=64,
    LANES=4, WARPS=4, EARLY=True,
)
names = kernel.arg_names
constants |= {name: False for name in names if name.isupper() and name not in constants}
types = dict.fromkeys(("q", "out", "sinks"), "*bf16") | dict.fromkeys(("partial", "maxima", "sums"), "*fp32")
types |= dict.fromkeys(("items", "counters", "page_table"), "*i32") | {"indices": "*i64", "last_keys": "*i64"}
types |= dict.fromkeys(("scale", "softcap", "value_scale"), "fp32") | {"k_pages": "*fp8e4nv", "v_pages": "*fp8e4nv"}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
whole = [name for name in names if name.endswith(("_row", "_head", "_pages")) or name == "q"]
hints = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
source = ASTSource(kernel, signature, constexprs=values, attrs=hints)
made = compile(source, target=GPUTarget("cuda", 90, 32))
code = made.asm["ptx"]
if rows < 64 and not is_latent:  # what is widened pair by pair must have neighbours of a row side by side
    (line,) = {each for each in made.asm["ttgir"].splitlines() if "e4m3x2 $0, first" in each}
    layout = re.search(r"i16, (#\\w+)>", line)[1]
    assert re.search(layout + r" = .*register = \\[\\[0, 1\\]", made.asm["ttgir"]), line
for name in ("cvt.rn.f16x2.e4m3x2", "f32.f16.f16", "cp.async.cg.shared.global"):
    assert name in code, name
if rows < 64:
    assert "prmt.b32 t," in code and ".trans.shared" in code
    assert "ld.shared.b8" not in code and "ld.shared.u8" not in code, "numbers that are read one by one"
"""


@pytest.mark.parametrize(("rows", "dim", "is_latent"), [(16, 128, 0), (32, 128, 0), (16, 144, 1), (64, 64, 0)])
def test_pages_in_fp8_are_widened_in_pairs(rows: int, dim: int, is_latent: int) -> None:
    """Two numbers an instruction, straight to float16; and numbers of a few rows' keys go through shared memory in
    words, whose matrices it can turn."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", FEW_ROWS, str(rows), str(dim), str(is_latent)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]


LONE_ROWS = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.kernels.gpu import attention_work, lone_rows

kernel, (keys, warps, dim, slices, lanes) = lone_rows._attend_rows, map(int, sys.argv[1:])
value = dim // 64 * 64 // slices
constants = dict(
    PAGE=16, ITEM=attention_work.ITEM, GROUP=3, WINDOW=90, HAS_SINKS=True, SOFTCAP=True, DIM=dim, MAIN=dim // 64 * 64,
    REST=dim % 64, VALUE=value, SLICES=slices, BLOCK_VALUE=value, BLOCK_M=max(lanes, 16), BLOCK_N=keys, LOOP_N=64,
    LANES=lanes, PIECE=4 if lanes == 4 else 2, AHEAD=True, SIGNALS=True, SEVERAL=lanes > 4, EARLY=True,
)
names = kernel.arg_names
constants |= {name: False for name in names if name.isupper() and name not in constants}
types = dict.fromkeys(("q", "out", "sinks", "k_pages", "v_pages"), "*bf16")
types |= dict.fromkeys(("partial", "maxima", "sums"), "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
types |= dict.fromkeys(("items", "counters", "page_table"), "*i32") | {"value_scale": "fp32"}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
whole = [name for name in names if name.endswith(("_row", "_head", "_pages")) or name == "q"]
hints = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
source = ASTSource(kernel, signature, constexprs=values, attrs=hints)
code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
before, after = code.split("griddepcontrol.wait", 1)
assert before.count("ld.global.v4") >= keys * (dim + value) // (8 * 32 * warps), "keys that are asked for late"
assert "griddepcontrol.launch_dependents" in after
"""


@pytest.mark.parametrize(
    ("keys", "warps", "dim", "slices", "lanes"),
    [
        (64, 4, 128, 1, 4),
        (32, 8, 256, 2, 4),
        (32, 8, 544, 4, 4),
        (32, 4, 256, 1, 16),
        (64, 4, 64, 1, 16),
        (64, 4, 128, 1, 16),
        (128, 8, 256, 2, 32),
        (64, 8, 544, 4, 32),
    ],
)
def test_single_rows_ask_for_keys_before_they_wait(keys: int, warps: int, dim: int, slices: int, lanes: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LONE_ROWS, *map(str, (keys, warps, dim, slices, lanes))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]


FEW_BITS = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.kernels.gpu import sliced, wide

POINTERS = dict.fromkeys(("x", "scale", "offset", "bias", "residual", "out"), "*bf16") | {"data": "*i16"}
SLICED = dict(EVEN=True, HAS_SCALE=True, FAST=True, SLICES=4, BLOCK_M=8, STAGES=3, EARLY=True)
WIDE = dict(EVEN=True, FAST=True, BLOCK_M=16, BLOCK_N=64, SPLIT=1, STAGES=3, EARLY=True)
FORMS = [
    (sliced._linear, SLICED | dict(KIND=0, PART=32, GROUP=128, BLOCK_N=16)),
    (sliced._linear, SLICED | dict(KIND=0, PART=32, GROUP=128, BLOCK_N=32, GATED=1, MANY=True)),
    (sliced._linear, SLICED | dict(KIND=0, PART=32, GROUP=128, BLOCK_N=64, MANY=True)),
    (sliced._linear, SLICED | dict(KIND=1, PART=32, GROUP=128, BLOCK_N=32, HAS_OFFSET=True)),
    (sliced._linear, SLICED | dict(KIND=4, PART=64, GROUP=0, BLOCK_N=16)),
    (wide._wide, WIDE | dict(KIND=0, PART=32, GROUP=128)),
    (wide._wide, WIDE | dict(KIND=1, PART=32, GROUP=128, HAS_OFFSET=True)),
    (wide._wide, WIDE | dict(KIND=4, PART=64, GROUP=0)),
]
for kernel, constants in FORMS:
    names = kernel.arg_names
    constants |= {name: False for name in names if name.isupper() and name not in constants}
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    made = compile(
        ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    if kernel is wide._wide and constants["KIND"] < 2:
        assert made.asm["ptx"].count("wgmma.wait_group") == 1, "a run is waited for more than once"
    print(kernel.__name__)
"""


def test_products_with_few_bits_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", FEW_BITS], capture_output=True, text=True, timeout=300, env=environment
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert len(found.stdout.split()) == 8


PROMPTS = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from outrider.kernels.gpu import attention_work, prompt_attention

dim, kernel = int(sys.argv[1]), prompt_attention._attend_prompts
constants = dict(
    PAGE=16, ITEM=attention_work.ITEM, GROUP=4, WINDOW=90, HAS_SINKS=True, SOFTCAP=True, DIM=dim,
    BLOCK_N=prompt_attention.BLOCK_N, STAGES=prompt_attention.STAGES, SPARED=prompt_attention.SPARED,
)
types = dict.fromkeys(("items", "others", "counters", "tickets", "page_table"), "*i32") | {"indices": "*i64"}
types |= dict.fromkeys(("sinks", "out"), "*bf16") | dict.fromkeys(("partial", "maxima", "sums"), "*fp32")
types |= dict.fromkeys(("scale", "softcap", "value_scale"), "fp32")
flat, deep = prompt_attention._swizzled(2), prompt_attention._swizzled(3)
types |= dict.fromkeys(("k_rows", "v_rows"), f"tensordesc<bf16[16, 64],{flat!r}>")
types["q_rows"] = f"tensordesc<bf16[16, 4, 64],{deep!r}>"
names = kernel.arg_names
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
made = compile(GluonASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
code = made.asm["ptx"]
for name in ("wgmma.mma_async", "setmaxnreg.inc", "cp.async.bulk.tensor.2d", "mbarrier.try_wait"):
    assert name in code, name
"""


@pytest.mark.parametrize("dim", [64, 128])
def test_prompts_compile_for_hopper(dim: int) -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", PROMPTS, str(dim)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert found.returncode == 0, found.stderr[-2000:]


HELD = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from outrider.kernels.gpu import dense_held
from outrider.kernels.gpu.dense_held import Spread

rows, columns, inner, gated = map(int, sys.argv[1:])
form = dense_held.form_for(rows, columns, inner, gated)
kernel = dense_held._one_row if isinstance(form, Spread) else dense_held._few_rows
constants = {name.upper(): value for name, value in vars(form).items()}
constants |= dict(INNER=inner, GATED=gated, HAS_BIAS=True, HAS_RESIDUAL=not gated, EARLY=True)
warps = form.beside * form.sharing if isinstance(form, Spread) else form.warps
names = kernel.arg_names
constants = {name: value for name, value in constants.items() if name in names}
types = dict.fromkeys(("x", "weight", "bias", "residual", "out"), "*bf16")
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
hints = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in types or name == "x_stride"}
source = GluonASTSource(kernel, signature, constexprs=values, attrs=hints)
code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
before, after = code.split("griddepcontrol.wait", 1)
assert "griddepcontrol.launch_dependents" in after
if rows == 1:
    steps = -(-inner // (256 * form.sharing))
    asked = steps * form.outputs * (2 if gated else 1)
    assert before.count("ld.global.v4") == asked, (before.count("ld.global.v4"), asked)
else:
    assert before.count("cp.async.cg.shared.global") >= form.stages - 1, "weights that are asked for late"
    assert "ldmatrix" in after and "mma.sync" in after
"""


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "gated"),
    [(1, 4096, 2560, 0), (1, 10240, 2560, 2), (1, 2560, 10240, 0), (1, 1536, 8960, 0), (1, 14336, 4096, 1),
     (6, 4096, 2560, 0), (6, 5120, 2048, 0), (2, 2048, 1024, 0), (8, 2560, 2048, 0)],
)  # fmt: skip
def test_weights_of_few_rows_are_asked_for_before_the_input_is_there(
    rows: int, columns: int, inner: int, gated: int
) -> None:
    pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", HELD, *map(str, (rows, columns, inner, gated))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]


NORM = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.kernels.gpu.norm import _rms_norm

constants = dict(HAS_WEIGHT=True, HAS_RESIDUAL=True, WIDE=True, HAS_NEXT=True, NEXT_WIDE=True, BLOCK=4096, EARLY=True)
names = _rms_norm.arg_names
types = dict.fromkeys(("x", "weight", "residual", "next_weight", "out", "next_out"), "*bf16")
types |= dict.fromkeys(("eps", "offset", "next_eps", "next_offset"), "fp32")
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
source = ASTSource(_rms_norm, signature, constexprs=values)
code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
before, after = code.split("griddepcontrol.wait", 1)
assert "ld.global" in before, "the norms' weights"
reads, sums = after.split("bar.sync", 1)
assert "ld.global" in reads and "ld.global" not in sums, "memory is waited for behind a sum"
"""


def test_norms_wait_for_memory_once() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", NORM], capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
