"""Experts of a few rows in every form (`kernels/gpu/few_experts.py`), on one GPU in a minute, and how many experts
the rows of a round of EAGLE-3 choose between them.

    PYTHONPATH=src python scripts/h200/experts.py [SHAPE...]            of SHAPES; none: all
    PYTHONPATH=src python scripts/h200/experts.py choices [SHAPE...]    random weights, K = 5, layer by layer

Six rows, whose experts are drawn independently or from twice as many as one row takes, and one row. Every form is
checked against torch, then timed in CUDA graphs over other experts each time, in two copies of the weights. A line: how
many experts are read, us of reading them once, then every form from the fastest on: columns . slices . stages .
programs (as many times as a row has experts; 0: one for every pair); h, MXFP4 in registers (held_experts.py): tiles of
16 outputs . warps . stages . programs . registers; s, one after the other (streamed_experts.py): warps . neighbouring
inputs . stages . programs of a multiprocessor; `rows`: every row reads its own; `now`: few_experts.py's own.
`SMOKE=1 TRITON_INTERPRET=1`: on a CPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import SMOKE, attempt, free_memory, say
from lean import ACCEPT_LENGTH, CONTEXT, TINY, K, steady
from products import DEVICE, TERABYTES, timed
from torch import Tensor

from outrider.bench.random_pair import random_engine, shape_of
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.kernels.activation import Activation, ClampedSwish, silu_mul
from outrider.kernels.gpu import few_experts, lone_experts
from outrider.kernels.gpu.few_experts import Tile
from outrider.kernels.gpu.gates import gate_of
from outrider.kernels.gpu.sums import Operand, operand
from outrider.kernels.quantised import Kind, QuantisedStack, quantise
from outrider.layers import moe

KIND, ROWS, COPIES, DRAWS, COMPILERS = torch.float32 if SMOKE else torch.bfloat16, 6, 2, 8, 1 if SMOKE else 4
HELD = ["h4.4.1.16.168", "h4.4.2", "h2.4.1", "h2.4.2.16.128"]
STREAMED = {
    "up": ["s4.128.6", "s4.128.5", "s4.128.4.2", "s4.64.8", "s4.64.6.2", "s4.64.4.2", "s8.64.5", "s8.64.6"],
    "down": ["s4.64.8", "s4.64.12", "s4.128.6", "s4.32.16", "s8.32.8", "s8.64.5", "s2.128.8"],
}
WRONG = 0.02
MANY = 1024  # programs of a column: one for every pair


@dataclass(frozen=True)
class Shape:
    experts: int
    chosen: int
    hidden: int
    inner: int
    kind: Kind | None = None
    activation: Activation = silu_mul


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v2-lite": Shape(66, 8, 2048, 1408),  # two of them everybody's
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, Kind.FP4, ClampedSwish(1.702, 7.0)),
    "qwen3-30b-a3b-int4": Shape(128, 8, 2048, 768, Kind.INT4),
}
FORMS = {  # columns, slices, stages, programs (0: as many as pairs; n: n times as many as a row takes)
    False: ["16.4.3.0", "16.4.3.1", "16.4.3.2", "32.4.3.1", "32.4.3.2", "32.4.2.2", "16.4.4.2", "64.4.2.1", "32.2.3.2",
            "64.2.3.2", "16.2.4.2", "32.8.2.2", "16.8.2.2", "32.2.4.2", "64.4.2.2"],
    True: ["32.2.3.0", "32.2.3.1", "32.2.3.2", "32.2.3.4", "32.2.4.2", "32.4.3.2", "16.4.3.2", "64.2.3.2", "64.2.4.2",
           "32.1.4.2", "64.1.4.2", "32.4.2.2", "16.2.4.2", "64.4.2.1", "64.4.2.2"],
}  # fmt: skip
if SMOKE:
    SHAPES = {"tiny": Shape(6, 2, 64, 64), "tiny-fp4": Shape(6, 2, 64, 64, Kind.FP4)}
    FORMS, COPIES, DRAWS = {False: ["16.4.3.0", "16.2.3.1"], True: ["16.2.3.2"]}, 1, 2


def tile_of(form: str, shape: Shape) -> Tile:
    block_n, slices, stages, times = map(int, form.split("."))
    return Tile(block_n, slices, stages, times * shape.chosen or MANY)


def draws(shape: Shape, among: int, num_rows: int = ROWS) -> list[Tensor]:
    """Experts of some rows, drawn from so many."""
    generator, found = torch.Generator().manual_seed(among), []
    for _ in range(DRAWS):
        some = torch.randperm(shape.experts, generator=generator)[:among]
        rows = [some[torch.randperm(among, generator=generator)[: shape.chosen]] for _ in range(num_rows)]
        found.append(torch.stack(rows).int().to(DEVICE))
    return found


def stack(count: int, height: int, inner: int, kind: Kind | None) -> Tensor | QuantisedStack:
    weight = (torch.randn(count, height, inner, device=DEVICE) * inner**-0.5).to(KIND)
    if kind is None:
        return weight
    found = quantise(weight, kind)
    assert found is not None
    return QuantisedStack(found, count)


def products_of(weight: Tensor | QuantisedStack, ids: Tensor, rows: Tensor, per_row: int) -> Tensor:
    """[T * k, N] in float32: what each pair's expert makes of its row."""
    dense = weight if isinstance(weight, Tensor) else weight.dense(KIND)
    experts = ids.flatten().long()
    rows = rows.repeat_interleave(per_row, 0) if per_row > 1 else rows
    return torch.stack([dense[expert].float() @ row.float() for expert, row in zip(experts, rows, strict=True)])


