"""Shared fixtures: tiny checkpoints made once a session, and both sets of kernels."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: tests run its kernels on the CPU

import tiny
from replay import record_on_a_cpu

from outrider.engine import engine as engines
from outrider.engine.policy import FixedDepth
from outrider.kernels import dispatch

torch.set_num_threads(1)  # tiny models; the suite runs on several processes
# Drafters draft as much as they can, whatever it is worth: what is tested must not depend on how fast a machine is.
depth_policy = engines.depth_policy
engines.depth_policy = lambda settings, lookahead, *others: FixedDepth(lookahead)


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


@pytest.fixture(autouse=True)
def adaptive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests that are marked so, drafters draft as much as is worth it."""
    if request.node.get_closest_marker("adaptive") is not None:
        monkeypatch.setattr(engines, "depth_policy", depth_policy)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are recorded without a GPU."""
    record_on_a_cpu(monkeypatch)
