"""Shared fixtures: tiny checkpoints made once a session, and both sets of kernels."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: tests run its kernels on the CPU
    with suppress(ImportError):
        from interpreting import speed_up

        speed_up()

os.environ.pop("OUTRIDER_MODEL", None)  # tests mean the embedded model where they name none

import tiny
from made_up_time import seconds_of
from replay import recorder_of

from outrider.engine.engine import Engine
from outrider.engine.stopwatch import Stopwatch
from outrider.kernels import dispatch

torch.set_num_threads(1)  # tiny models; the suite runs on several processes
# Drafters draft as much as is worth it, as they do for users; but what is tested must not depend on how fast a machine
# is. Tests that count drafts ask for a fixed depth: {"adaptive": false}.
Stopwatch.lap = lambda self, flight, end: seconds_of(flight.shape)  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a tiny random target of a family, once for every set of options."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        key = f"{family}-{seed}-{sorted(overrides.items())}"
        if key not in made:
            made[key] = tiny.save_target(tmp_path_factory.mktemp("target"), family, seed, **overrides)
        return made[key]

    return make


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the native kernels, then with the torch references."""
    if request.param == "reference":
        monkeypatch.setattr(dispatch.native, "library", lambda: None)
    elif dispatch.native.library() is None:
        pytest.skip("no C compiler, so no native kernels")
    return request.param


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything runs on Triton's kernels, as on a GPU, interpreted where there is none."""
    from outrider.engine import graphs
    from outrider.kernels.gpu import attention

    monkeypatch.setattr(dispatch.native, "library", lambda: None)
    monkeypatch.setattr(dispatch, "is_home", lambda x: True)
    monkeypatch.setattr(attention, "WANTED_PROGRAMS", 4)  # an interpreter has no use for many
    monkeypatch.setattr(graphs, "NUM_ROWS", (8, 64))  # nor for rows that only fill up


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are recorded without a GPU."""
    monkeypatch.setattr(Engine, "recorder", staticmethod(recorder_of))
