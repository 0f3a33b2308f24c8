"""What processes that serve have in common."""

import gc
import socket

import pytest

from outrider import LLM
from outrider.options import EngineOptions
from outrider.processes import freeze_heap
from outrider.server import engine_host
from outrider.server.engine_host import Opening
from outrider.server.engine_loop import EngineLoop
from outrider.server.link import Link


def test_what_a_server_has_made_is_not_looked_through_again() -> None:
    made = [[number] for number in range(200_000)]
    try:
        freeze_heap()
        assert gc.get_freeze_count() > len(made)
        assert len(gc.get_objects()) < len(made) / 10
    finally:
        gc.unfreeze()


def test_an_engine_freezes_its_heap_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(engine_host, "freeze_heap", lambda: done.append("frozen"))
    monkeypatch.setattr(engine_host, "log_to_stderr", lambda: None)
    monkeypatch.setattr(EngineLoop, "run", lambda self: bool(done.append("serving")) or True)
    ours, theirs = (Link(end) for end in socket.socketpair())
    with LLM(None, None, device="cpu", max_num_seqs=1) as llm:
        assert engine_host._run(llm, theirs, Opening(EngineOptions(), {}, True, "m")) == 0
    assert done == ["frozen", "serving"]
    ours.close()
    theirs.close()
