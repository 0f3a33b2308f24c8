"""JSON that ends: little white space between parts, and an answer without room is closed instead of cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.grammar import ending
from outrider.grammar.guide import Guide
from outrider.grammar.masks import fill_masks
from outrider.sampling_params import Guided

pytest.importorskip("xgrammar")

TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {"properties": {"name": TEXT, "age": {"type": "integer"}}, "required": ["name", "age"]},
    "list": {"properties": {"items": {"type": "array", "items": TEXT}}, "required": ["items"]},
    "nested": {
        "properties": {"animal": {"properties": {"legs": {"type": "number"}, "kind": TEXT}, "required": ["kind"]}},
        "required": ["animal"],
    },
    "bounds": {
        "properties": {
            "code": {"type": "string", "pattern": "^[a-f]{4}-[0-9]+$"},
            "year": {"type": "integer", "minimum": 1990, "maximum": 2030},
            "pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
            "word": {"type": "string", "minLength": 5},
            "kind": {"enum": ["dog", "cat", "élan"]},
            "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        },
        "required": ["code", "year", "pair", "word", "kind", "more"],
    },
}
QUESTIONS = ("Describe a person called Anna.", "Tell me about a little dog.", "What is the capital of France?")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_num_seqs=32) as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(speculative_config=None, max_model_len=512, max_num_seqs=32) as made:
        yield made


def asked(**options: Any) -> list[Guided]:
    schemas = [Guided(json_schema=schema, **options) for schema in list(SCHEMAS.values())[:3]]
    return [*schemas, Guided(json_object=True, **options)]


def test_json_of_the_embedded_model_ends(llm: LLM, plain: LLM) -> None:
    """Every request, with the same tokens as without a drafter. Without closing it, most of them are cut."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS for _ in asked()]
    params = [SamplingParams(temperature=0, max_tokens=96, guided=guided) for _ in QUESTIONS for guided in asked()]
    outputs = [output.outputs[0] for output in llm.chat(chats, params)]
    for output, each in zip(outputs, params, strict=True):
        assert output.finish_reason == "stop", output.text
        assert output.stop_reason in (None, "max_tokens")
        assert output.stop_reason is None or len(output.token_ids) > 80, "closed before it had to be"
        schema = each.guided.json_schema if each.guided is not None else None
        jsonschema.validate(json.loads(output.text), schema or {"type": "object"})
    assert any(output.stop_reason == "max_tokens" for output in outputs)
    assert [output.outputs[0].token_ids for output in plain.chat(chats, params)] == [each.token_ids for each in outputs]
    open_ended = [replace(each, guided=replace(each.guided, close=False)) for each in params if each.guided is not None]
    cut = [output.outputs[0].finish_reason for output in llm.chat(chats, open_ended)]
    assert cut.count("length") > len(cut) / 4


def test_between_two_parts_is_one_white_space(llm: LLM) -> None:
    def takes(guided: Guided, text: bytes) -> bool:
        matcher = llm.engine.guide(guided)._matcher
        return matcher.accept_string(text)

    for guided in asked()[:1] + asked()[3:]:
        for text in (b'{"name":"a","age":3}', b'{ "name" : "a" , "age" : 3 }', b'{\n"name": "a",\n"age": 3\n}'):
            assert takes(guided, text)
        for text in (b'{  "name"', b'{\n\n"name"', b'{"name":\n "a"'):
            assert not takes(guided, text)
            assert takes(replace(guided, max_whitespace=2), text)
    for bad in (0, 65, 1.5, True):
        with pytest.raises(ValueError, match="max_whitespace"):
            Guided(json_object=True, max_whitespace=bad)  # type: ignore[arg-type]


def allowed(bits: Tensor | None, vocab_size: int) -> list[int]:
    if bits is None:
        return list(range(vocab_size))
    words = bits.tolist()
    return [word * 32 + bit for word, value in enumerate(words) if value for bit in range(32) if value >> bit & 1]


def wander(guide: Guide, vocab_size: int, end_ids: frozenset[int], source: random.Random) -> tuple[list[int], int]:
    """Tokens by chance among those allowed, until the end; and how many rounds drafts were tried in and taken back."""
    tokens: list[int] = []
    num_tried = 0
    while not tokens or tokens[-1] not in end_ids:
        (_, mask), *_ = guide.masks([])
        (bits,) = fill_masks([mask])
        choice = source.choice(allowed(bits, vocab_size))
        if source.random() < 0.3:  # a draft leaves no trace, whatever becomes of it
            guide.masks([choice, *source.sample(range(vocab_size), 2)])
            num_tried += 1
        assert guide.accept(choice)
        tokens.append(choice)
        if len(tokens) > 2000:
            break
    return tokens, num_tried


