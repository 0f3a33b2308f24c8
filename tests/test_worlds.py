"""The differential fuzz, for a short while: sound engines pass in random worlds, those broken on purpose do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from fuzz_pairs import Pairs, command, told
from torch import Tensor
from typer.testing import CliRunner

from outrider.bench.commands import bench_app
from outrider.certify.fuzz import Truth, fuzz, try_world
from outrider.certify.trial import FuzzFigures
from outrider.certify.worlds import FAULTY, POLICIES, Ground, draw_world
from outrider.engine import engine as engines
from outrider.engine import round as engine_round
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.kernels.round import judge
from outrider.sampling_params import SamplingParams
from outrider.types import Step, Verdict

# every kind of memory, and of drafter
SHORT = (
    "llama eagle3",
    "nemotron_h draft_model",
    "gemma4_moe dflash",
    "deepseek_v3 mtp",
    "gpt_oss p_eagle",
    "step3p5 suffix",
    "qwen3 ngram+eagle3",
    "qwen3_moe none",
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.mark.usefixtures("recording")
def test_in_random_worlds_everybody_is_told_the_same(pairs: Pairs) -> None:
    report = fuzz([pairs.pair(name) for name in SHORT], seed=19, num_requests=150, records=True)
    assert report.failures == [], told(report)
    assert report.figures.doubts == [], told(report)
    assert report.exit_status == 0
    happened = vars(report.figures)
    assert all(happened.values()), happened


def accepts_one_too_many(step: Step, choice: Tensor, out: Verdict | None = None) -> Verdict:
    """The draft token after those that stand stands as well."""
    right = judge_in_vain(step, choice)
    request = step.batch.request[step.judged]
    place = torch.arange(len(choice)) - step.judged_start[request]
    too_many = (place == right[request]) & (place < step.num_drafts[request])
    draft = step.batch.input_ids[torch.where(too_many, step.judged + 1, 0)]
    return judge(step, torch.where(too_many, draft, choice), out)


def judge_in_vain(step: Step, choice: Tensor) -> Tensor:
    """How many drafts of each request stand [B]; nothing is committed."""
    found = []
    for start, count in zip(step.judged_start.tolist(), step.num_drafts.tolist(), strict=False):
        said, drafted = choice[start : start + count], step.batch.input_ids[step.judged[start : start + count] + 1]
        found.append(int((said == drafted).long().cumprod(0).sum()))
    return torch.tensor(found)


def test_a_verifier_that_accepts_one_too_many_is_caught(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon; and what is left of the world shows it again, and passes with a sound verifier."""
    monkeypatch.setattr(engine_round, "judge", accepts_one_too_many)
    pair = pairs.pair("llama eagle3")
    report = fuzz([pair], seed=1, num_requests=60, most_failures=1)
    (failure,) = report.failures
    assert report.exit_status == 1
    assert len(failure.numbers) <= 2, "it should need little company"
    assert f"--world {failure.world.seed}" in command(failure)
    truth = Truth(pair)
    again = try_world(failure.world.seed, pair, truth, failure.numbers)[1]
    assert again is not None
    assert (again.request, again.what) == (failure.request, failure.what)
    monkeypatch.undo()
    assert try_world(failure.world.seed, pair, truth, failure.numbers)[1] is None
    truth.close()


def test_other_faults_are_caught(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is changed by a preemption, pages that are not freed, an engine that breaks, one that never ends."""
    pair = pairs.pair("llama ngram")
    truth = Truth(pair)

    def what(seed: str = "5-1") -> str:
        _, failure = try_world(seed, pair, truth, range(16))
        return "" if failure is None else failure.what

    assert what() == ""
    append, release, step = Request.append, Scheduler._release, engines.Engine.step

    def forgetful(self: Request, token: int, *given: Any) -> None:
        append(self, token ^ (self.num_preemptions > 0), *given)

    with monkeypatch.context() as patch:
        patch.setattr(Request, "append", forgetful)
        assert "plainly" in what("5-3")

    def leaking(self: Scheduler, request: Request) -> None:
        request.pages = request.pages[1:]
        release(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_release", leaking)
        assert "not freed" in what()

    def breaking(self: engines.Engine) -> Any:
        if len(self.scheduler.running) == 2:
            raise KeyError("nowhere")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(engines.Engine, "step", breaking)
        assert "KeyError" in what()
    with monkeypatch.context() as patch:
        patch.setattr("outrider.certify.trial.MAX_STEPS", 3)
        assert "still work" in what()
    truth.close()


def test_worlds_follow_from_their_seeds() -> None:
    ground = Ground(256, has_text=True, has_grammars=True)
    worlds = [draw_world(f"3-{number}", ground, records=True) for number in range(60)]
    assert worlds == [draw_world(f"3-{number}", ground, records=True) for number in range(60)]
    assert len({repr(world) for world in worlds}) == 60
    assert {world.policy for world in worlds} == set(POLICIES)
    assert {fault for world in worlds for fault in world.faults.values()} == set(FAULTY)
    assert {world.settings["enforce_eager"] for world in worlds} == {True, False}
    assert all(draw_world(f"3-{number}", ground).settings["enforce_eager"] for number in range(60))
    # every option that a request has is drawn, and left out, somewhere
    usual, left_out = SamplingParams(), {"shown_special_ids", "skip_special_tokens", "prediction", "trace"}
    left_out |= {"detokenize", "structured_outputs", "output_kind"}  # of how it is said, or another name for it
    left_out |= {"learn"}  # of what becomes of the answer
    left_out |= {"extra_args"}  # filters that packages bring: tests/test_from_outside.py
    for name in vars(usual):
        found = {repr(getattr(asked.params, name)) == repr(getattr(usual, name)) for w in worlds for asked in w.asked}
        assert found == {True} if name in left_out else False in found, name
    assert any(asked.predicts for world in worlds for asked in world.asked)


def test_what_never_happened_is_a_doubt() -> None:
    figures = FuzzFigures(tokens=5, accepted=2, drafted=2, given_up=1, cached_tokens=1, preemptions=1, faults=1)
    assert figures.doubts == ["no rebuilds", "nothing rejected"]


def test_command(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(pairs.pair("llama ngram").config.model)

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        result = CliRunner().invoke(bench_app, ["fuzz", model, "--draft", "ngram", "--json", *arguments])
        return result.exit_code, json.loads(result.stdout.splitlines()[-1])

    status, found = run("--requests", "10", "--seed", "4")
    assert status in (0, 3)
    assert found["failures"] == []
    assert found["requests"] >= 10
    monkeypatch.setattr(engine_round, "judge", accepts_one_too_many)
    status, found = run("--requests", "200", "--seed", "4")
    assert status == 1
    (first,) = found["failures"]
    status, found = run("--world", first["world"], "--only", ",".join(map(str, first["only"])))
    assert status == 1
    assert found["failures"][0]["what"] == first["what"]
    result = CliRunner().invoke(bench_app, ["fuzz", "--only", "1"])
    assert isinstance(result.exception, ValueError)


def test_pairs_cover_every_family_and_method() -> None:
    import tiny
    from samples import METHODS

    names = [name.split() for name in Pairs.names()]
    assert {family for family, _ in names} == set(tiny.FAMILIES)
    assert {method for _, method in names} >= {*METHODS, "none"}
