"""The process that `outrider bench startup` starts: opens an engine, warms it up, and brings one token. Says on
standard output, one JSON object a line, when it has started, when it is ready, and when the token is there."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing is timed
    from outrider.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.startup import StartupTimes

STARTED, READY, FIRST_TOKEN = "started", "ready", "first token"
PROMPT_LEN = 16


def main(text: str) -> None:
    """`text`: a JSON object with the fields of an EngineConfig as "config", and perhaps a "shape"."""
    _tell(STARTED)
    begin = time.perf_counter()
    from outrider import llm  # noqa: F401  (all that an engine needs)
    from outrider.bench import random_pair  # noqa: F401
    from outrider.startup import StartupTimes

    startup = StartupTimes({"imports": time.perf_counter() - begin})
    given = json.loads(text)
    engine = _open(read_config(given["config"]), given["shape"], startup)
    _tell(
        READY,
        seconds=startup.seconds,
        within_warm_up=engine.recording_seconds,
        num_recordings=engine.num_recordings,
    )
    _first_token(engine)
    _tell(FIRST_TOKEN)


def _tell(event: str, **what: Any) -> None:
    print(json.dumps({"event": event, **what}), flush=True)


def read_config(values: dict[str, Any]) -> EngineConfig:
    from outrider.config import EngineConfig, SpeculativeConfig, WatchdogConfig

    speculative, watchdog = values.pop("speculative"), values.pop("watchdog")
    return EngineConfig(
        **values,
        speculative=SpeculativeConfig.from_dict(speculative) if speculative is not None else None,
        watchdog=WatchdogConfig(**watchdog) if watchdog is not None else None,
    )


def _open(config: EngineConfig, shape: str | None, startup: StartupTimes) -> Engine:
    from outrider.bench.random_pair import random_engine, shape_of
    from outrider.engine.warm_up import warm_up
    from outrider.llm import LLM

    if shape is None:
        llm = LLM.from_config(config)
        llm.warm_up()
        startup.seconds.update(llm.startup.seconds)
        return llm.engine
    engine = random_engine(config, shape_of(shape), startup)
    with startup.timed("warm-up"):
        warm_up(engine)
    return engine


def _first_token(engine: Engine) -> None:
    from outrider.engine.request import Request
    from outrider.sampling_params import SamplingParams

    ids = [number % engine.target.vocab_size for number in range(PROMPT_LEN)]
    request = Request("first", ids, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), seed=0)
    engine.add(request)
    while not request.num_outputs:
        engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