def forms_of(shape: Shape, num_rows: int, part: str) -> list[str]:
    held = HELD if shape.kind is Kind.FP4 else STREAMED[part] if shape.kind is None else []
    held = [] if SMOKE else held
    if num_rows == 1:
        return ["now", *held, *(["rows"] if part == "down" else ["32.2.3.4"] if shape.kind is not None else [])]
    return ["now", *held, *FORMS[shape.kind is not None], *(["rows"] if part == "down" else [])]


def compare(name: str, shape: Shape) -> None:
    ups = [stack(shape.experts, 2 * shape.inner, shape.hidden, shape.kind) for _ in range(COPIES)]
    downs = [stack(shape.experts, shape.hidden, shape.inner, shape.kind) for _ in range(COPIES)]
    bytes_of = [each.nbytes if isinstance(each, Tensor) else each.num_bytes for each in (ups[0], downs[0])]
    for num_rows, among in ((1, shape.experts), (ROWS, shape.experts), (ROWS, 2 * shape.chosen)):
        chosen = draws(shape, among, num_rows)
        inputs = inputs_of(shape, num_rows)
        mean = sum(len(each.unique()) for each in chosen) / len(chosen)
        for part, stacks in (("up", ups), ("down", downs)):
            wanted = wanted_of(part, shape, inputs, stacks[0], chosen[0])
            run = partial(run_form, part, shape, inputs, [operand(each) for each in stacks], stacks)
            share = mean / shape.experts * bytes_of[part == "down"] / TERABYTES / 1e6
            line = f"{name} {part} of {num_rows}: {mean:.1f} of {shape.experts} experts, {share:.1f};"
            say(line + told(forms_of(shape, num_rows, part), shape, chosen, run, wanted))


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    inner: Tensor
    residual: Tensor
    shares: Tensor


def inputs_of(shape: Shape, num_rows: int) -> Inputs:
    x = torch.randn(num_rows, shape.hidden, device=DEVICE).to(KIND)
    inner = torch.randn(num_rows * shape.chosen, shape.inner, device=DEVICE).to(KIND)
    return Inputs(x, inner, torch.randn_like(x), torch.rand(num_rows, shape.chosen, device=DEVICE))


def wanted_of(part: str, shape: Shape, inputs: Inputs, weight: Tensor | QuantisedStack, ids: Tensor) -> Tensor:
    if part == "up":
        return shape.activation(products_of(weight, ids, inputs.x, shape.chosen).to(KIND))
    answers = products_of(weight, ids, inputs.inner, 1) * inputs.shares.to(KIND).flatten()[:, None]
    return answers.view(len(ids), shape.chosen, -1).sum(1) + inputs.residual.float()


