"""The proof must find what is wrong, be silent where all is well, and say so where it saw nothing."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import tiny
import torch
import typer
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.bench.prompts import PromptText
from outrider.certify import questions as questions_module
from outrider.certify.certificate import Case, Certificate, CertifiedCounts, CertifiedPair
from outrider.certify.command import certify_command
from outrider.certify.comparison import compare, corrupted, differences
from outrider.certify.distribution import (
    CONTROL_TEMPERATURE,
    RANK_EDGES,
    SIGNIFICANCE,
    Distribution,
    DrawTest,
    chi_squared,
    draw,
    evaluate_draws,
    next_distributions,
    plan_draws,
)
from outrider.certify.proof import COMPOSITIONS, certify, notices_corruption
from outrider.certify.questions import OPTIONS, ProofEffort, ask
from outrider.certify.report import show_certificate
from outrider.commands import add
from outrider.engine import round as engine_round
from outrider.engine import sampler as sampler_module
from outrider.kernels import round as round_module
from outrider.kernels.round import judge
from outrider.outputs import Logprob
from outrider.pair import DEFAULT_DIRECTORY
from outrider.types import Step, Verdict

SMALL = ProofEffort(num_prompts=2, num_seeds=1, max_tokens=10, alone_every=6, others_every=3, max_draws=1500)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A target that has opinions, and a draft model that shares most of them."""
    folder = tmp_path_factory.mktemp("certify")
    model = tiny.reference("llama", num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.5)
    model.save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "draft")
    return folder / "target", {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def proven(pair: tuple[Path, dict[str, Any]]) -> Certificate:
    return certify(*pair, effort=SMALL)


def shown(certificate: Certificate) -> str:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        show_certificate(console, certificate)
    return capture.get()


# a sound engine


def test_a_sound_engine_is_proven(proven: Certificate) -> None:
    assert proven.doubts == []
    assert (proven.verdict, proven.exit_status) == ("proven", 0)
    assert proven.compositions == [composition.name for composition in COMPOSITIONS]
    counts = proven.counts
    assert counts.mismatches == 0 == proven.control_mismatches
    assert min(counts.tokens, counts.rounds, counts.accepted, counts.rejected, counts.zero_draft_rounds) > 0
    assert counts.drafted == counts.accepted + counts.rejected
    assert proven.preemptions["preempted"] > 0 == proven.preemptions["together"]
    assert sum(case.counts.prefix_hit_tokens for case in proven.cases if case.composition == "prefix hits") > 0
    assert sum(case.counts.prefix_hit_tokens for case in proven.cases if case.composition == "together") == 0
    assert proven.not_exercised == []
    assert proven.self_check
    assert proven.largest_logprob_difference < 1e-3


def test_the_statistical_part_had_drafts_and_a_control_that_failed(proven: Certificate) -> None:
    first, second = proven.draws
    assert first.p_value > SIGNIFICANCE > first.control_p_value
    assert second.p_value > SIGNIFICANCE > second.control_p_value
    assert 0 < second.accepted < second.drafted


def test_a_certificate_is_plain_data(proven: Certificate) -> None:
    data = json.loads(json.dumps(proven.to_dict()))
    assert data["verdict"] == "proven"
    assert data["drafter"].startswith("draft_model")
    assert data["first_divergence"] is None
    assert sum(case["tokens"] for case in data["cases"]) == data["counts"]["tokens"]
    assert {case["option"] for case in data["cases"]} == set(OPTIONS) - {"stop text"}  # there is no tokenizer
    assert data["versions"].keys() == {"outrider", "torch", "python"}


def test_the_report_names_the_verdict(proven: Certificate) -> None:
    text = shown(proven)
    assert "PROVEN" in text
    assert "chunked prefill" in text


def test_ngram_is_the_drafter_of_a_model_without_one(pair: tuple[Path, dict[str, Any]]) -> None:
    tiniest = replace(SMALL, num_prompts=1, max_tokens=6, max_draws=20)
    assert certify(pair[0], effort=tiniest).identity.drafter == "ngram"


# engines that are broken on purpose


def accepts_anything(step: Step, choice: Tensor, out: Verdict | None = None) -> Verdict:
    """The first draft token stands, whatever the target says."""
    request = step.batch.request[step.judged]
    first = torch.arange(len(choice)) == step.judged_start[request]
    drafted = first & (step.num_drafts[request] > 0)
    draft = step.batch.input_ids[torch.where(drafted, step.judged + 1, 0)]
    return judge(step, torch.where(drafted, draft, choice), out)


def agree_on_nothing(choice: Tensor, draft: Tensor, num_drafts: Tensor) -> Tensor:
    return torch.zeros_like(num_drafts)


def test_a_verifier_that_accepts_a_wrong_token_is_found(
    pair: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_round, "judge", accepts_anything)
    certificate = certify(*pair, effort=SMALL)
    assert (certificate.verdict, certificate.exit_status) == ("mismatch", 1)
    assert certificate.control_mismatches == 0  # the plain side has no draft to get wrong
    found = certificate.first_divergence
    assert found is not None
    assert found.difference.kind == "token"
    assert found.difference.plain != found.difference.speculative
    assert found.case == "alone"
    assert found.top_two_gap is not None
    assert found.top_two_gap > 0
    assert len(found.common) == found.difference.position
    assert any(test.differs for test in certificate.draws)  # a wrong verifier also bends the distribution


def test_the_plain_choice_wins_at_the_divergence(
    pair: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The margin is computed with the very noise of the request, so the plain side's token must come out ahead."""
    monkeypatch.setattr(engine_round, "judge", accepts_anything)
    monkeypatch.setattr("outrider.certify.questions.OPTIONS", {"plain": OPTIONS["plain"]})
    monkeypatch.setattr("outrider.certify.questions.TEMPERATURES", (1.0,))
    certificate = certify(*pair, effort=replace(SMALL, max_draws=20))
    found = certificate.first_divergence
    assert found is not None
    assert found.choice_margin is not None
    assert found.choice_margin > 0
    assert f"position {found.difference.position}" in shown(certificate)


def test_nothing_accepted_is_inconclusive(pair: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "agree", agree_on_nothing)
    monkeypatch.setattr(round_module, "use_native_round", lambda x: False)
    certificate = certify(*pair, effort=replace(SMALL, num_prompts=1, max_draws=20))
    assert certificate.counts.mismatches == 0
    assert (certificate.verdict, certificate.exit_status) == ("inconclusive", 3)
    assert "no draft token was accepted" in certificate.doubts[0]


def test_a_wrong_sampler_is_found_though_both_sides_agree(
    pair: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sampler_module.choose

    def flattened(logits: Tensor, *rest: Any) -> Tensor:
        return right(logits / CONTROL_TEMPERATURE, *rest)

    monkeypatch.setattr(sampler_module, "choose", flattened)
    certificate = certify(*pair, effort=replace(SMALL, num_prompts=1))
    assert certificate.counts.mismatches == 0
    assert certificate.verdict == "mismatch"
    assert certificate.first_divergence is None


# verdicts


def test_nothing_rejected_is_inconclusive() -> None:
    identity = CertifiedPair("model", "Llama", 1, "ngram", 5, "float32", "cpu")
    test = DrawTest("first token", 100, 0.5, 1e-9, 0, 0)
    good = CertifiedCounts(requests=1, tokens=9, rounds=4, drafted=8, accepted=5, zero_draft_rounds=1)
    for counts, verdict in [
        (good, "proven"),
        (replace(good, drafted=5), "inconclusive"),
        (replace(good, accepted=0), "inconclusive"),
        (replace(good, mismatches=1), "mismatch"),
    ]:
        case = Case("together", "plain", 0.0, counts)
        certificate = Certificate(identity, cases=[case], self_check=True, draws=[test])
        assert certificate.verdict == verdict
    assert Certificate(identity, cases=[Case("together", "plain", 0.0, good)]).verdict == "inconclusive"
    powerless = replace(test, control_p_value=0.5)
    case = Case("together", "plain", 0.0, good)
    assert Certificate(identity, cases=[case], self_check=True, draws=[powerless]).verdict == "inconclusive"


# the comparison


@pytest.fixture(scope="module")
def answers(pair: tuple[Path, dict[str, Any]]) -> list[Any]:
    with LLM(pair[0], max_model_len=64) as llm:
        return llm.generate([[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=8, logprobs=2, n=2))


def test_every_single_wrong_token_is_noticed(answers: list[Any]) -> None:
    assert notices_corruption(answers, 1e-3, tiny.VOCAB)
    output = answers[0]
    assert list(differences(output, output, 0.0)) == []
    for position, token in enumerate(output.outputs[0].token_ids):
        (found,) = differences(output, corrupted(output, position, tiny.VOCAB), 1e-3)
        assert (found.kind, found.position, found.plain) == ("token", position, token)


def test_everything_else_that_may_differ(answers: list[Any]) -> None:
    own = answers[0].outputs[0]
    shorter = replace(own, token_ids=own.token_ids[:-2])
    rows = [dict(row) for row in own.logprobs]
    rows[3] = {token: Logprob(entry.logprob + 0.01, entry.rank) for token, entry in rows[3].items()}
    nan = [dict(row) for row in own.logprobs]
    nan[1][own.token_ids[1]] = Logprob(math.nan, 1)
    for other, kind, position in [
        (shorter, "length", 6),
        (replace(own, finish_reason="stop"), "finish", 8),
        (replace(own, stop_reason=4), "finish", 8),
        (replace(own, text="else"), "text", 8),
        (replace(own, logprobs=rows), "logprob", 3),
        (replace(own, logprobs=nan), "logprob", 1),
    ]:
        found = compare(own, other, 1e-3)
        assert found is not None
        assert (found.kind, found.position) == (kind, position)
    assert compare(own, replace(own, logprobs=rows), 0.1) is None


def test_questions_mix_options_temperatures_and_seeds() -> None:
    questions = ask([[1, 2, 3, 1, 2], [4]], replace(SMALL, num_seeds=2), has_tokenizer=True)
    assert {question.option for question in questions} == set(OPTIONS)
    asked = [(question.option, question.temperature, question.params.seed) for question in questions]
    assert len(asked) == len(set(asked)) == 2 * len(OPTIONS) * (1 + 2 * 2)
    assert max(question.final_len for question in questions) == 15
    with pytest.raises(ValueError, match="at least 4"):
        replace(SMALL, max_tokens=2)


# the statistics


def one_distribution() -> Distribution:
    probabilities = [0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02]
    return Distribution(tuple(range(10, 18)), tuple(probabilities))


def sampled(truth: Distribution, count: int, temperature: float = 1.0) -> list[tuple[Distribution, int]]:
    probabilities = torch.tensor([*truth.probabilities, 1 - sum(truth.probabilities)]) ** (1 / temperature)
    drawn = torch.multinomial(probabilities, count, replacement=True, generator=torch.Generator().manual_seed(1))
    tokens = [*truth.tokens, 99]
    return [(truth, tokens[place]) for place in drawn.tolist()]


def test_chi_squared_is_pearsons_test_for_a_single_distribution() -> None:
    truth = one_distribution()
    draws = sampled(truth, 1000)
    counts = [0.0] * (len(RANK_EDGES) + 1)
    for _, token in draws:
        counts[truth.bin_of(token)] += 1
    filled = [place for place, p in enumerate(truth.bins().tolist()) if p > 0]
    expected = [1000 * float(truth.bins()[place]) for place in filled]
    pearson = scipy.stats.chisquare([counts[place] for place in filled], expected)
    assert chi_squared(draws) == pytest.approx(pearson.pvalue, rel=1e-6)


def test_p_values_of_mixed_distributions_are_uniform() -> None:
    """Every draw from a distribution of its own: the covariance of the counts must be the right one."""
    generator = torch.Generator().manual_seed(2)
    values = []
    for _ in range(100):
        draws = []
        for _ in range(20):
            weights = torch.randn(24, generator=generator).mul(1.5).softmax(0).sort(descending=True).values
            truth = Distribution(tuple(range(20)), tuple(weights[:20].tolist()))
            drawn = torch.multinomial(weights, 10, replacement=True, generator=generator)
            draws += [(truth, token) for token in drawn.tolist()]
        values.append(chi_squared(draws))
    assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3


def test_draws_begin_where_there_is_a_choice() -> None:
    """After a prompt whose next word is certain a wrong distribution looks like the right one, so draws begin later, in
    an answer to it; and both of their tokens tell a wrong distribution from the right one."""
    with LLM(DEFAULT_DIRECTORY / "target", None, max_model_len=64) as llm:
        prompt = tuple(llm.get_tokenizer().encode("Once upon a"))
        assert next_distributions(llm, [prompt])[0].probabilities[0] > 0.999
        (output,) = llm.generate([list(prompt)], SamplingParams(temperature=1, seed=1, max_tokens=16, ignore_eos=True))
        (plan,) = plan_draws(llm, {prompt: output.outputs[0].token_ids})
        assert plan.prompt_token_ids[: len(prompt)] == prompt != plan.prompt_token_ids
        first, second = evaluate_draws(plan, draw(llm, plan.prompt_token_ids, plan.num_draws(1500)), llm)
        assert all(test.control_rejected and not test.differs for test in (first, second))


def test_a_wrong_distribution_is_rejected() -> None:
    truth = one_distribution()
    assert chi_squared(sampled(truth, 3000, CONTROL_TEMPERATURE)) < SIGNIFICANCE
    assert chi_squared(sampled(truth, 3000), CONTROL_TEMPERATURE) < SIGNIFICANCE
    assert chi_squared(sampled(truth, 3000, CONTROL_TEMPERATURE), CONTROL_TEMPERATURE) > SIGNIFICANCE
    assert chi_squared([]) == 1.0


# the command


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(questions_module, "QUICK", replace(SMALL, num_prompts=1))
    app = typer.Typer()
    add(app, "certify", certify_command)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_one_json_object(
    call: Callable[..., Any], pair: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [7, 8, 9, 7, 8, 9, 7, 8]}\n')
    result = call(
        *("--model", pair[0], "--draft", pair[1]["model"], "-k", 3, "--quick", "--prompts", prompts, "--json")
    )
    data = json.loads(result.stdout)
    assert result.exit_code == {"proven": 0, "inconclusive": 3}[data["verdict"]]
    assert data["num_speculative_tokens"] == 3
    assert data["counts"]["mismatches"] == 0


def test_a_mismatch_is_exit_status_one(
    call: Callable[..., Any], pair: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_round, "judge", accepts_anything)
    result = call("--model", pair[0], "--speculative-config", json.dumps(pair[1]), "--quick", "--max-tokens", 6)
    assert result.exit_code == 1
    assert "MISMATCH" in result.stdout
    assert "first divergence" in result.stdout


def test_text_without_a_tokenizer_is_refused_with_the_remedy(pair: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="prompt_token_ids"):
        certify(*pair, prompts=[PromptText("Hello")], effort=SMALL)
    with pytest.raises(ValueError, match="no prompt"):
        certify(*pair, prompts=[], effort=SMALL)
