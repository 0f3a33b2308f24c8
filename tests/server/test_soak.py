"""A short soak of the real server, and that a soak which went wrong is told."""

import dataclasses
from typing import Any

import pytest

from outrider.bench.load.overhead import OFFLINE, STREAMED, WHOLE, OverheadTask, run_in_turn, to_dict
from outrider.bench.load.server_process import server_process
from outrider.bench.load.soak import GAUGES, NUM_CHATS, ServerState, Soak, figures_in, judge, run_soak
from outrider.bench.load.soak_clients import QUESTIONS, Crowd, Replay, SoakTally


@pytest.mark.slow
def test_a_short_soak() -> None:
    """Ten minutes of it: outrider bench soak."""
    soak = run_soak(14, threads=1)
    assert soak.failures == []
    done = soak.crowd.tally.done
    assert min(done[name] for name in ("turns", "leave", "be_killed", "be_bound", "ask_for_several")) > 0
    # of a chat's prompt all but the newest turn is known; on a busy machine chats have two or three turns
    assert soak.crowd.tally.num_repeated_tokens > 0.6 * soak.crowd.tally.num_prompt_tokens
    assert len(soak.crowd.tally.replays) >= 2 * len(QUESTIONS)
    assert soak.moved("vllm:prefix_cache_hits_total") > 0


def well() -> Soak:
    """A soak without any failure."""
    figures = dict.fromkeys(GAUGES, 0.0)
    before = ServerState(memory=300 * 2**20, num_files=9, num_threads=8, figures=figures)
    after = dataclasses.replace(before, figures=figures | {"vllm:num_preemptions_total": 3.0})
    replays = [
        Replay(float(turn), number, f"text {number}", 10, 20) for turn in (1, 9) for number in range(len(QUESTIONS))
    ]
    crowd = Crowd(None, ("127.0.0.1", 1), 0.0, tally=SoakTally(replays=replays))  # type: ignore[arg-type]
    half = len(QUESTIONS)
    return Soak(10.0, before, after, crowd, replays[:half], replays[half:], [1] * 4, 0, NUM_CHATS)


def test_a_soak_that_went_well() -> None:
    assert judge(well()) == []


def _after(soak: Soak, **changes: Any) -> None:
    soak.after = dataclasses.replace(soak.after, **changes)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda soak: soak.crowd.tally.wrong("stream: HTTP 500"), "HTTP 500"),
        (lambda soak: _after(soak, figures=soak.after.figures | {GAUGES[2]: 0.01}), "kv_cache_usage"),
        (lambda soak: _after(soak, figures=soak.after.figures | {GAUGES[0]: 1.0}), "running"),
        (lambda soak: _after(soak, figures=soak.before.figures), "preempted"),
        (lambda soak: _after(soak, memory=soak.before.memory + 64 * 2**20), "memory grew"),
        (lambda soak: setattr(soak, "memory", [100, 100, 100, 100 + 2**24]), "still growing"),
        (lambda soak: _after(soak, num_files=10), "file handles"),
        (lambda soak: setattr(soak.crowd.tally.replays[-1], "text", "other"), "got 2 answers"),
        (lambda soak: soak.crowd.tally.replays.clear(), "never answered"),
        (lambda soak: [setattr(replay, "num_accepted", 18) for replay in soak.last], "accept length"),
        (lambda soak: soak.last.clear(), "accept length"),
        (lambda soak: setattr(soak, "exit_code", -9), "status -9"),
        (lambda soak: setattr(soak, "num_finished_streams", NUM_CHATS - 1), "streams finished"),
    ],
)
def test_what_goes_wrong_is_told(spoil: Any, told: str) -> None:
    soak = well()
    spoil(soak)
    assert told in " ".join(judge(soak))


def test_figures_are_sums_over_labels() -> None:
    text = '# HELP a b\na_total{x="1"} 2.0\na_total{x="2 3"} 3.0\nb 0.5\n'
    assert figures_in(text) == {"a_total": 5.0, "b": 0.5}


# overhead


@pytest.mark.slow
def test_the_server_against_its_engine(llm: Any, tmp_path: Any) -> None:
    """That both do the same work; how fast is for `outrider bench overhead` on a quiet machine to say."""
    task = OverheadTask(["How does a refrigerator keep food cold?", "Go on.", "Why?"], 12, 4)
    with server_process(["--max-num-seqs", "4"], tmp_path / "log", 1) as server:
        passes = run_in_turn(llm, server, task, num_runs=2)
    report = to_dict(passes, task, 1)
    assert report["identical"]
    assert [len(side) for side in passes.values()] == [2, 2, 2]
    assert {made.num_tokens for side in passes.values() for made in side} == {36}
    for name in (STREAMED, WHOLE):
        figures = report["sides"][name]
        speeds = zip(passes[name], passes[OFFLINE], strict=True)
        ratios = [own.tokens_per_second / other.tokens_per_second for own, other in speeds]
        assert figures["of_the_engine"]["runs"] == pytest.approx(ratios, abs=1e-3)
        assert passes[name][0].cpu > 0
