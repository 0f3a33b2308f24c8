"""What adding something costs, counted in files: a target, a drafter with a setting of its own and a sampling filter,
each written into one file of a package that is none of ours, and found by their entry points alone."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_registry import install

from outrider import LLM, SamplingParams
from outrider.kernels.filters import Filter, filters
from outrider.pair import DEFAULT_DIRECTORY

ROOT = Path(__file__).parent.parent
TARGET = """
from outrider.models.llama import Llama

class Toy(Llama):
    '''Llama with its logits scaled.'''
    def logits(self, last, out=None):
        return super().logits(last, out).mul_(self.config["toy_scale"])
"""
DRAFTER = """
from outrider.drafters.base import Drafter, no_draft
from outrider.types import Draft

class Stutter(Drafter):
    '''The newest token again, as often as its setting says.'''
    own_settings = {"stutter_times": 2}

    def __init__(self, lookahead, times):
        super().__init__()
        self.lookahead, self.times = lookahead, times

    @classmethod
    def build(cls, settings, target, checkpoint):
        return cls(settings.num_speculative_tokens, settings.own(cls.own_settings)["stutter_times"])

    def propose(self, step, hidden, verdict):
        if not step.depth:
            return no_draft(step, self.lookahead)
        slots = step.batch.slots
        newest = step.state.tokens[slots].gather(1, (step.state.lengths[slots, None] - 1).clamp(min=0))
        count = step.emits * min(self.times, step.depth)
        return Draft(newest.expand(-1, self.lookahead).contiguous(), count.long())
"""
FILTER = """
from outrider.kernels.filters import Filter

class TopA(Filter):
    '''Tokens at least so many times as likely as the square of the likeliest one's chance.'''
    @staticmethod
    def keeps(probs, value):
        return probs >= value[:, None] * probs.amax(-1, keepdim=True) ** 2
"""
POINTS = """
[outrider.targets]
ToyForCausalLM = toy_target:Toy
[outrider.drafters]
stutter = toy_drafter:Stutter
[outrider.filters]
top_a = toy_filter:TopA
"""
SCRIPT = """
import json, sys
from outrider import LLM, SamplingParams

model, said = sys.argv[1], {}
free = SamplingParams(max_tokens=24, temperature=1.5, seed=3, ignore_eos=True)
cut = SamplingParams(max_tokens=24, temperature=1.5, seed=3, ignore_eos=True, extra_args={"top_a": 0.9})
def answers(settings):
    with LLM(model, settings, max_model_len=128) as llm:
        return [output.outputs[0] for output in llm.generate(["a a a a", "The cat"] * 2, [free, free, cut, cut])]
said["plain"] = [each.token_ids for each in answers(None)]
for times in (1, 3):
    found = answers({"method": "stutter", "stutter_times": times, "adaptive": False})
    said[str(times)] = [each.token_ids for each in found]
    said[f"drafted {times}"] = max(len(each.speculation.drafted_at) for each in found)
for settings in ({"stutter_tims": 1}, {"stutter_times": "many"}):
    try:
        answers({"method": "stutter", **settings})
    except ValueError as error:
        said.setdefault("refused", []).append(str(error))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a program says that imports nothing but outrider, in an environment where the three are installed."""
    site, model = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("model")
    install(site, {"toy_target": TARGET, "toy_drafter": DRAFTER, "toy_filter": FILTER}, POINTS)
    for file in (DEFAULT_DIRECTORY / "target").iterdir():
        if file.name != "config.json":
            (model / file.name).symlink_to(file)
    config = json.loads((DEFAULT_DIRECTORY / "target" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["ToyForCausalLM"], "toy_scale": 0.8}))
    path = os.pathsep.join([str(site), str(ROOT / "src")])
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT, str(model)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_is_one_file(found: dict[str, object]) -> None:
    """The text is the target's own with the drafter, and the filter is part of what the target chooses."""
    assert found["plain"] == found["1"] == found["3"]
    free, cut = found["plain"][:2], found["plain"][2:]  # type: ignore[index]
    assert free != cut
    assert (found["drafted 1"], found["drafted 3"]) == (1, 3)


def test_settings_that_the_class_does_not_declare_are_refused(found: dict[str, object]) -> None:
    unknown, wrong = found["refused"]  # type: ignore[misc]
    assert "does not know stutter_tims; it takes " in unknown
    assert "stutter_times" in unknown
    assert "stutter_times must be a whole number, not 'many'" in wrong


class AtLeast(Filter):
    """Tokens of at least this probability. Off is a number that no token reaches: rows must not even be looked at."""

    off = 2.0

    @staticmethod
    def keeps(probs: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return probs >= value[:, None]


@pytest.fixture
def at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(filters) == []  # entry points have been looked for
    monkeypatch.setitem(filters._entries, "at_least", AtLeast)


ALONE = SamplingParams(temperature=2.0, seed=1, max_tokens=12, ignore_eos=True)


@pytest.mark.usefixtures("at_least", "recording")
def test_a_filter_is_recorded_and_touches_only_who_asks() -> None:
    """Nothing but the likeliest token passes 1: sampling becomes greedy, for one request of three."""
    params = [ALONE, replace(ALONE, extra_args={"at_least": 1.0}), replace(ALONE, temperature=0)]
    told = []
    for settings in (None, {"method": "ngram", "prompt_lookup_min": 1}):
        with LLM(None, settings, max_model_len=64, device="cpu") as llm:
            told.append([each.outputs[0].token_ids for each in llm.generate(["One day a a a"] * 3, params)])
            assert llm.engine.num_recorded_rounds > 0
    assert told[0] == told[1]
    free, cut, greedy = told[0]
    assert cut == greedy != free


def test_a_filter_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(None, None, max_model_len=64) as llm:
        monkeypatch.setitem(filters._entries, "at_least", AtLeast)
        with pytest.raises(ValueError, match="at_least: register a filter before the LLM is made"):
            llm.generate("One", replace(ALONE, extra_args={"at_least": 1.0}))


@pytest.mark.usefixtures("at_least")
def test_what_may_be_asked_of_filters() -> None:
    with LLM(None, None, max_model_len=64) as llm:
        with pytest.raises(ValueError, match="at_least must be a number between 0 and 1, not 3"):
            llm.generate("One", SamplingParams(extra_args={"at_least": 3}))
        with pytest.raises(ValueError, match="unknown sampling filter 'at_lest'; did you mean 'at_least'"):
            llm.generate("One", SamplingParams(extra_args={"at_lest": 0.5}))
    with pytest.raises(ValueError, match="extra_args must be a dict"):
        SamplingParams(extra_args=["at_least"])  # type: ignore[arg-type]
