"""Predicted outputs: where an answer stands in a prediction, and that nothing but the speed depends on it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import METHODS, drafter_settings, guide, sample_target, suits

from outrider import LLM, Guided, RequestOutput, SamplingParams
from outrider.drafters.predicted import LONGEST, SHORTEST, align, continuation
from outrider.engine.pages import PagePool
from outrider.engine.request import Request
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Scheduler, SchedulerLimits
from outrider.prompts import tokens_after
from outrider.sampling_params import MAX_PREDICTION
from outrider.tokenizer import Tokenizer
from outrider.types import Prediction

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, seed=11)
SMALL: dict[str, Any] = {"max_model_len": 128, "page_size": 4}
PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5], [7, 8, 9], [20, 21, 20, 21, 20]]
ASKED = [{"role": "user", "content": "Tell me about walking in nature."}]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [each.token_ids for output in outputs for each in output.outputs]


# where an answer stands


class Slow:
    """The rules once more, without arithmetic: one token after the other, all places tried."""

    def __init__(self, prediction: list[int]) -> None:
        self.prediction, self.answer = prediction, list[int]()
        self.place, self.agreed = 0, 0

    def add(self, tokens: list[int]) -> None:
        lost = False
        for token in tokens:
            self.answer.append(token)
            if not lost and self.prediction[self.place : self.place + 1] == [token]:
                self.place, self.agreed = self.place + 1, self.agreed + 1
            else:
                lost = True
        if lost:
            self.find()

    def find(self) -> None:
        sizes = {place: self.size(place) for place in range(1, len(self.prediction) + 1)}
        longest = max(sizes.values(), default=0)
        self.agreed = longest if longest >= SHORTEST else 0
        if self.agreed:
            places = [place for place, size in sizes.items() if size == longest]
            self.place = min([place for place in places if place >= self.place] or [max(places)])

    def size(self, place: int) -> int:
        """How many tokens before the place are the answer's last."""
        most = min(place, len(self.answer), LONGEST)
        return next((n for n in range(most, 0, -1) if self.prediction[place - n : place] == self.answer[-n:]), 0)

    def draft(self, most: int) -> list[int]:
        at_start = self.place == self.agreed == len(self.answer)
        count = most if at_start else min(most, self.agreed) if self.agreed >= SHORTEST else 0
        return self.prediction[self.place : self.place + count]


small_texts = st.lists(st.integers(0, 2), max_size=40)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(prediction=small_texts, chunks=st.lists(st.one_of(small_texts, st.integers(0, 8)), max_size=10))
def test_the_place_is_the_slow_one_s(prediction: list[int], chunks: list[list[int] | int]) -> None:
    """An answer in pieces: some of its own, some as the prediction goes on."""
    fast, slow = Prediction(np.array(prediction, dtype=np.int64), begin=5), Slow(prediction)
    for chunk in chunks:
        new = prediction[slow.place : slow.place + chunk] if isinstance(chunk, int) else chunk
        if not new:
            continue
        slow.add(new)
        recent = ([9] * 5 + slow.answer)[-(LONGEST + 8 + 1) :]  # the end of the prompt may be among them
        if len(new) > len(recent):
            return
        align(fast, len(slow.answer), recent)
        assert (fast.place, fast.num_agreed) == (slow.place, slow.agreed)
        for most in (0, 1, 4, 100):
            assert continuation(fast, most).tolist() == slow.draft(most)


def test_a_step_that_is_done_again_does_no_harm() -> None:
    prediction = Prediction(np.arange(50), begin=0)
    align(prediction, 10, list(range(10)))
    align(prediction, 14, list(range(14)))
    for length in (14, 10, 12):
        align(prediction, length, list(range(length)))
        assert continuation(prediction, 3).tolist() == [length, length + 1, length + 2]


def edited(text: list[int]) -> list[int]:
    """A token replaced, some left out, some inserted."""
    return [*text[:8], 255, *text[9:20], *text[23:30], 250, 251, *text[30:]]


