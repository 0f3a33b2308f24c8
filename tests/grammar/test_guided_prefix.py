"""Guided answers with a free part before the grammar: when it begins and ends, and that drafts are judged alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.grammar.guide import Guide
from outrider.grammar.masks import Unfilled, fill_masks
from outrider.grammar.vocabulary import begun_of, is_past
from outrider.sampling_params import Guided

pytest.importorskip("xgrammar")
THINK = {"after": "</think>", "opening": "<think>"}
TEXT = '{"ok": true}'
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=128, max_num_seqs=4) as made:
        yield made


def encode(llm: LLM, *pieces: str) -> list[int]:
    assert llm.tokenizer is not None
    return [token for piece in pieces for token in llm.tokenizer.encode(piece, add_special_tokens=False)]


def allowed(masks: list[tuple[int, torch.Tensor | Unfilled]], row: int = 0) -> set[int] | None:
    """Ids; None: all, or it does not matter."""
    for number, mask in masks:
        if number == row:
            (bits,) = fill_masks([mask])
            return set((bits[:, None] >> torch.arange(32) & 1).flatten().nonzero().flatten().tolist())
    return None


def takes(guide: Guide, tokens: list[int]) -> bool:
    """Whether all of these are taken, each of them allowed by the mask before it."""
    for token in tokens:
        ids = allowed(guide.masks([]))
        assert guide.accept(token) == (ids is None or token in ids)
        if ids is not None and token not in ids:
            return False
    return True


@pytest.mark.parametrize(
    ("prompt", "answer", "fits"),
    [
        ("Why?", TEXT, True),
        ("Why?", "<think>{ so </think>" + TEXT, True),
        ("Why?", "<think></think>" + TEXT, True),
        ("Why?", "<think>never closed", True),
        ("Why?", "So </think>" + TEXT, False),  # only the start of an answer can open it
        ("Why?", "<thing>", False),
        ("Why?", "<think> </think>so", False),
        ("Why?<think>\n", "so</think>" + TEXT, True),
        ("Why?<think>\n", "<think>so</think>" + TEXT, True),
        ("Why?<think>\n\n</think>\n\n", TEXT, True),
        ("Why?<think>\n\n</think>\n\n", "<think>", False),
        ("Why?<think>\n\n</think>\n\n", "so</think>" + TEXT, False),
    ],
)
def test_where_the_grammar_begins(prompt: str, answer: str, fits: bool, llm: LLM) -> None:
    pieces = answer.replace("</think>", "|</think>|").split("|")  # no token over the edge of the marker
    guide = llm.engine.guide(Guided(json_schema=SCHEMA, **THINK), encode(llm, prompt))
    assert takes(guide, encode(llm, *pieces)) == fits


@pytest.mark.parametrize(("answer", "fits"), [("<tag>", True), ("<th", True), ("<think>x", True), ("<to", False)])
def test_what_begins_like_the_opening_may_be_the_answer(answer: str, fits: bool, llm: LLM) -> None:
    guide = llm.engine.guide(Guided(choice=["<tag>", "<th"], **THINK))
    end = [] if "x" in answer else sorted(llm.end_ids)[:1]
    assert takes(guide, [*encode(llm, *answer), *end]) == fits


TAGS = [
    ({"type": "any_text"}, "any_text"),
    ({"type": "sequence", "elements": [{"type": "regex", "pattern": "a*"}]}, "regex"),
    ({"type": "sequence", "elements": "a"}, "must be an object"),
    ({"type": "const_string", "value": "a\0"}, "zero"),
    ({"type": "const_string"}, "value must be text"),
    ({"type": "token", "token": "<s>"}, "token"),
    ({"type": "json_schema", "json_schema": {"not": {}}}, "not is not supported"),
    ({"type": "json_schema", "json_schema": {"enum": ["x" * 2**16]}}, "at most"),
    ({"type": "json_schema", "style": "glm_xml", "json_schema": {}}, "style"),
    ({"type": "json_schema", "style": "qwen_xml", "json_schema": {"enum": ["x" * 2**15]}}, "XML"),
    ({"type": "or", "elements": [{"type": "token", "token": 10**6}]}, "cannot be used|nothing this model"),
]


@pytest.mark.parametrize(("tag", "message"), TAGS)
def test_structural_tags_are_bounded(tag: Any, message: str, llm: LLM) -> None:
    with pytest.raises(ValueError, match=message):
        llm.engine.guide(Guided(structural_tag=tag))


def test_structural_tags_of_any_depth(llm: LLM) -> None:
    tag: Any = {"type": "const_string", "value": "a"}
    for _ in range(40):
        tag = {"type": "sequence", "elements": [tag]}
    assert takes(llm.engine.guide(Guided(structural_tag=tag)), encode(llm, "a"))
    for _ in range(40):
        tag = {"type": "sequence", "elements": [tag]}
    with pytest.raises(ValueError, match="nested"):
        llm.engine.guide(Guided(structural_tag=tag))
    with pytest.raises(ValueError, match="structural_tag must be"):
        Guided(structural_tag=[])  # type: ignore[arg-type]


def test_no_token_runs_past_the_marker(llm: LLM) -> None:
    """It would bring text that nothing binds."""
    (past,) = encode(llm, ".\n") if len(encode(llm, ".\n")) == 1 else (None,)
    guide = llm.engine.guide(Guided(choice=["yes"], after="."))
    ids = allowed(guide.masks([]))
    assert llm.tokenizer is not None
    spelt = [llm.tokenizer.token(id) for id in range(llm.target.vocab_size)]
    beyond = {id for id, text in enumerate(spelt) if "." in text[:-1]}
    assert ids == set(range(llm.target.vocab_size)) - beyond
    assert past is None or past in beyond
    assert beyond
    assert not any(guide.accept(id) for id in beyond)


def test_drafts_are_judged_as_if_committed(llm: LLM) -> None:
    source = random.Random(3)
    guided = Guided(json_schema=SCHEMA, **THINK)
    for pieces in (["<think>", "a<b", "</think>", TEXT], [TEXT], ["<", "think", "></think>", TEXT]):
        answer = [*encode(llm, *pieces), 0, 0]
        guide = llm.engine.guide(guided)
        for begin in range(len(answer) - 1):
            draft = answer[begin : begin + 5]
            wrong = source.randrange(7)
            draft = [source.randrange(4096) if place >= wrong else token for place, token in enumerate(draft)]
            masks = guide.masks(draft)
            for row in range(len(draft) + 1):
                slow = llm.engine.guide(guided)
                fits = all(slow.accept(token) for token in answer[:begin] + draft[:row])
                assert allowed(masks, row) == (allowed(slow.masks([])) if fits else None)
            assert guide.accept(answer[begin])


def test_an_answer_that_may_reason(llm: LLM) -> None:
    """Whatever the model does with its freedom, what follows is bound, with and without speculation."""
    for seed in range(4):
        params = [
            SamplingParams(
                temperature=1.5,
                seed=seed,
                max_tokens=40,
                guided=Guided(choice=["yes", "no"], after=".", opening="A"),
                num_speculative_tokens=number,
            )
            for number in (None, 0)
        ]
        fast, plain = (output.outputs[0] for output in llm.generate(["Hello"] * 2, params))
        assert fast.token_ids == plain.token_ids
        if fast.finish_reason == "stop":
            thought, dot, said = fast.text.rpartition(".")
            assert said in ("yes", "no") or (fast.text.startswith("A") and not dot)
            assert not thought or thought.startswith("A")


def test_markers() -> None:
    assert begun_of(b"a</thi", b"</think>") == b"</thi"
    assert begun_of(b"</think", b"</think>") == b"</think"
    assert begun_of(b"a", b"</think>") == b""
    assert begun_of(b"aab", b"aabaa") == b"aab"
    assert is_past(b"x</think>y", b"</think>")
    assert not is_past(b"x</think>", b"</think>")
    assert not is_past(b"x</think", b"</think>")
    with pytest.raises(ValueError, match="opening needs after"):
        Guided(choice=["a"], opening="<think>")
