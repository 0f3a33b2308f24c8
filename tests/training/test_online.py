"""A drafter that learns from what its engine says: what it may learn from, when it is swapped in, and taken back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM, SamplingParams
from outrider.layers.packing import numbers
from outrider.pair import DEFAULT_DIRECTORY
from outrider.training.checkpoint import read_fresh, write_drafter
from outrider.training.online import CURRENT, OnlineLearner, OnlineOptions
from outrider.training.optimizer import Rates

ASKED = [f"{begin} {what}" for begin in ("Once upon a time", "The little") for what in ("a dog", "the sea", "Anna ran")]
FAST = Rates(matrices=0.03, others=0.003, averaging=0.9)


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """The embedded drafter, with what it knows of the target's states lost: there is something to learn."""
    fresh = read_fresh(DEFAULT_DIRECTORY / "drafter")
    damaged = fresh.tensors["fc.weight"] * 0.2
    write_drafter(tmp_path / "spoilt", fresh.config, {**fresh.tensors, "fc.weight": damaged})
    return tmp_path / "spoilt"


@pytest.fixture
def llm(spoilt: Path) -> Iterator[LLM]:
    settings = {"model": str(spoilt), "num_speculative_tokens": 2, "force": True}
    with LLM(DEFAULT_DIRECTORY / "target", settings, device="cpu", threads=1, max_model_len=256) as opened:
        yield opened


def options(directory: Path) -> OnlineOptions:
    return OnlineOptions(directory, row_len=64, num_rows=4, steps_per_text=4, steps_per_version=8, rates=FAST)


def listening(llm: LLM, directory: Path) -> OnlineLearner:
    learner = OnlineLearner(llm, options(directory))
    llm.engine.drafting.listener = learner.heard
    return learner


def ask(llm: LLM, *, learn: bool) -> tuple[list[list[int]], float]:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, learn=learn)
    llm.reset_prefix_cache()
    outputs = [output.outputs[0] for output in llm.generate(ASKED, params)]
    rounds = sum(output.speculation.rounds for output in outputs)
    return [output.token_ids for output in outputs], sum(len(output.token_ids) for output in outputs) / rounds


def test_it_learns_is_swapped_in_and_taken_back(llm: LLM, tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    learner = listening(llm, versions)
    ask(llm, learn=False)
    assert learner.report()["heard"] == 0  # nobody allowed it
    assert not learner.work()
    texts, before = ask(llm, learn=True)
    for _ in range(2):
        ask(llm, learn=True)
        while learner.work():
            pass
    assert learner.judgements[0].swapped
    assert learner.version >= 1
    again, after = ask(llm, learn=False)
    assert again == texts  # whatever it drafts, the text is the target's
    assert after > before + 0.1, (before, after)
    assert (versions / CURRENT).read_text() == f"{learner.version}\n"
    (versions / CURRENT).write_text("0\n")
    learner.work()
    assert learner.version == 0
    assert ask(llm, learn=False)[1] == pytest.approx(before)
    newest = max(int(path.name) for path in versions.iterdir() if path.is_dir())
    first, last = (load_file(versions / str(number) / "model.safetensors") for number in (0, newest))
    assert first.keys() == last.keys()
    assert not torch.equal(first["fc.weight"], last["fc.weight"])


def test_what_is_no_better_is_not_swapped_in(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = listening(llm, tmp_path / "versions")
    assert llm.drafter is not None
    served = {name: value.clone() for name, value in numbers(llm.drafter)}
    ask(llm, learn=True)
    monkeypatch.setattr(learner, "expected_length", lambda values: 2.0)
    while learner.work():
        pass
    assert learner.judgements
    assert not any(judgement.swapped for judgement in learner.judgements)
    assert learner.version == 0
    assert all(torch.equal(value, served[name]) for name, value in numbers(llm.drafter))


def test_nothing_to_learn_with(tmp_path: Path) -> None:
    with (
        LLM(DEFAULT_DIRECTORY / "target", {"method": "ngram"}, device="cpu", threads=1, max_model_len=64) as llm,
        pytest.raises(ValueError, match="--learn needs a drafter"),
    ):
        OnlineLearner(llm, OnlineOptions(tmp_path))
