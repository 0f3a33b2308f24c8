"""Slow references are computed on the CPU, and so are the drafts that are compared with them, wherever tests run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
