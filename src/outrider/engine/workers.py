"""Ranks 1, 2, ... as processes that this one, rank 0, starts, watches and ends."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from outrider.config import EngineConfig, config_to_json
from outrider.engine.launched import LaunchedRanks, launched_rank
from outrider.engine.team import RankLostError, RankPlace, device_for, join
from outrider.kernels.filters import filters

START_SECONDS = 120.0  # that a process has to import what it needs
END_SECONDS = 5.0
POLL_SECONDS = 0.05
PACKAGE = Path(__file__).parent.parent


class Workers:
    def __init__(self, config: EngineConfig) -> None:
        self.sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
        self.size = config.num_ranks
        self._lost: str | None = None
        self._is_ending = False
        self._heard: list[Callable[[RankLostError], None]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="outrider-ranks-")  # that nobody else may look into
        secret = secrets.token_hex(32)
        self._processes = [self._start(rank, secret, config) for rank in range(1, self.size)]
        self._watcher = threading.Thread(target=self._watch, name="outrider-ranks", daemon=True)
        self._watcher.start()
        try:
            store = dist.FileStore(f"{self._directory.name}/store", self.size)
            self._wait_for(store)
            team = join(store, self._place(0, secret, config))
        except BaseException:
            self.end()
            raise
        self.team = replace(team, check=self.check)

    def _start(self, rank: int, secret: str, config: EngineConfig) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "outrider.worker"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # what a terminal says to this process is not said to them
        )
        told = {"directory": self._directory.name, "place": vars(self._place(rank, secret, config))}
        assert process.stdin is not None
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()  # it stays open: its end is how they learn of ours
        return process

    def _place(self, rank: int, secret: str, config: EngineConfig) -> RankPlace:
        device, own_devices = device_for(config, rank, self.size)
        return RankPlace(rank, self.size, config.pipeline_parallel_size, device, own_devices, secret)

    def _wait_for(self, store: dist.Store) -> None:
        """Until all have begun: to wait for one that has ended would be for ever."""
        deadline = time.monotonic() + START_SECONDS
        keys = [f"begun-{rank}" for rank in range(1, self.size)]
        while not store.check(keys):
            self.check()
            if time.monotonic() > deadline:
                raise RankLostError(f"the processes of the ranks have not started within {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def open(self, config: EngineConfig) -> None:
        """Tells the ranks to open the same models."""
        self.team.channel.send({"do": "open", "config": config_to_json(config)})

    def check_filters(self, names: Iterable[str]) -> None:
        """Raises ValueError for those that only this process knows."""
        own = sorted(set(names) - filters.installed)
        if own:
            raise ValueError(
                f"{', '.join(own)}: other ranks are processes of their own, and know only filters that are entry "
                "points of a package (outrider.filters): declare it there, or start the ranks with torchrun"
            )

    # how it goes on, and ends

    def check(self) -> None:
        """A RankLostError where one has ended."""
        if self._lost is None and not self._is_ending:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    self._lose(f"rank {rank} (process {process.pid}) {_ended(process.returncode)}")
        if self._lost is not None:
            raise self._error

    @property
    def _error(self) -> RankLostError:
        return RankLostError(f"{self._lost}: the engine cannot go on, and must be started again")

    def on_lost(self, hear: Callable[[RankLostError], None]) -> None:
        """`hear` is called when one ends, by another thread."""
        self._heard.append(hear)

    @contextmanager
    def watched(self, *harmless: type[BaseException]) -> Iterator[None]:
        """What goes wrong inside leaves ranks waiting for each other, so the engine ends with it, but for what is
        harmless. Where a rank has ended, that is what is said."""
        self.check()
        try:
            yield
        except harmless:
            raise
        except BaseException as error:
            deadline = time.monotonic() + 1.0  # a connection breaks before the process is known to have ended
            while isinstance(error, RuntimeError) and self._lost is None and time.monotonic() < deadline:
                self._find_ended()
                time.sleep(POLL_SECONDS)
            if self._lost is None:
                self._lose(f"a step broke off ({type(error).__name__})")
                raise
            if isinstance(error, Exception):
                raise self._error from None
            raise

    def _find_ended(self) -> None:
        with suppress(RankLostError):
            self.check()

    def _watch(self) -> None:
        while not self._is_ending and self._lost is None:
            self._find_ended()
            time.sleep(4 * POLL_SECONDS)

    def _lose(self, why: str) -> None:
        self._lost = why
        for process in self._processes:  # whoever waits for the one that is lost
            process.kill()
        self._directory.cleanup()  # this process may end at once, and they cannot see to it any more
        for hear in self._heard:
            hear(self._error)

    def end(self) -> None:
        """Ends the processes of all ranks, whatever they do."""
        self._is_ending = True
        if hasattr(self, "team") and self._lost is None:
            with suppress(RuntimeError):  # one has ended already
                self.team.channel.send({"do": "end"})
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0) if self._lost is None else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._watcher.join()
        vars(self).pop("team", None)  # it knows us: connections and their threads would wait for the garbage collector
        self._directory.cleanup()


def _ended(code: int) -> str:
    if code >= 0:
        return f"has ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


# workers that are lent to one engine after another


_kept: dict[tuple[int, int], Workers] | None = None
_launched: LaunchedRanks | None = None  # for as long as the process is there


@contextmanager
def kept_workers() -> Iterator[None]:
    """Inside, processes outlive the engine they were started for, and serve the next one of the same size."""
    global _kept
    assert _kept is None, "not to be nested"
    _kept = {}
    try:
        yield
    finally:
        kept, _kept = _kept, None
        for workers in kept.values():
            workers.end()


def take_workers(config: EngineConfig) -> Workers | LaunchedRanks:
    """The other ranks of an engine."""
    global _launched
    if launched_rank() is not None:
        if _launched is None:
            _launched = LaunchedRanks(config)
            atexit.register(_launched.end)
        if _launched.sizes != (config.tensor_parallel_size, config.pipeline_parallel_size):
            raise ValueError("processes that were started together stay together: sizes cannot be others than before")
        return _launched
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
    found = _kept.pop(sizes, None) if _kept is not None else None
    return found or Workers(config)


def return_workers(workers: Workers | LaunchedRanks) -> None:
    """Gives processes of ranks back that are not needed any more."""
    if isinstance(workers, LaunchedRanks):
        return
    if _kept is not None and workers._lost is None and workers.sizes not in _kept:
        _kept[workers.sizes] = workers
    else:
        workers.end()
