"""Plain steps of one request with every form of single rows' attention (`kernels/gpu/lone_rows.py`), all layers,
recorded: a line for each shape and form, and the best of each shape. Batch 1, context 512.

    PYTHONPATH=src python scripts/h200/rows.py [SHAPE...]                 shapes: those of FORMS; none: all
    PYTHONPATH=src python scripts/h200/rows.py SHAPE:normed[:BATCH]...    products that norm; any shape of lean.py
    PYTHONPATH=src python scripts/h200/rows.py SHAPE:several[:BATCH]...   rounds of EAGLE-3: requests of six rows

As lean.py: every shape is a process, all of them compile side by side with a few layers (every second form in a process
of its own), then they are timed one after the other. A shape's engine is made once; between two forms only what is
recorded of steps is dropped. The first form (`attention.py` as it is) is timed again at the end, which says how much
figures stray. Every form is first compared with attention.py on random numbers. `SMOKE=1 TRITON_INTERPRET=1`: on a
CPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from common import BEGIN, SMOKE, attempt, say
from lean import (
    ACCEPT_LENGTH,
    CONTEXT,
    GO,
    GROUPS,
    NUM_CHUNKS,
    NUM_ROUNDS,
    READY,
    SHORT,
    WARM_UP,
    K,
    Measuring,
    Worker,
    steady,
)

from outrider.bench.random_pair import random_engine
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.kernels.gpu import attention, attention_work, lone_rows
from outrider.kernels.gpu.lone_rows import Rows
from outrider.layers import norm

USUAL = 8 if SMOKE else attention_work.WANTED_PROGRAMS  # an interpreter has no use for many
HALF = USUAL // 2
# by group of lean.py: heads, key heads, a head's size and a value's, and what is tried;
# a number: attention.py, with room for so many programs
FORMS: dict[str, tuple[tuple[int, int, int, int], Sequence[Rows | int]]] = {
    "llama-int4": (
        (32, 8, 128, 128),
        [
            USUAL,
            HALF,
            Rows(64, 4),
            Rows(64, 8),
            Rows(32, 4),
            Rows(128, 8),
            Rows(64, 8, num_programs=HALF),
            Rows(64, 4, signals=True),
            Rows(32, 4, signals=True),
            Rows(64, 8, signals=True),
        ],
    ),
    "gemma-3-4b": (
        (8, 4, 256, 256),
        [
            USUAL,
            HALF,
            Rows(32, 4),
            Rows(32, 8),
            Rows(64, 8),
            Rows(32, 4, signals=True),
            Rows(32, 4, num_programs=HALF, signals=True),
            Rows(64, 8, signals=True),
            Rows(32, 8, signals=True),
        ],
    ),
    "smollm2-135m": (
        (9, 3, 64, 64),
        [
            USUAL,
            HALF,
            Rows(64, 4),
            Rows(128, 4),
            Rows(128, 8),
            Rows(256, 8, least_keys=1024),
            Rows(64, 4, num_programs=HALF),
            Rows(64, 4, ahead=False),
            Rows(64, 4, signals=True),
        ],
    ),
    "deepseek-v2-lite": (
        (16, 1, 576, 512),
        [
            USUAL,
            HALF,
            Rows(64, 8, slices=4),
            Rows(64, 8, slices=8),
            Rows(32, 8, slices=8),
            Rows(64, 8, slices=8, num_programs=HALF),
            Rows(64, 8, slices=8, ahead=False),
            Rows(64, 8, slices=8, signals=True),
        ],
    ),
}


@dataclass(frozen=True)
class Normed:
    """Products norm rows of up to so many numbers together themselves: `norm.MOST_NUMBERS`."""

    most_numbers: int


@dataclass(frozen=True)
class Several:
    """A round of EAGLE-3, where requests of several rows are read so by lone_rows.py."""

    form: Rows | None  # None: by attention.py


# by a head's size
SEVERAL_FORMS = {
    64: [
        Several(None),
        Several(Rows(64, 8, signals=True)),
        Several(Rows(64, 8, lanes=16, signals=True)),
        Several(Rows(64, 4, lanes=16, signals=True)),
        Several(Rows(128, 8, lanes=16, signals=True)),
    ],
    128: [
        Several(None),
        Several(Rows(64, 4, signals=True)),
        Several(Rows(64, 8, signals=True)),
        Several(Rows(64, 4, lanes=16, signals=True)),
        Several(Rows(64, 8, lanes=16, signals=True)),
        Several(Rows(32, 4, lanes=16, signals=True)),
        Several(Rows(64, 4, lanes=16)),
    ],
    256: [
        Several(None),
        Several(Rows(64, 8, signals=True)),
        Several(Rows(64, 4, slices=2, signals=True)),
        Several(Rows(128, 8, slices=2, signals=True)),
        Several(Rows(64, 4, slices=4, signals=True)),
        Several(Rows(128, 8, slices=4, signals=True)),
        Several(Rows(64, 4, slices=2)),
        Several(Rows(64, 4, slices=2, num_programs=2 * USUAL, signals=True)),
    ],
    576: [
        Several(None),
        Several(Rows(64, 8, slices=8)),
        Several(Rows(64, 8, slices=8, lanes=16)),
        Several(Rows(64, 8, slices=4)),
        Several(Rows(64, 8, slices=4, lanes=16)),
        Several(Rows(64, 8, slices=8, signals=True)),
        Several(Rows(32, 8, slices=4)),
        Several(Rows(32, 8, slices=8, num_programs=528)),
    ],
}
HEAD_DIMS = {"gpt-oss-20b": 64}  # of what has no forms above; others have 128
NORMED_FORMS = [Normed(0), Normed(1024), Normed(2**20)]
Form = Rows | Normed | Several | int
DEVICE, KIND, PAGE = ("cpu", torch.float32, 4) if SMOKE else ("cuda", torch.bfloat16, 16)
MAX_ERROR = 0.02
COMPILE_SECONDS, MAX_SECONDS = (120, 90) if SMOKE else (60, 30)


def parsed(name: str) -> tuple[str, str, int]:
    """Shape, what is tried, batch."""
    shape, kind, batch, *_ = (*name.split(":"), "", "")
    return shape, kind, int(batch or 1)


def forms_of(name: str) -> Sequence[Form]:
    shape, kind, _ = parsed(name)
    return {"normed": NORMED_FORMS, "several": SEVERAL_FORMS[dim_of(shape)]}[kind] if kind else FORMS[shape][1]


def dim_of(shape: str) -> int:
    return FORMS[shape][0][2] if shape in FORMS else HEAD_DIMS.get(shape, 128)


def name_of(form: Form) -> str:
    if isinstance(form, Several):
        return f"several rows: {name_of(form.form) if form.form is not None else 'attention.py'}"
    if isinstance(form, Normed):
        return f"up to {form.most_numbers} numbers are normed on the way"
    if isinstance(form, int):
        return f"attention.py, {form} programs"
    words = [f"{form.keys} keys", f"{form.warps} warps"]
    words += [f"{form.slices} slices"] if form.slices > 1 else []
    words += [f"parts of {form.least_keys}"] if form.least_keys else []
    words += [f"{form.num_programs} programs"] if form.num_programs else []
    words += [f"then {form.loop_keys}"] if form.loop_keys else []
    words += [] if form.ahead else ["asks late"]
    words += [f"{form.lanes} lanes"] if form.lanes != 32 else []
    return ", ".join(words + (["next one begins early"] if form.signals else []))


def choose(engine: Engine, form: Form, dim: int) -> None:
    """From now on, for what is recorded from now on."""
    if isinstance(form, Normed):
        norm.MOST_NUMBERS = form.most_numbers
    elif isinstance(form, Several):
        lone_rows.SEVERAL.clear()
        lone_rows.MANY_LANES.clear()
        if form.form is not None:
            lone_rows.SEVERAL[dim] = form.form
    else:
        lone_rows.CHOSEN.clear()
        attention_work.WANTED_PROGRAMS = USUAL
        if isinstance(form, int):
            attention_work.WANTED_PROGRAMS = form
        else:
            lone_rows.CHOSEN[dim] = form
    if engine.graphs is not None:
        recordings = engine.graphs._recordings
        for key in [key for key in recordings if key.shape.max_rows <= 1 + K]:
            del recordings[key]


def error_of(form: Rows, heads: tuple[int, int, int, int]) -> float:
    """Of the second of two layers, which begins early, the largest difference from attention.py; texts of four
    lengths, in one part and in many."""
    num_heads, kv_heads, dim, value_dim = heads
    starts = torch.tensor([0, CONTEXT + 18, 2 * CONTEXT, 8 * CONTEXT - 1])
    generator = torch.Generator(device=DEVICE).manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(KIND)

    width = 8 * CONTEXT // PAGE
    table = (torch.randperm(4 * width) + 1).view(4, width).int().to(DEVICE)
    k_pages = noise(4 * width + 1, PAGE, kv_heads, dim)
    v_pages = (k_pages if dim > 256 else noise(4 * width + 1, PAGE, kv_heads, dim))[..., :value_dim]
    first, worst = torch.arange(5, dtype=torch.int32, device=DEVICE), 0.0
    for some in (starts, starts.flip(0)):
        keys = attention_work.Keys(table, first, some.to(DEVICE), None, 0, PAGE, 1, {})
        lone_rows.CHOSEN[dim] = form
        for _ in range(2):
            q = noise(4, num_heads, dim)
            found = lone_rows.attend_rows(q, (k_pages, v_pages), keys, dim**-0.5)
            wanted = attention.paged_attention(q, (k_pages, v_pages), keys, dim**-0.5)
            worst = max(worst, float((found.float() - wanted.float()).abs().max()))
    return worst


def measure(name: str, forms: Sequence[Form], *, is_trial: bool) -> None:
    shape, kind, batch = parsed(name)
    group, num_rounds = GROUPS[shape], 2 if is_trial else NUM_ROUNDS
    heads = FORMS.get(shape, FORMS["llama-int4"])[0]
    speculative = SpeculativeConfig(
        method="eagle3",
        num_speculative_tokens=K,
        force=True,
        synthetic_acceptance_length=ACCEPT_LENGTH,
        quantization=None if SMOKE else group.quantization,
    )
    drafts = kind == "several"
    config = EngineConfig(
        group.shape,
        speculative if drafts else None,
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        max_model_len=CONTEXT
        + (1 + K if drafts else 1) * ((NUM_CHUNKS + 1) * NUM_ROUNDS + WARM_UP + 16),  # one more: replay_ms
        quantization=None if SMOKE else group.quantization,
        enable_prefix_caching=False,
    )
    begin = time.perf_counter()
    engine = random_engine(config, Measuring(shape, is_trial).sizes())
    if not is_trial:
        say(f"{name}: made in {time.perf_counter() - begin:.1f} s")
    found: list[tuple[float, str]] = []
    try:
        for form in forms:
            said, error = name_of(form), 0.0
            try:
                if isinstance(form, Rows) and (not SMOKE or (form == forms_of(name)[2] and not is_trial)):
                    error = error_of(form, heads)
                choose(engine, form, dim_of(shape))
                cost = steady(engine, batch, CONTEXT if batch == 1 or drafts else SHORT, num_rounds)
            except Exception as failure:  # one form's: the others are still timed
                if not is_trial:
                    say(f"{name}: {said}: FAILED {type(failure).__name__}: {str(failure)[:160]}")
                continue
            wrong = f", OFF BY {error:.3f}" if error > MAX_ERROR else ""
            if not is_trial:
                found.append((cost.device_ms or cost.ms, said))
                change = 1e3 * (found[-1][0] - found[0][0])
                say(
                    f"{name}: {said}: {cost.ms:.3f} ms (device {cost.device_ms or 0:.3f}, {change:+.0f} us), off by "
                    f"{error:.4f}{wrong}"
                )
    finally:
        engine.close()
    if found:
        best = min(found)
        say(f"{name}: best {best[1]}, {best[0]:.3f} ms of {found[0][0]:.3f}; wanted {group.step_ms}")


def work(name: str) -> None:
    """A shape's process, or, with a + behind its name, one that only compiles."""
    name, plus, _ = name.partition("+")
    forms = forms_of(name)
    attempt(f"{name}, compiling", lambda: measure(name, forms[1::2] if plus else forms[::2], is_trial=True))
    if plus:
        return
    print(READY, flush=True)
    if sys.stdin.readline().strip() == GO:
        attempt(name, lambda: measure(name, [*forms, forms[0]], is_trial=False))


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
        return
    os.environ.setdefault("BEGIN", str(BEGIN))  # the workers' too
    names = sys.argv[1:] or list(FORMS)
    workers = [Worker.start(name, __file__) for name in names]
    compiling = [Worker.start(f"{name}+", __file__) for name in names if not SMOKE]
    try:
        end = time.monotonic() + COMPILE_SECONDS
        late = [worker.name for worker in workers + compiling if worker.relay(end) is None]
        say(f"compiled; not ready: {', '.join(late)}" if late else "compiled")
        for worker in compiling:
            worker.kill()  # it would disturb
        for worker in workers:
            worker.go(MAX_SECONDS * (2 if worker.name in late else 1))
    finally:
        for worker in workers + compiling:
            worker.kill()


if __name__ == "__main__":
    main()