@pytest.mark.parametrize("name", SCHEMAS)
def test_from_any_place_there_is_a_way_to_the_end(name: str, llm: LLM) -> None:
    """Answers made of any tokens that the schema allows, halves of characters among them, end within their tokens."""
    assert llm.tokenizer is not None
    size, ends = llm.target.vocab_size, llm.engine.end_ids
    for seed in range(8):
        source = random.Random(seed)
        guide = llm.engine.guide(Guided(json_schema=SCHEMAS[name]))
        room = source.randint(80, 140)
        guide.end_within(room)
        tokens, num_tried = wander(guide, size, ends, source)
        text = llm.tokenizer.decode(tokens)
        assert len(tokens) <= room, text
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        again = llm.engine.guide(Guided(json_schema=SCHEMAS[name]))
        again.end_within(room)
        assert num_tried
        assert all(again.accept(token) for token in tokens)
        assert again.is_closing == guide.is_closing


@pytest.mark.parametrize("room", [2, 10, 20, 40])
def test_a_way_that_begins_inside_a_character(room: int, llm: LLM) -> None:
    """Where there is too little room it is looked for after every token, also within characters of several bytes."""
    assert llm.tokenizer is not None
    source, schema = random.Random(room), {"type": "array", "items": {"const": "schön 日本 🦊"}, "minItems": 1}
    for _ in range(6):
        guide = llm.engine.guide(Guided(json_schema=schema))
        guide.end_within(room)
        tokens, _ = wander(guide, llm.target.vocab_size, llm.engine.end_ids, source)
        jsonschema.validate(json.loads(llm.tokenizer.decode(tokens)), schema)


def test_too_little_room_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, guided=Guided(json_schema=SCHEMAS["bounds"]))
    (output,) = llm.generate("A dog", params)
    (same,) = llm.generate("A dog", replace(params, guided=Guided(json_schema=SCHEMAS["bounds"], close=False)))
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "length"


def test_what_comes_before_the_json_counts(llm: LLM) -> None:
    """Free text takes its tokens from the same room."""
    assert llm.tokenizer is not None
    source = random.Random(1)
    free = llm.tokenizer.encode("A dog and a cat ran to the sea!", add_special_tokens=False)
    guide = llm.engine.guide(Guided(json_schema=SCHEMAS["list"], after="sea!"))
    guide.end_within(len(free) + 60)
    assert all(guide.accept(token) for token in free)
    tokens, _ = wander(guide, llm.target.vocab_size, llm.engine.end_ids, source)
    assert len(tokens) <= 60
    jsonschema.validate(json.loads(llm.tokenizer.decode(tokens)), SCHEMAS["list"])


class Counted:
    """A matcher that counts what it is asked."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self.num_tries = matcher, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def accept_string(self, text: bytes) -> bool:
        self.num_tries += 1
        return self._matcher.accept_string(text)


def test_a_search_for_the_end_is_bounded(llm: LLM) -> None:
    """It runs while everybody waits: what cannot be closed in the room there is, is not looked for to its end."""
    guide = llm.engine.guide(Guided(json_schema={"type": "string", "minLength": 5000}))
    matcher = guide._matcher.fork()
    assert matcher.accept_string(b'"')
    counted = Counted(matcher)
    assert ending._closing(counted, ending._STRING, 100_000, guide._vocabulary) is None  # type: ignore[arg-type]
    assert counted.num_tries <= ending.MAX_TRIES + 200
    short = Counted(guide._matcher.fork())
    assert ending._closing(short, ending._OUTSIDE, 64, guide._vocabulary) is None  # type: ignore[arg-type]
    assert short.num_tries < 64 * 110


def test_the_way_out_of_a_string_is_searched_for_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is the one that a search would find at any of the places where it is looked at again."""
    searches: list[bytes | None] = []
    search = ending._closing

    def note(*given: Any) -> bytes | None:
        searches.append(search(*given))
        return searches[-1]

    monkeypatch.setattr(ending, "_closing", note)
    assert llm.tokenizer is not None
    begin, word, end = (
        llm.tokenizer.encode(text, add_special_tokens=False) for text in ('{"name": "', " dog", '", "age')
    )
    guide = llm.engine.guide(Guided(json_schema=SCHEMAS["person"]))
    guide.end_within(400)
    assert all(guide.accept(token) for token in begin)
    searches.clear()
    looked, known = 0, set()
    while looked < 3:
        before = guide._place.countdown
        for token in word:
            assert guide.accept(token)
        after = guide._place.countdown
        assert before is not None
        assert after is not None
        if after.known is not None and after.look_at < before.look_at:
            looked += 1
            found = search(guide._matcher.fork(), ending._STRING, 4 * after.left, guide._vocabulary)
            assert after.known.text == found
            known.add(found)
    assert len(known) == 1
    assert len(searches) <= 1, searches
    for token in end:  # there it does not lead to the end any more
        assert guide.accept(token)
    countdown = guide._place.countdown
    assert countdown is not None
    assert guide._ending is not None
    closing = guide._ending._closing(guide._matcher, countdown.lexer, countdown.left, countdown.known)
    assert closing is not None
    assert closing.text != known.pop()
