"""Grammars are tried out in a process of their own: what takes too long or too much ends with that process alone."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.grammar import trial as grammar_trial
from outrider.grammar.trial import GrammarTrial, TrialLimits
from outrider.overload import OverloadError
from outrider.sampling_params import Guided

pytest.importorskip("xgrammar")

LIMITS = TrialLimits(seconds=2.0, wait_seconds=0.2)
SMALL = TrialLimits(memory=32 * 2**20)
HONEST = Guided(json_schema={"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}}})


@pytest.fixture(scope="module")
def words() -> Iterator[Any]:
    with LLM(speculative_config=None, max_num_seqs=1) as llm:
        yield llm.engine.grammars._compiler._words


@pytest.fixture(scope="module")
def trial(words: Any) -> Iterator[GrammarTrial]:
    trial = GrammarTrial(words, LIMITS)
    yield trial
    trial.close()


def _pid(trial: GrammarTrial) -> int:
    assert trial._worker is not None
    assert trial._worker.pid is not None
    return trial._worker.pid


def _slow_to_compile() -> Guided:
    properties = {f"p{number}": {"type": "integer"} for number in range(64)}
    counted = {"type": "object", "properties": properties, "maxProperties": 32}
    return Guided(json_schema={"type": "object", "properties": {f"o{number}": counted for number in range(9)}})


def _large() -> Guided:
    """A few kilobytes that would take hundreds of megabytes."""
    rules = [f'r{number} ::= "{f"{number}abcdefgh" * 60}"{{0,16384}}' for number in range(8)]
    return Guided(grammar="\n".join(["root ::= " + " | ".join(f"r{number}" for number in range(8)), *rules]))


def test_what_is_honest_passes(trial: GrammarTrial) -> None:
    trial.check(HONEST)
    trial.check(Guided(regex=r"(\d{1,3}\.){3}\d{1,3}"))
    trial.check(Guided(json_object=True))
    pid = _pid(trial)
    with pytest.raises(ValueError, match="cannot be used"):
        trial.check(Guided(grammar="root ::= nothing"))
    trial.check(HONEST)
    assert _pid(trial) == pid


def test_what_takes_too_long_to_compile(trial: GrammarTrial) -> None:
    trial.check(HONEST)
    pid, begin = _pid(trial), time.monotonic()
    with pytest.raises(ValueError, match="too long to compile"):
        trial.check(_slow_to_compile())
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ValueError, match="too long to compile"):  # this time nobody tries it
        trial.check(_slow_to_compile())
    assert trial._worker is None
    trial.check(Guided(regex="[a-z]+"))  # the next one has a new process
    assert time.monotonic() - begin < 60


def test_the_process_counts_its_own_seconds(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of computing, so that a busy machine does not make grammars seem slow; whoever waits for it need not."""
    monkeypatch.setattr(grammar_trial, "PATIENCE", 1000.0)
    ended: list[int | None] = []
    monkeypatch.setattr(GrammarTrial, "_why_ended", lambda self: ended.append(_exit_code(self)) or "is slow")
    trial = GrammarTrial(words, TrialLimits(seconds=0.3))
    with pytest.raises(ValueError, match="is slow"):
        trial.check(_slow_to_compile())
    assert ended == [-signal.SIGPROF]
    trial.close()


def _exit_code(trial: GrammarTrial) -> int | None:
    assert trial._worker is not None
    trial._worker.join(10)
    return trial._worker.exitcode


def test_what_takes_too_much_memory(words: Any) -> None:
    """Ours does not grow with it."""
    trial, before = GrammarTrial(words, SMALL), _memory()
    with pytest.raises(ValueError, match="too much memory to compile"):
        trial.check(_large())
    assert _memory() - before < 100 * 2**20
    assert trial._worker is None


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "regex", ["(([a-z]{0,16}){0,16}){0,16}", "(([a-z]?){100}){100}", "([a-z]+[a-z]+[a-z]+[a-z]+)+y"]
)
def test_what_is_slow_to_follow(trial: GrammarTrial, regex: str) -> None:
    with pytest.raises(ValueError, match="takes too long"):
        trial.check(Guided(regex=regex))


def test_who_waits_too_long_is_told_to_come_again(trial: GrammarTrial) -> None:
    with trial._turn, pytest.raises(OverloadError):
        trial.check(Guided(regex="[x-z]+"))
    trial.check(Guided(regex="[x-z]+"))


def test_the_same_grammar_is_tried_once(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Guided] = []
    monkeypatch.setattr(trial, "_tried", lambda guided: (tried.append(guided), time.sleep(0.05))[1])
    threads = [threading.Thread(target=trial.check, args=(Guided(regex="[u-w]+"),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tried) == 1