@pytest.mark.parametrize("edit", ["replaced", "left out", "inserted"])
def test_the_place_is_found_again_after_an_edit(edit: str, target_path: Callable[..., Path]) -> None:
    with LLM(target_path("llama"), None, **SMALL) as llm:
        answer = ids(llm.generate([PROMPTS[1]], SEEDED))[0]
        assert len(set(answer)) > 30, "few of its tokens are alike, so that places are certain"
        changed = {
            "replaced": [*answer[:10], 255, *answer[11:]],
            "left out": answer[:10] + answer[14:],
            "inserted": [*answer[:10], 250, 251, 252, 253, *answer[10:]],
        }[edit]
        (output,) = llm.generate([PROMPTS[1]], replace(SEEDED, prediction=changed))
    assert output.outputs[0].token_ids == answer
    assert output.outputs[0].speculation.accepted_predicted >= 20


# the answer is the same


CASES = [("llama", method) for method in METHODS if suits(method, "llama")] + [
    ("gemma4", "gemma4_assistant"),
    ("nemotron_h", "draft_model"),
    ("llama", "ngram+eagle3"),
    ("llama", "none"),
    ("deepseek_v3", "none"),
    ("gemma3", "none"),
]


@pytest.mark.parametrize(("family", "method"), CASES)
def test_answers_are_the_targets(family: str, method: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """With every drafter and with none; in company with requests that predict nothing, or nonsense."""
    path, config = sample_target(method, tmp_path, target_path, family), None
    if method != "none":
        config = drafter_settings(method.split("+")[-1], tmp_path, target_path, family)
        config |= {"method": method, "prompt_lookup_min": 1} if "+" in method else {}
    prompts = PROMPTS * 2
    for params in (GREEDY, SEEDED):
        with LLM(path, None, **SMALL) as llm:
            truth = ids(llm.generate(prompts, params))
        predictions = [truth[0], None, edited(truth[2]), [5] * 30, [], truth[5][:9]]
        asked = [replace(params, prediction=each) for each in predictions]
        with LLM(path, config, **SMALL) as llm:
            if llm.drafter is not None:
                guide(llm.drafter, [p + t for p, t in zip(prompts, truth, strict=True)], llm.target.vocab_size)
            outputs = llm.generate(prompts, asked)
            llm.engine.scheduler.pool.check()
        assert ids(outputs) == truth
        made = [output.outputs[0].speculation for output in outputs]
        assert made[0].accepted_predicted == made[0].predicted > 15
        assert made[1].predicted == made[4].predicted == 0
        assert made[2].accepted_predicted > 7
        assert made[2].predicted > made[2].accepted_predicted


@pytest.mark.parametrize("way", ["preemption", "small budget"])
def test_answers_are_the_targets_when_there_is_little_room(way: str, target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    prompts = [[number + 3, *range(40, 40 + number)] for number in range(8)]
    with LLM(path, None, **SMALL) as llm:
        truth = ids(llm.generate(prompts, SEEDED))
        page_bytes = llm.budget.page_bytes
    options = {"kv_cache_memory": page_bytes * 40, "max_model_len": 64} if way == "preemption" else {}
    options |= {"max_num_batched_tokens": 20} if way == "small budget" else {}
    with LLM(path, None, **{**SMALL, **options}, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, [replace(SEEDED, prediction=edited(text)) for text in truth])
        scheduler = llm.engine.scheduler
        assert scheduler.num_preemptions > 0 or way != "preemption"
        assert scheduler.pool.num_free == scheduler.pool.capacity
    assert ids(outputs) == truth
    assert sum(output.outputs[0].speculation.accepted_predicted for output in outputs) > 60


def test_tokens_are_counted_exactly(target_path: Callable[..., Path]) -> None:
    path, params = target_path("llama"), replace(SEEDED, trace=True)
    with LLM(path, None, **SMALL, num_predicted_tokens=8) as llm:
        truth = ids(llm.generate([PROMPTS[0]], params))[0]
        for prediction in (truth, truth[:20], [*truth[:14], 255, 254, 253], truth[:1], [255, 254], []):
            (output,) = llm.generate([PROMPTS[0]], replace(params, prediction=prediction))
            made, trace = output.outputs[0].speculation, output.outputs[0].trace or []
            assert made.predicted == made.drafted == sum(len(entry["draft"]) for entry in trace)
            assert made.accepted_predicted == made.accepted == sum(entry["accepted"] for entry in trace)
            if prediction is truth:  # the first token and one of every round are the target's own
                assert [len(entry["draft"]) for entry in trace] == [8, 8, 8, 8, 2]
                assert made.accepted == made.drafted
            if len(prediction) == 17:
                assert (made.drafted, made.accepted) == (8 + 7, 8 + 4)


def test_where_the_prediction_is_silent_the_drafter_is_heard(target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    with LLM(path, {"method": "draft_model", "model": str(path), "num_speculative_tokens": 4}, **SMALL) as llm:
        truth = ids(llm.generate([PROMPTS[0]], GREEDY))[0]
        (output,) = llm.generate([PROMPTS[0]], replace(GREEDY, prediction=truth[:10], trace=True))
    made, lengths = output.outputs[0].speculation, [len(entry["draft"]) for entry in output.outputs[0].trace or []]
    assert lengths[0] == made.predicted == 9
    assert set(lengths[1:-1]) == {4}
    assert made.accepted == made.drafted


# who pays


def test_others_pay_nothing(target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a drafter, a request without a prediction has one row in every step, and alone it meets no drafter."""
    rows: dict[str, set[int]] = {}
    pack = Runner.pack

    def watched(self: Runner, plan: Any, shape: Any) -> Any:
        for work in plan:
            if work.request.num_outputs:
                rows.setdefault(work.request.request_id, set()).add(work.num_rows)
        return pack(self, plan, shape)

    monkeypatch.setattr(Runner, "pack", watched)
    with LLM(target_path("llama"), None, **SMALL) as llm:
        assert llm.engine.lookahead == 0
        truth = ids(llm.generate(PROMPTS, GREEDY))
        assert list(rows.values()) == [{1}] * 3
        rows.clear()
        llm.generate(PROMPTS[:2], [replace(GREEDY, prediction=truth[0]), GREEDY])
        first, second = rows.values()
        assert max(first) == 17
        assert second == {1}
        llm.engine.drafting.predicting = None  # would raise if it were asked
        llm.generate(PROMPTS, GREEDY)


def test_every_request_moves_in_every_step() -> None:
    """Long drafts leave room for those who come after them."""
    limits = SchedulerLimits(max_num_seqs=5, max_num_batched_tokens=11, max_model_len=400, page_size=4, lookahead=1)
    scheduler = Scheduler(limits, PagePool(500))
    requests = [Request(f"r{number}", [1], SamplingParams(max_tokens=300), seed=0) for number in range(5)]
    for request in requests:
        scheduler.add(request)
    longest = 0
    for _ in range(20):
        plan = scheduler.next(depth=1).work
        assert [work.request for work in plan] == requests
        assert sum(work.num_rows for work in plan) <= 11
        longest = max(longest, *(work.allowed for work in plan))
        for work in plan:
            for _ in range(1 + work.allowed):
                work.request.append(2, 400)
            scheduler.update(work, work.num_rows, 16 if work.request is not requests[3] else 0)
    assert longest > limits.lookahead


def test_speculation_of_a_request_holds_for_its_prediction(target_path: Callable[..., Path]) -> None:
    for config in (None, {"method": "ngram"}):
        with LLM(target_path("llama"), config, **SMALL) as llm:
            truth = ids(llm.generate([PROMPTS[1]], GREEDY))[0]
            limited = replace(GREEDY, prediction=truth, num_speculative_tokens=2, trace=True)
            (short,) = llm.generate([PROMPTS[1]], limited)
            (none,) = llm.generate([PROMPTS[1]], replace(limited, num_speculative_tokens=0))
        assert max(len(entry["draft"]) for entry in short.outputs[0].trace or []) == 2
        assert none.outputs[0].speculation.drafted == 0
        assert ids([short, none]) == [truth, truth]


# text, and what else a request may hold


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(None, None) as llm:
        yield llm


def test_a_text_is_spelt_as_the_target_spells_it(llm: LLM) -> None:
    """All of an answer is accepted, but for the first token and those that the target adds in every round."""
    for number, prompt in enumerate(
        (llm.chat_prompt(ASKED), "The sun is", "Once upon a time there was a ", "He said:")
    ):
        params = SamplingParams(temperature=0, max_tokens=60)
        plain = llm.generate([prompt], params)[0].outputs[0]
        made = llm.generate([prompt], replace(params, prediction=plain.text))[0].outputs[0]
        assert made.token_ids == plain.token_ids
        assert made.speculation.accepted_predicted == made.speculation.predicted > len(plain.token_ids) * 0.8, number


def test_a_tokenizer_that_begins_texts_with_a_space() -> None:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "▁a": 1, "▁b": 2, "b": 3, "\n": 4}, "<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first"),
            tokenizers.pre_tokenizers.Split("\n", "isolated"),
        ]
    )
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("b", add_special_tokens=False) == [2]
    assert tokens_after([1, 4], "b", tokenizer) == [3]
    assert tokens_after([1], " b", tokenizer) == [2]
    assert tokens_after([1], "", tokenizer) == []


def test_a_missing_space_costs_a_few_tokens_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = llm.generate(["The sun is"], params)[0].outputs[0]
    assert plain.text.startswith(" ")
    for text in (plain.text[1:], "\n" + plain.text, "Sure!" + plain.text):
        made = llm.generate(["The sun is"], replace(params, prediction=text))[0].outputs[0]
        assert made.token_ids == plain.token_ids
        assert made.speculation.accepted_predicted > len(plain.token_ids) // 2


def variants(llm: LLM) -> dict[str, SamplingParams]:
    params = SamplingParams(temperature=0, max_tokens=60)
    text = llm.chat(ASKED, params)[0].outputs[0].text
    return {
        "stop string": replace(params, stop=[text[40:44]]),
        "stop string in the output": replace(params, stop=[text[50:53]], include_stop_str_in_output=True),
        "shorter than the prediction": replace(params, max_tokens=9),
        "one token": replace(params, max_tokens=1),
        "several": replace(params, n=3, temperature=0.8, seed=5),
        "choice": replace(params, guided=Guided(choice=["a walk in the park", text[:30]])),
        "schema": replace(
            params, guided=Guided(json_schema={"type": "object", "properties": {"a": {"type": "string"}}})
        ),
        "log-probabilities": replace(params, logprobs=2),
        "penalties": replace(params, repetition_penalty=1.3, min_tokens=50),
    }


def test_with_everything_else_that_a_request_may_hold(llm: LLM) -> None:
    used = 0
    for name, params in variants(llm).items():
        plain = llm.chat(ASKED, params)[0]
        text = plain.outputs[0].text
        for prediction in (text, text + text, "x" + text[5:] + " and so on", '{"a": "b"}', ""):
            output = llm.chat(ASKED, replace(params, prediction=prediction))[0]
            for one, other in zip(output.outputs, plain.outputs, strict=True):
                same = ("text", "token_ids", "finish_reason", "stop_reason", "text_ends")
                assert [getattr(one, field) for field in same] == [getattr(other, field) for field in same], name
                for row, expected in zip(one.logprobs or [], other.logprobs or [], strict=True):
                    assert {token: each.rank for token, each in row.items()} == {
                        token: each.rank for token, each in expected.items()
                    }
                used += one.speculation.accepted_predicted
    assert used > 300


@pytest.mark.parametrize(
    ("prediction", "message"),
    [("x" * (MAX_PREDICTION + 1), "shorten it"), ([1] * (4 * MAX_PREDICTION + 1), "shorten it"), (7, "text or a list")],
)
def test_a_prediction_has_a_bound(prediction: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(prediction=prediction)


def test_what_cannot_be_predicted(target_path: Callable[..., Path]) -> None:
    with LLM(target_path("llama"), None, **SMALL) as llm:
        with pytest.raises(ValueError, match="no token id"):
            llm.generate([PROMPTS[0]], replace(GREEDY, prediction=[3, tiny.VOCAB]))
        with pytest.raises(ValueError, match="needs a tokenizer"):
            llm.generate([PROMPTS[0]], replace(GREEDY, prediction="text"))
    with (
        LLM(target_path("nemotron_h"), None, **SMALL) as llm,
        pytest.raises(ValueError, match="use a drafter"),
    ):
        llm.generate([PROMPTS[0]], replace(GREEDY, prediction=[3, 4]))
    with pytest.raises(ValueError, match="num_predicted_tokens must be"):
        LLM(target_path("llama"), None, num_predicted_tokens=-1)
