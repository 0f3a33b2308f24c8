"""What a grammar forces is drafted: it is found before it is said, and says nothing about the drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from samples import Oracle

from outrider import LLM, SamplingParams
from outrider.engine.request import Work
from outrider.engine.watchdog import Watchdog
from outrider.llm import total_speculation
from outrider.sampling_params import Guided
from outrider.types import Outcome

pytest.importorskip("xgrammar")
PROMPT = "Write about a dog:"
SENTENCE = "it was a dog and nothing but a dog, as far as anybody could see"
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string"}, "kind": {"enum": ["an animal", "a machine"]}},
    "required": ["first_name", "kind"],
    "additionalProperties": False,
}
GUIDED = Guided(regex='\\{"first_name":"[A-Za-z]{1,20}","kind":"(an animal|a machine)"\\}')


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """With a drafter that knows nothing."""
    Oracle.truth = []
    settings = {"method": "oracle", "num_speculative_tokens": 4, "force": True}
    with LLM(speculative_config=settings, max_model_len=128, page_size=8, max_num_seqs=8) as made:
        yield made


def encoded(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text, add_special_tokens=False)


def decoded(llm: LLM, tokens: list[int]) -> str:
    assert llm.tokenizer is not None
    return b"".join(llm.tokenizer.token_bytes(token) for token in tokens).decode()


def test_a_text_without_a_choice_is_forced_to_its_end(llm: LLM) -> None:
    guide = llm.engine.guide(Guided(choice=[SENTENCE]))
    forced = guide.forced(100)
    assert (decoded(llm, forced[:-1]), forced[-1]) == (SENTENCE, *llm.end_ids)
    assert guide.forced(3) == forced[:3]
    for place, token in enumerate(forced):
        assert guide.forced(100) == forced[place:]
        assert guide.accept(token)
    assert guide.forced(100) == []


def test_what_is_forced_is_what_any_answer_goes_on_with(llm: LLM) -> None:
    text = '{"first_name":"Rex","kind":"a machine"}'
    guide, tokens, lengths = llm.engine.guide(GUIDED), encoded(llm, text), []
    for place, token in enumerate(tokens):
        forced = [each for each in guide.forced(64) if each not in llm.end_ids]
        assert decoded(llm, tokens[place:]).startswith(decoded(llm, forced))
        lengths.append(len(forced))
        assert guide.accept(token)
    assert guide.forced(5) == list(llm.end_ids)
    assert max(lengths) >= 4
    assert 0 in lengths  # within the name anything may come


def test_the_rest_of_a_key_is_forced(llm: LLM) -> None:
    """Where JSON begins or goes on, space may come first; a key that has begun has no choice."""
    guide = llm.engine.guide(Guided(json_schema=SCHEMA))
    for token in encoded(llm, '{"fi'):
        assert guide.accept(token)
    assert decoded(llm, guide.forced(20)) == 'rst_name"'


def test_nothing_is_forced_before_the_grammar_begins(llm: LLM) -> None:
    guide = llm.engine.guide(replace(Guided(choice=[SENTENCE]), after="!"))
    assert guide.forced(5) == []
    for token in encoded(llm, "oh!"):
        assert guide.accept(token)
    assert decoded(llm, guide.forced(100)[:-1]) == SENTENCE


def test_the_way_to_the_end_is_forced(llm: LLM) -> None:
    """Where an answer has no more room, it is closed as shortly as it can be."""
    guide = llm.engine.guide(Guided(json_schema=SCHEMA, close=True))
    guide.end_within(40)
    for token in encoded(llm, '{"first_name":"Re'):
        assert guide.accept(token)
    while not guide.is_closing:
        assert guide.accept(encoded(llm, "e")[-1])
    forced = guide.forced(64)
    assert forced[-1] in llm.end_ids
    for token in forced:
        assert guide.accept(token)


def test_how_much_of_a_draft_fits(llm: LLM) -> None:
    guide = llm.engine.guide(Guided(choice=["abc"]))
    good = guide.forced(10)
    assert guide.num_fitting(good) == len(good)
    assert guide.num_fitting([good[0], 77, *good[1:]]) == 1
    assert guide.num_fitting([]) == 0
    assert guide.forced(10) == good


def observed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """Outcomes as they reach their requests."""
    seen, settle = [], llm.engine._settle

    def note(work: Work, outcome: Outcome, logits: Any) -> None:
        seen.append(outcome)
        settle(work, outcome, logits)

    monkeypatch.setattr(llm.engine, "_settle", note)
    return seen


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_forced_drafts_are_accepted(llm: LLM, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a drafter that is always wrong: whatever is accepted was forced. And the answer is the plain one."""
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, trace=True, guided=GUIDED)
    with LLM(speculative_config=None, max_model_len=128, page_size=8) as plain:
        expected = plain.generate(PROMPT, params)[0].outputs[0]
    outcomes = observed(llm, monkeypatch)
    output = llm.generate(PROMPT, params)[0]
    assert output.outputs[0].token_ids == expected.token_ids
    accepted = total_speculation([output]).accepted
    assert accepted >= 4
    assert sum(len(each.draft) for each in outcomes if each.forced) >= accepted
    made = [entry["draft"] for entry in output.outputs[0].trace or []]
    assert any(draft in made for draft in (each.draft for each in outcomes if each.forced))


def test_forced_drafts_say_nothing_about_the_drafter(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog hears of rounds in which the drafter's own drafts were judged, and of no others."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(llm.engine, "watchdog", Watchdog(llm.config.watchdog, acts=False, rebuilds=False))
    monkeypatch.setattr(Watchdog, "drafted_round", lambda self, standing, name, length, made: told.append(made))
    outcomes = observed(llm, monkeypatch)
    llm.generate(PROMPT, SamplingParams(max_tokens=60, temperature=0, guided=GUIDED))
    assert any(outcome.forced for outcome in outcomes)
    assert told, "the drafter has drafted within the name"
    assert all(accepted == 0 for _, accepted in told)  # it is always wrong


def test_drafts_that_the_grammar_refuses_are_not_judged(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the watchdog hears of them."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(llm.engine, "watchdog", Watchdog(llm.config.watchdog, acts=False, rebuilds=False))
    monkeypatch.setattr(Watchdog, "drafted_round", lambda self, standing, name, length, made: told.append(made))
    (request,) = llm.requests_for(
        PROMPT, SamplingParams(max_tokens=12, temperature=0, guided=Guided(regex="[a-z]+ [a-z ]+")), 0
    )
    llm.engine.add(request)
    while not request.finished:
        llm.engine.step()
        assert request.guide is not None
        assert request.finished or request.guide.num_fitting(request.draft) == request.num_drafts
    assert sum(made for made, _ in told) > sum(request.drafted_at), "nothing was refused"


@pytest.mark.parametrize(
    "guided",
    [
        Guided(grammar='root ::= "a" root | root "b" | root root root'),
        Guided(regex="((a{100}){100}){100}"),
        Guided(json_schema={"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    ],
    ids=["a text without end", "a very long text", "objects in objects"],
)
def test_forced_texts_are_bounded(llm: LLM, guided: Guided) -> None:
    """The first two force a text that fills any memory."""
    guide = llm.engine.guide(guided)
    assert len(guide.forced(12)) <= 12
