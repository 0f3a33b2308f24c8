"""What a drafter hands over has the form that the engine made room for; so has what the drafter of the docs does."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, drafters
from outrider.llm import total_speculation
from outrider.models.base import Target
from outrider.types import Checkpoint, Draft, Hidden, Step, Verdict

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "add_a_drafter.py"
PROMPTS = [[5, 6, 7, 8, 9] * 5, [40, 41], list(range(60, 90)), [3] * 20, [11, 12, 13]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)

MISTAKES: dict[str, Callable[[Draft], Draft]] = {
    "too narrow": lambda draft: Draft(draft.tokens[:, 1:], draft.count),
    "too wide": lambda draft: Draft(torch.cat([draft.tokens, draft.tokens], 1), draft.count),
    "too few rows": lambda draft: Draft(draft.tokens[1:], draft.count[1:]),
    "counts in a column": lambda draft: Draft(draft.tokens, draft.count[:, None]),
    "small integers": lambda draft: Draft(draft.tokens.int(), draft.count),
}


@pytest.fixture
def registered() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(drafters._entries)
    yield
    drafters._entries.clear()
    drafters._entries.update(before)


class Careless(Drafter):
    reads_tokens_only = True
    mistake: Callable[[Draft], Draft] = staticmethod(lambda draft: draft)

    def __init__(self, lookahead: int) -> None:
        super().__init__()
        self.lookahead = lookahead

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Drafter:
        return cls(settings.num_speculative_tokens)

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        count = torch.where(step.emits, step.depth, 0)
        return self.mistake(Draft(count.new_zeros(len(count), self.lookahead), count))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_draft_of_another_form_is_refused(
    mistake: str, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters.register("careless")(Careless)
    settings = {"method": "careless", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(target_path(), settings, max_model_len=64) as llm:
        assert len(llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids) == 24
        monkeypatch.setattr(Careless, "mistake", staticmethod(MISTAKES[mistake]))
        with pytest.raises(AssertionError, match=r"Careless\.propose: tokens and count must be"):
            llm.generate(PROMPTS[1], GREEDY)


@pytest.fixture(params=["eager", "recorded"])
def rounds(request: pytest.FixtureRequest) -> str:
    if request.param == "recorded":
        request.getfixturevalue("recording")
    return request.param


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_drafter_of_the_docs(rounds: str, params: SamplingParams, target_path: Callable[..., Path]) -> None:
    """It is registered as the file is run. Prompts come in chunks, requests side by side."""
    runpy.run_path(str(EXAMPLE))
    settings = {"method": "echo", "num_speculative_tokens": 3, "adaptive": False}
    small = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    with LLM(target_path(), None, **small, enforce_eager=True) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    with LLM(target_path(), settings, **small) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert (llm.engine.num_recorded_rounds > 0) == (rounds == "recorded")
    assert [output.outputs[0].token_ids for output in outputs] == plain
    total = total_speculation(outputs)
    assert total.drafted > total.accepted
    assert total.drafted > 20
