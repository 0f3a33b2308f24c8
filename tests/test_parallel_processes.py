"""Ranks as processes: they find each other, say what one says, and end together, whoever ends first."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref

import pytest

from outrider import LLM, SamplingParams
from outrider.engine.team import RankLostError
from outrider.engine.workers import kept_workers
from outrider.kernels.filters import Filter, filters
from outrider.sampling_params import Guided

LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(llm: LLM) -> list[int]:
    assert llm.engine.workers is not None
    return [process.pid for process in llm.engine.workers._processes]


def test_two_processes_say_what_one_says_and_one_that_dies_ends_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(filters) == []  # entry points have been looked for
    params = [
        SamplingParams(max_tokens=24, temperature=0),
        SamplingParams(max_tokens=24, temperature=0.9, seed=4),
        SamplingParams(max_tokens=40, temperature=0.9, seed=4, guided=Guided(regex=r"[a-z ]{5,20}\.")),
    ]
    prompts = ["Once upon a time", "The dog", "Say something:"]
    with LLM() as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    with kept_workers():
        with LLM(tensor_parallel_size=2) as llm:
            first = pids(llm)
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].text for output in outputs] == expected
            assert sum(output.outputs[0].speculation.accepted for output in outputs) > 0
        with LLM(pipeline_parallel_size=2) as llm:
            team = weakref.ref(llm.engine.workers.team)
            assert llm.generate(prompts[:2], params[:2])[1].outputs[0].text == expected[1]
        with pytest.raises(ValueError, match="max_model_len"):
            LLM(tensor_parallel_size=2, max_model_len=10**7)
        monkeypatch.setitem(filters._entries, "mine", Filter)
        llm = LLM(tensor_parallel_size=2)
        with pytest.raises(ValueError, match="mine: other ranks are processes of their own"):
            llm.generate("The dog", SamplingParams(extra_args={"mine": 0.5}))
        assert pids(llm) == first, "they were kept, also by one that could not be opened"
        directory = llm.engine.workers._directory.name
        assert os.path.exists(directory)
        begin = time.monotonic()
        killed = threading.Timer(0.3, os.kill, (first[0], signal.SIGKILL))
        killed.start()
        with pytest.raises(RankLostError, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
            llm.generate(["The dog"] * 4, LONG)
        assert time.monotonic() - begin < 5
        assert not os.path.exists(directory), "whoever ends now leaves nothing behind"
        begin = time.monotonic()
        with pytest.raises(RankLostError, match="SIGKILL"):
            llm.generate("The dog", LONG)
        llm.close()
        assert time.monotonic() - begin < 5
    assert not is_alive(first[0])
    assert team() is None, "connections are given back without the garbage collector's help"
