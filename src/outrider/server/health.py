"""Health that means something: the process lives, new requests are taken, tokens come.
A server that is busy is not dead; one whose requests get no further is."""

from __future__ import annotations

from typing import Any

from outrider.server.engine_client import EngineClient

Verdict = tuple[int, dict[str, Any]]


def live(engine: EngineClient) -> Verdict:
    return _verdict(engine.is_alive, "alive", "the engine has ended")


def ready(engine: EngineClient) -> Verdict:
    if not engine.is_alive:
        return live(engine)
    status, body = _verdict(not engine.draining, "ready", "shutting down")
    if engine.is_acceptance_dead:  # slower than it could be, and right all the same
        body["speculation"] = "dead"
    return status, body


def decode(engine: EngineClient) -> Verdict:
    if not engine.is_alive:
        return live(engine)
    status, body = _verdict(not engine.is_stalled, "decoding" if engine.num_sequences else "idle", "stalled")
    return status, body | {"requests": engine.num_sequences, "steps": engine.num_steps}


def _verdict(good: bool, status: str, otherwise: str) -> Verdict:
    return (200, {"status": status}) if good else (503, {"status": otherwise})
