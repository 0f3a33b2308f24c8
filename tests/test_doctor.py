"""The doctor on the embedded pair, healthy and with planted faults, and the short form that every load goes through."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider import agreement as agreement_module
from outrider.agreement import Agreement, DraftPlace, check_up, measure_agreement, question_ids
from outrider.cli import app
from outrider.doctor.diagnosis import FAULT, GOOD, Diagnosis, Finding
from outrider.doctor.examination import DoctorEffort, examine
from outrider.doctor.readings import compare, differing_rotaries, rope_settings, trials
from outrider.doctor.rounding import rounded, rounded_weights
from outrider.engine.policy import FixedDepth
from outrider.kernels.quantised import Kind
from outrider.layers.packing import numbers
from outrider.llm import LLM, total_speculation
from outrider.pair import DEFAULT_DIRECTORY
from outrider.sampling_params import SamplingParams
from outrider.startup import CHECKING

Tensors = dict[str, torch.Tensor]
SMALL = DoctorEffort(num_prompts=12, max_tokens=24, num_long=0)
TAPS = "eagle_aux_hidden_state_layer_ids"


def plant(directory: Path, change: Callable[[Tensors], Tensors | None] | None = None, **config: Any) -> dict[str, Any]:
    """The embedded drafter with something changed, as speculative_config."""
    path = directory / "drafter"
    shutil.copytree(DEFAULT_DIRECTORY / "drafter", path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, **config}))
    if change is not None:
        tensors = load_file(path / "model.safetensors")
        save_file(change(tensors) or tensors, path / "model.safetensors")
    return {"model": str(path), "num_speculative_tokens": 3}


def diagnose(settings: dict[str, Any], **options: Any) -> Diagnosis:
    return examine(None, settings, effort=SMALL, **options)


def names(diagnosis: Diagnosis) -> list[str]:
    return [tried.name for tried in diagnosis.remedy]


def faults(diagnosis: Diagnosis) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.level == FAULT]


# health


def test_the_embedded_pair_is_healthy(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    diagnosis = diagnose(plant(tmp_path), progress=lambda *what: told.append(what))
    assert diagnosis.verdict == "healthy"
    assert diagnosis.exit_status == 0
    assert diagnosis.remedy == []
    assert diagnosis.advice == []
    assert all(finding.level == GOOD for finding in diagnosis.findings)
    assert {"taps +1", "taps -1", "norm_output false"} <= {tried.name for tried in diagnosis.tried}
    assert diagnosis.agreement.speculation.accept_length > 2
    fp8, int4 = diagnosis.rounded
    assert (fp8.name, int4.name) == ("fp8", "int4")
    assert abs(fp8.gain) < 0.2
    assert fp8.accept_length > int4.accept_length > 1.5
    assert diagnosis.provenance["taps"].value == (2, 6, 9)
    done = [step for _, step, _ in told]
    assert done == sorted(done)
    assert all(step <= total for _, step, total in told)
    assert told[-1][1] > told[0][2] // 2  # the bar gets somewhere


# planted faults


def _in_range_absolute(tensors: Tensors) -> Tensors:
    """A head of fewer tokens, whose d2t holds the target's ids, all small enough to pass for offsets."""
    kept = torch.arange(0, 3000, dtype=torch.long)[torch.arange(3000) != 1000]
    kept = kept[kept + torch.arange(len(kept)) < 4096]  # what is left after reading them as offsets
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept].contiguous()
    tensors["d2t"] = kept
    return tensors


def _with_a_large_norm(tensors: Tensors) -> None:
    """The same head, but that its states are normed to 4,096 times the size, which attention is told: then it matters
    whether the normed ones are the residual, which is small beside what its layer makes of it."""
    tensors["midlayer.hidden_norm.weight"] *= 4096
    for name in ("q", "k", "v"):
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        weight[:, weight.shape[1] // 2 :] /= 4096


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "taps off by one": ({TAPS: [1, 5, 8]}, "taps +1", "[2, 6, 9]"),
    "a norm too many": ({"norm_before_residual": True}, "norm_before_residual false", '"norm_before_residual": false'),
    "a norm too few": ({"norm_output": False}, "norm_output true", '"norm_output": true'),
    "another rope": ({"rope_theta": 100.0}, "rotary frequencies of the target", "rope_theta 10000.0"),
    "d2t absolute": ({"draft_vocab_size": 2048}, "d2t absolute", "target id - draft id"),
}


