"""Shared fixtures: tiny checkpoints made once a session, and both sets of kernels."""

import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.pop("OUTRIDER_MODEL", None)  # tests mean the embedded model where they name none
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # they start many processes, which need not compile it all again
sys.dont_write_bytecode = False


def pytest_collection(session: pytest.Session) -> None:
    """Before tests are imported, and not in the process that only hands them out to others: it takes seconds."""
    if not session.config.getoption("numprocesses", None):
        import environment  # noqa: F401


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Random numbers of a test are its own, whatever ran before it: one that fails, fails again."""
    import torch

    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a tiny random target of a family, once for every set of options."""
    import tiny

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
    from outrider.kernels import dispatch

    if request.param == "reference":
        monkeypatch.setattr(dispatch.native_library, "library", lambda: None)
    elif dispatch.native_library.library() is None:
        pytest.skip("no C compiler, so no native kernels")
    return request.param


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything runs on Triton's kernels, as on a GPU, interpreted where there is none."""
    from outrider.engine import graphs
    from outrider.kernels import dispatch
    from outrider.kernels.gpu import attention_work

    monkeypatch.setattr(dispatch.native_library, "library", lambda: None)
    monkeypatch.setattr(dispatch, "is_home", lambda x: True)
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", 4)  # an interpreter has no use for many
    monkeypatch.setattr(graphs, "NUM_ROWS", (8, 64))  # nor for rows that only fill up


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are recorded without a GPU."""
    from replay import recorder_of

    from outrider.engine.engine import Engine

    monkeypatch.setattr(Engine, "recorder", staticmethod(recorder_of))