def run_form(
    part: str,
    shape: Shape,
    inputs: Inputs,
    operands: Sequence[Operand],
    stacks: Sequence[Tensor | QuantisedStack],
    ids: Tensor,
    copy: int,
    form: str,
) -> Tensor:
    weight, whole = operands[copy], stacks[copy]
    given = (inputs.inner, ids, inputs.shares)
    if form[0] in "hs":
        module = importlib.import_module(f"outrider.kernels.gpu.{'held' if form[0] == 'h' else 'streamed'}_experts")
        tile = module.Tile(*map(int, form[1:].split(".")))
        if part == "up":
            return module.up(inputs.x, ids, whole, None, gate_of(shape.activation), tile)
        return module.down(*given, whole, None, inputs.residual, tile)
    tile = None if form in ("now", "rows") else tile_of(form, shape)
    if part == "up":
        if form == "now" and isinstance(whole, Tensor) and len(ids) == 1:
            return lone_experts.up(inputs.x, ids, whole, None, shape.activation)
        return few_experts.up(inputs.x, ids, weight, None, shape.activation, tile)
    if form == "rows" or (form == "now" and len(ids) <= few_experts.MAX_APART):
        return lone_experts.down(*given, weight, None, inputs.residual)
    return few_experts.down(*given, weight, None, inputs.residual, tile)


def told(
    forms: Sequence[str], shape: Shape, chosen: Sequence[Tensor], run: Callable[..., Tensor], wanted: Tensor
) -> str:
    found = []
    for form in forms:
        try:
            error = float((run(chosen[0], 0, form).float() - wanted.float()).abs().max() / wanted.float().abs().max())

            def once(number: int, form: str = form) -> Tensor:
                return run(chosen[number % len(chosen)], number % COPIES, form)

            us = timed(once, DRAWS * COPIES if DRAWS % COPIES else DRAWS)
        except Exception as failure:
            found.append((1e9, f"{form} {type(failure).__name__} {str(failure)[:60]}"))
            continue
        found.append((us, form if error < WRONG else f"{form} OFF BY {error:.3f}"))
    return "".join(f" {us:.1f} {form}" for us, form in sorted(found))


def compile_forms(name: str, part: int) -> None:
    """Every so many-th form once, in a process of its own."""
    shape = SHAPES[name]
    shape = replace(shape, experts=max(2 * shape.chosen, 8))
    up = stack(shape.experts, 2 * shape.inner, shape.hidden, shape.kind)
    down = stack(shape.experts, shape.hidden, shape.inner, shape.kind)
    for num_rows in (1, ROWS):
        ids, inputs = draws(shape, shape.experts, num_rows)[0], inputs_of(shape, num_rows)
        for which, weight in (("up", up), ("down", down)):
            for form in forms_of(shape, num_rows, which)[part::COMPILERS]:
                with suppress(Exception):  # told when it is timed
                    run_form(which, shape, inputs, [operand(weight)], [weight], ids, 0, form)


# how many experts a round's rows choose


def choices(name: str) -> None:
    speculative = SpeculativeConfig(
        method="eagle3", num_speculative_tokens=K, force=True, synthetic_acceptance_length=ACCEPT_LENGTH
    )
    config = EngineConfig(
        name, speculative, max_num_seqs=1, max_num_batched_tokens=8192, max_model_len=CONTEXT + 600,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = random_engine(config, TINY if SMOKE else shape_of(name))
    counts = torch.zeros(256, device=DEVICE, dtype=torch.int32)
    layers, whole, calls = [each for each in engine.target.modules() if isinstance(each, moe.Experts)], moe.experts, 0

    def spy(x: Any, ids: Tensor, *args: Any, **options: Any) -> Tensor:
        nonlocal calls
        if len(ids) == 1 + K:
            marks = torch.zeros(layers[0].shape.num_experts, device=ids.device, dtype=torch.int32)
            counts[calls % len(layers)].copy_(marks.scatter_(0, ids.flatten().long(), 1).sum())
            calls += 1
        return whole(x, ids, *args, **options)

    moe.experts = spy
    try:
        steady(engine, 1, CONTEXT, 10)
        found = counts[: len(layers)].tolist()
        say(f"{name}: six rows choose {sum(found) / max(len(found), 1):.1f} experts a layer: {found}")
    finally:
        moe.experts = whole
        engine.close()
        free_memory()


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["choices"]:
        for name in words[1:] or [each for each in SHAPES if not each.endswith("int4")]:
            attempt(name, partial(choices, name))
        return
    if words[:1] == ["--compile"]:
        compile_forms(words[1], int(words[2]))
        return
    names = words or list(SHAPES)
    jobs = [(name, str(part)) for name in names for part in range(COMPILERS)]
    running = [subprocess.Popen([sys.executable, __file__, "--compile", *job]) for job in jobs]
    for process in running:
        process.wait()
    say("compiled")
    for name in names:
        torch.manual_seed(0)
        attempt(name, partial(compare, name, SHAPES[name]))
        free_memory()


if __name__ == "__main__":
    main()