CHANGES = {"d2t absolute": _in_range_absolute, "a norm too many": _with_a_large_norm}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    config, reading, advice = FAULTS[name]
    diagnosis = diagnose(plant(tmp_path, CHANGES.get(name), **config))
    assert names(diagnosis) == [reading]
    assert diagnosis.verdict == "misread"
    assert diagnosis.exit_status == 1
    assert advice in diagnosis.advice[0]
    (best,) = diagnosis.remedy
    assert best.agreement.speculation.accept_length > diagnosis.agreement.speculation.accept_length


def test_d2t_that_cannot_be_offsets_is_read_as_ids_and_said_so(tmp_path: Path) -> None:
    def absolute(tensors: Tensors) -> None:
        tensors["d2t"] = torch.arange(len(tensors["lm_head.weight"]))

    settings = plant(tmp_path, absolute)
    diagnosis = examine(None, settings, effort=DoctorEffort(8, 12, num_long=0))
    assert diagnosis.verdict == "healthy"
    assert diagnosis.provenance["target_ids"].value != "offsets"


def _untrained(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() > 1:
            tensors[name] = (0.02 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


def test_an_untrained_head_is_dead_and_what_is_suspicious_is_said(tmp_path: Path) -> None:
    settings = plant(tmp_path, _untrained, rope_theta=500.0)
    diagnosis = examine(None, settings, effort=DoctorEffort(8, 12, num_long=0))
    assert diagnosis.verdict == "dead"
    assert diagnosis.exit_status == 1
    assert diagnosis.remedy == []
    said = "\n".join(diagnosis.advice)
    assert "trained for another target" in said
    assert "frequencies are not those of the target" in said
    assert "norm_before_residual" in said  # nothing in the checkpoint says it


def test_damaged_weights_and_a_poor_vocabulary_are_noticed(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> Tensors:
        tensors["norm.weight"].zero_()
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:64].contiguous()
        tensors["d2t"] = 4000 + torch.zeros(64, dtype=torch.long)
        return tensors

    settings = plant(tmp_path, damage, draft_vocab_size=64)
    diagnosis = examine(None, settings, effort=DoctorEffort(4, 12, num_long=0))
    assert [finding.subject for finding in faults(diagnosis)] == ["weights", "coverage"]
    assert "norm.weight" in faults(diagnosis)[0].message


@pytest.mark.parametrize(("share", "verdict"), [(0.02, "healthy"), (0.2, "faulty")])
def test_a_map_that_names_tokens_twice_is_judged_as_it_is_shown(share: float, verdict: str, tmp_path: Path) -> None:
    """Some ids may be padding; with many, the map is wrong, however well the others draft."""

    def repeat(tensors: Tensors) -> None:
        size = len(tensors["lm_head.weight"])
        count = int(share * size)
        tensors["d2t"] = torch.zeros(size, dtype=torch.long)
        tensors["d2t"][-count:] = -torch.arange(size - count, size)  # all to token 0

    diagnosis = diagnose(plant(tmp_path, repeat))
    (found,) = [finding for finding in diagnosis.findings if finding.subject == "vocabulary"]
    assert "tokens that others stand for" in found.message
    assert not diagnosis.agreement.is_dead
    assert diagnosis.verdict == verdict
    assert (found.level == FAULT) == (verdict == "faulty")
    assert diagnosis.exit_status == (1 if verdict == "faulty" else 0)
    assert any("d2t" in line for line in diagnosis.advice) == (verdict == "faulty")


def test_lengths_and_differences_of_readings_agree(tmp_path: Path) -> None:
    """A reading that is given up early has drafted at few places: it is compared over these alone."""
    diagnosis = diagnose(plant(tmp_path))
    assert len(diagnosis.tried) > 2
    assert any(len(tried.agreement.places) < len(diagnosis.agreement.places) for tried in diagnosis.tried)
    for tried in diagnosis.tried:
        entry = tried.to_dict()
        shared = {(place.text, place.context_len) for place in tried.agreement.places}
        known = [each for each in diagnosis.agreement.places if (each.text, each.context_len) in shared]
        assert len(known) == len(tried.agreement.places)
        assert entry["accept_length"] == pytest.approx(tried.agreement.mean_accept_length, abs=1e-3)
        assert entry["accept_length_as_read"] == pytest.approx(1 + sum(p.agreed for p in known) / len(known), abs=1e-3)
        assert entry["gain"] == pytest.approx(entry["accept_length"] - entry["accept_length_as_read"], abs=1e-3)


def test_another_tokenizer_and_fewer_positions_are_noticed(tmp_path: Path) -> None:
    settings = plant(tmp_path, max_position_embeddings=256)
    tiny.save_tokenizer(tmp_path / "drafter")
    diagnosis = examine(None, settings, effort=DoctorEffort(2, 4, num_long=0))
    assert diagnosis.verdict == "unclear"  # too little text
    assert diagnosis.exit_status == 3
    levels = {finding.subject: finding.level for finding in diagnosis.findings}
    assert levels["tokenizer"] == FAULT
    assert levels["positions"] == "note"


def test_without_a_tokenizer_a_dead_drafter_is_not_condemned(target_path: Callable[..., Path], tmp_path: Path) -> None:
    head = {"model": str(tiny.save_eagle3(tmp_path / "head"))}
    diagnosis = examine(target_path("llama"), head, effort=SMALL)
    assert diagnosis.agreement.is_dead
    assert diagnosis.verdict == "unclear"
    assert "--prompts" in diagnosis.advice[0]


# measuring


@pytest.fixture(scope="module")
def pair() -> Any:
    with LLM(page_size=8) as llm:
        yield llm


def test_the_accept_length_is_the_engines_own(pair: LLM) -> None:
    assert pair.tokenizer is not None
    prompts = [question_ids(pair.tokenizer, f"Tell me a story about a {name}.") for name in ("dog", "boat", "tree")]
    found = measure_agreement(pair.engine, pair.drafter, prompts, 40)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=40)
    with pair.engine.drafting_with(FixedDepth(pair.engine.lookahead)):
        outputs = pair.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    assert [list(text) for text in found.texts] == [output.outputs[0].token_ids for output in outputs]
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert found.speculation == total_speculation(outputs)
    assert len(found.places) == 3 * 39
    assert sum(len(found.within(low, low + 16).places) for low in range(0, 96, 16)) == len(found.places)


def test_what_is_known_early_is_what_is_known_in_the_end(pair: LLM) -> None:
    """While texts grow, a draft is not judged before all of it can be."""
    prompts = [[1, 2, 3], [50, 60], [7, 7, 7]]
    whole = measure_agreement(pair.engine, pair.drafter, prompts, 24)  # type: ignore[arg-type]
    early: list[Agreement] = []

    def enough(agreement: Agreement) -> bool:
        early.append(agreement)
        return len(early) == 12

    last = measure_agreement(pair.engine, pair.drafter, prompts, 24, enough=enough)  # type: ignore[arg-type]
    assert last == early[-1]
    assert len(early[-1].places) > len(early[-2].places) > 0
    assert set(last.places) < set(whole.places)


def test_measuring_leaves_no_trace(pair: LLM) -> None:
    before = pair.engine.drafting, pair.engine.scheduler
    hits, free = pair.engine.scheduler.prefixes.stats.queried, pair.engine.scheduler.pool.num_free
    for trial in trials(pair.drafter, pair.target):  # type: ignore[arg-type]
        with trial.enter(pair.drafter) as other:  # type: ignore[arg-type]
            measure_agreement(pair.engine, other, [[1, 2, 3]], 3)
    with pytest.raises(RuntimeError, match="stop"):
        measure_agreement(pair.engine, pair.drafter, [[1, 2, 3]], 3, on_step=_fail)  # type: ignore[arg-type]
    assert (pair.engine.drafting, pair.engine.scheduler) == before
    assert (pair.engine.scheduler.prefixes.stats.queried, pair.engine.scheduler.pool.num_free) == (hits, free)
    assert not pair.engine.has_work


def test_measuring_ends_while_rounds_are_under_way(recording: None) -> None:
    """One of them may bring an answer's last token, to a request that nobody knows any more."""
    asked: Any = ([1, 2, 3], SamplingParams(temperature=0, max_tokens=8))
    with LLM(page_size=8, max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert llm.drafter is not None
        said = llm.generate(*asked)[0].outputs[0].token_ids
        for steps in range(1, 8):
            seen: list[Agreement] = []

            def enough(found: Agreement, seen: list[Agreement] = seen, steps: int = steps) -> bool:
                seen.append(found)
                return len(seen) == steps

            measure_agreement(llm.engine, llm.drafter, [[7, 8], [50, 60]], 4, enough=enough)
            assert len(seen) == steps
            assert not llm.engine.has_work
            assert llm.generate(*asked)[0].outputs[0].token_ids == said


def _fail(done: int, most: int) -> None:
    raise RuntimeError("stop")


def test_rounding_leaves_no_trace(pair: LLM) -> None:
    drafter = pair.drafter
    assert drafter is not None
    before = {name: each.clone() for name, each in numbers(drafter)}
    with rounded(drafter, Kind.INT4):
        changed = {name for name, each in numbers(drafter) if not each.equal(before[name])}
        assert changed == set(rounded_weights(drafter, Kind.INT4))
        assert not any("norm" in name or "embed" in name for name in changed)
    assert all(each.equal(before[name]) for name, each in numbers(drafter))


def test_drafts_are_compared_place_by_place() -> None:
    def of(agreed: list[int]) -> Agreement:
        return Agreement(tuple(DraftPlace(0, 10 + at, 3, count) for at, count in enumerate(agreed)), ())

    assert compare(of([1] * 40), of([1] * 40), 3) == (0.0, 0.0)
    gain, deviations = compare(of([2, 1] * 20), of([1, 1] * 20), 3)
    assert gain == 0.5
    assert deviations > 3
    gain, deviations = compare(of([3, *[0] * 39]), of([0] * 40), 3)
    assert 0 < deviations < 3  # one lucky place is no evidence
    assert compare(of([1] * 40), of([1]), 3) == (0.0, 0.0)  # nothing to compare
    assert of([0] * 40).is_dead
    assert not of([0] * 10).is_dead  # too few to say
    assert not of([1] * 40).is_dead


def test_rope_settings_are_the_targets_and_only_where_there_is_one(tmp_path: Path) -> None:
    assert rope_settings({"rope_theta": 1e4, "x": 1}) == {"rope_theta": 1e4}
    assert rope_settings({"text_config": {"rope_theta": 1e4}}) == {"rope_theta": 1e4}
    assert rope_settings({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}) == {}
    with LLM(None, plant(tmp_path, rope_theta=77.0) | {"force": True}) as llm:
        assert llm.drafter is not None
        ((own, theirs),) = differing_rotaries(llm.drafter, llm.target)
        (trial,) = [each for each in trials(llm.drafter, llm.target) if each.name.startswith("rotary")]
        before = own.inv_freq.clone()
        with trial.enter(llm.drafter):
            assert own.inv_freq.equal(theirs.inv_freq)
            assert differing_rotaries(llm.drafter, llm.target) == []
        assert own.inv_freq.equal(before)


# at load


def test_a_dead_drafter_is_refused_at_load_unless_forced(tmp_path: Path) -> None:
    settings = plant(tmp_path, _untrained)
    with pytest.raises(ValueError, match=r"does not agree .*outrider doctor .*force"):
        LLM(None, settings)
    with LLM(None, {**settings, "force": True}) as llm:
        assert llm.checkup is None
    with pytest.raises(ValueError, match="force must be"):
        LLM(None, {**settings, "force": "yes"})


@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_a_living_drafter_is_soon_known_to_be(max_num_seqs: int) -> None:
    with LLM(max_num_seqs=max_num_seqs) as llm:
        checkup = llm.checkup
        assert checkup is not None
        assert checkup.agreement is not None
        assert checkup.agreement.mean_accept_length > 1.5
        assert len(checkup.agreement.places) < 8 * agreement_module.SHORT_ANSWER // 2
        assert llm.engine.scheduler.prefixes.stats.queried == 0


def test_a_check_up_takes_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model on a CPU takes long for an answer. Its drafter is given the benefit of the doubt."""
    settings = plant(tmp_path, _untrained)
    seen: list[tuple[str, int, int]] = []
    with LLM(None, {**settings, "force": True}, max_num_seqs=1) as llm:
        monkeypatch.setattr(agreement_module, "USUAL_SECONDS", 0.0)
        checkup = check_up(llm.engine, lambda done, most: seen.append(("", done, most)))
        assert checkup.agreement is not None
        assert agreement_module.MIN_PLACES <= len(checkup.agreement.places) < 2 * agreement_module.MIN_PLACES
        assert checkup.is_dead
        assert len(seen) > agreement_module.MIN_PLACES
    monkeypatch.setattr(agreement_module, "MAX_SECONDS", 0.0)
    seen.clear()
    with LLM(None, settings, max_num_seqs=1, progress=lambda *step: seen.append(step)) as llm:
        assert llm.checkup is not None
        assert not llm.checkup.is_dead
        assert [step for step in seen if step[0] == CHECKING] == [(CHECKING, 1, 128)]


def test_what_cannot_be_checked_is_not_refused(target_path: Callable[..., Path], tmp_path: Path) -> None:
    head = {"model": str(tiny.save_eagle3(tmp_path / "head"))}
    with LLM(target_path("llama"), head, max_model_len=64) as llm:
        assert llm.checkup is not None
        assert "tokenizer" in llm.checkup.note
    with LLM(None, plant(tmp_path), max_model_len=16) as llm:
        assert "too short" in check_up(llm.engine).note
    with LLM(None, {"method": "ngram"}) as llm:
        assert "no drafter with weights" in check_up(llm.engine).note


# the command


def test_the_command_prints_one_object_or_a_report(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ("Tell me a story about a dog.", "Tell me about the sea.", "Why is the sky blue?")
    prompts.write_text("\n".join(json.dumps({"turns": [text]}) for text in texts))
    (tmp_path / "head").mkdir()
    settings = plant(tmp_path / "head", _untrained)
    options = ["--prompts", str(prompts), "-n", "16", "-k", "2"]
    result = CliRunner().invoke(
        app, ["doctor", str(DEFAULT_DIRECTORY / "target"), settings["model"], *options, "--json"]
    )
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["verdict"] == "dead"
    assert report["accept_length"] == 1.0
    assert report["provenance"]["taps"]["value"] == [2, 6, 9]
    assert report["by_context_length"][0]["from"] == 0
    assert {entry["reading"] for entry in report["readings"]} >= {"taps +1", "taps -1"}
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 0, result.output
    for words in ("how the drafter was read", "eagle_aux_hidden", "accept length", "HEALTHY"):
        assert words in result.stdout


def test_a_mistake_in_the_command_has_status_two(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(DEFAULT_DIRECTORY / "target")])
    assert result.exit_code == 2
    assert "give a drafter too" in result.output
    result = CliRunner().invoke(app, ["doctor", str(DEFAULT_DIRECTORY / "target"), str(tmp_path)])
    assert result.exit_code == 2
    assert "config.json is missing" in result.output
