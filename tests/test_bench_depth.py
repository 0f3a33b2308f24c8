"""`outrider bench depth`, and acceptance that is made up for each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_bench_round import SHAPE
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.certify.random_depth import RandomDepth
from outrider.cli import app
from outrider.config import SpeculativeConfig
from outrider.engine.policy import Judged, Landed
from outrider.pair import DEFAULT_DIRECTORY

RATES = (0.9, 0.3)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("most", [5, 2])
def test_each_request_has_a_rate_of_its_own(recorded: bool, most: int, request: pytest.FixtureRequest) -> None:
    """However long drafts are."""
    if recorded:
        request.getfixturevalue("recording")
    settings = {"method": "eagle3", "model": str(default_drafter()), "synthetic_acceptance_rates": list(RATES)}
    settings["force"] = True
    params = [
        SamplingParams(
            max_tokens=200, temperature=0, ignore_eos=True, seed=seed, num_speculative_tokens=most, trace=True
        )
        for seed in range(4)
    ]
    with LLM(None, settings, device="cpu", max_num_seqs=4, max_model_len=512, watchdog=None) as llm:
        outputs = llm.generate(["Once upon a time"] * 4, params)
        assert (llm.engine.num_recorded_rounds > 0) is recorded
    for seed, output in enumerate(outputs):
        found = output.outputs[0].speculation
        rate = found.accepted_at[0] / found.drafted_at[0]
        assert rate == pytest.approx(RATES[seed % 2], abs=0.12)
        if seed % 2 == 0:
            assert found.accepted_at[1] / found.accepted_at[0] == pytest.approx(RATES[0], abs=0.12)


def test_what_is_not_judged_comes_out_as_it_would_have_been_judged() -> None:
    """So that a policy learns the same of a draft, whatever part of it is judged."""
    settings = {"model": str(default_drafter()), "synthetic_acceptance_rates": list(RATES), "force": True}
    params = [SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, seed=seed) for seed in range(6)]
    seen: list[Judged] = []
    policy = RandomDepth(5, followed=1.0)
    with (
        LLM(None, settings, device="cpu", max_num_seqs=6, max_model_len=512, watchdog=None) as llm,
        llm.engine.drafting_with(policy),
    ):
        note = policy.note

        def spy(landed: Landed) -> None:
            seen.extend(landed.judged)
            note(landed)

        policy.note = spy  # type: ignore[method-assign]
        llm.generate(["Once upon a time"] * 6, params)  # slots are given in this order
    beyond = [each for each in seen if each.num_seen > each.num_judged]
    for number, rate in enumerate(RATES):
        right = [each.num_right >= each.num_seen for each in beyond if each.slot % 2 == number]
        assert len(right) > 20
        assert sum(right) / len(right) == pytest.approx(rate, abs=0.2)


def default_drafter() -> Path:
    return DEFAULT_DIRECTORY / "drafter"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"synthetic_acceptance_rates": [0.5, 1.5]}, "numbers from 0 to 1"),
        ({"synthetic_acceptance_rates": []}, "numbers from 0 to 1"),
        ({"synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 2.0}, "both make up acceptance"),
    ],
)
def test_wrong_rates_are_refused(values: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        SpeculativeConfig.from_dict({"method": "ngram", **values})


def test_all_sides_in_one_run(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    given = ["--shape", path, "--draft", "eagle3", "-k", 2, "--rates", "0.9,0", "--concurrency", "2", "--device", "cpu"]
    given += ["--threads", 1, "--num-runs", 2, "--prompt-len", 8, "--answer-len", 12, "--num-prompts", 4]
    result = CliRunner().invoke(app, ["bench", "depth", *map(str, given)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    (level,) = report["levels"]
    assert list(level["sides"]) == ["plain", "K = 1", "K = 2", "adaptive"]
    assert level["best_fixed"] in ("K = 1", "K = 2")
    for side in level["sides"].values():
        assert side["tokens_per_second"]["median"] > 0
        assert len(side["times_plain"]["runs"]) == 2
    assert level["sides"]["plain"]["times_plain"]["median"] == 1
    assert report["acceptance_rates"] == [0.9, 0.0]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--rates", "-1"], "--rates takes numbers of at least 0"),
        (["--no-draft"], "nothing to compare without a drafter"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], error: str) -> None:
    result = CliRunner().invoke(app, ["bench", "depth", *arguments])
    assert result.exit_code != 0
    assert error in " ".join((result.output + str(result.exception)).split())
