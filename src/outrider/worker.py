"""A rank other than the first: opens what it is told to, and follows. Rank 0 starts it: `python -m outrider.worker`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace

import torch
import torch.distributed as dist

from outrider.config import EngineConfig, config_from_json
from outrider.engine.follower import Follower
from outrider.engine.launched import launched_rank, meet, place_of
from outrider.engine.team import RankPlace, Team, join
from outrider.pair import open_pair

GRACE_SECONDS = 0.3


def main() -> None:
    """Ends with the process that started it, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = json.loads(sys.stdin.buffer.readline())
    ending = threading.Thread(target=_end_with_starter, args=(told["directory"],), daemon=True)
    ending.start()
    place = RankPlace(**told["place"])
    store = dist.FileStore(f"{told['directory']}/store", place.size)
    store.set(f"begun-{place.rank}", "1")
    status = 1
    try:
        serve(join(store, place), place.device)
        status = 0
    except BaseException:
        time.sleep(GRACE_SECONDS)  # where the starter has ended, this process ends meanwhile, and says nothing
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end_with_starter(directory: str) -> None:
    """Who was killed could not tidy up."""
    sys.stdin.buffer.read()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def serve(team: Team, device: str) -> None:
    """Serves one engine after another as a rank of it."""
    while True:
        message, _ = team.channel.receive()
        if message["do"] == "end":
            return
        follow(team, message["config"], device)


def follow_if_launched(config: EngineConfig) -> None:
    """On ranks that something else has started, but for the first: follows for as long as that is there, and ends."""
    if config.num_ranks == 1 or not launched_rank():
        return
    place = place_of(config)
    try:
        serve(meet(place), place.device)
    except RuntimeError:
        traceback.print_exc()
        os._exit(1)  # nothing can be tidied up with those who are gone
    raise SystemExit(0)


def follow(team: Team, config: dict[str, object], device: str) -> None:
    """What cannot be opened, rank 0 hears of, and says."""
    try:
        engine, _ = open_pair(replace(config_from_json(config), device=device), None, team=team)
    except ValueError:
        return
    try:
        Follower(engine, team.channel).run()
    finally:
        with torch.inference_mode():
            engine.close()


if __name__ == "__main__":
    main()
