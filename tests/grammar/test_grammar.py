"""Guided answers: they satisfy what was asked, and plain = speculative stays exact with masks on every draft row."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny
import tokenizers
import torch
from samples import Oracle
from tokenizers import decoders, models

from outrider import LLM, RequestOutput, SamplingParams
from outrider.grammar.guide import Grammars, Guide
from outrider.grammar.masks import Unfilled, fill_masks
from outrider.kernels.masks import restrict
from outrider.llm import total_speculation
from outrider.outputs import CompletionOutput
from outrider.sampling_params import Guided
from outrider.tokenizer import Tokenizer
from outrider.types import Guidance

pytest.importorskip("xgrammar")
SMALL: dict[str, Any] = {"max_model_len": 128, "page_size": 8, "max_num_seqs": 64}
PROMPT = "Write about a dog:"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(speculative_config=None, **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def oracle() -> Iterator[LLM]:
    with LLM(speculative_config={"method": "oracle", "num_speculative_tokens": 3, "force": True}, **SMALL) as made:
        yield made


def completions(outputs: Sequence[RequestOutput]) -> list[CompletionOutput]:
    return [completion for output in outputs for completion in output.outputs]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for completion in completions(outputs)]


def alike(plain: LLM, others: Sequence[LLM], prompts: list[Any], params: Any) -> list[CompletionOutput]:
    """The plain answers, once all the others gave the same."""
    expected = plain.generate(prompts, params)
    Oracle.truth = [output.prompt_token_ids + each.token_ids for output in expected for each in output.outputs]
    for other in others:
        found = other.generate(prompts, params)
        assert ids(found) == ids(expected)
        assert [each.finish_reason for each in completions(found)] == [e.finish_reason for e in completions(expected)]
        if isinstance(other.drafter, Oracle):
            total = total_speculation(found)
            assert 0 < total.accepted < total.drafted
    return completions(expected)


# JSON schemas of varied shape


def make_schema(seed: int) -> dict[str, Any]:
    source = random.Random(seed)
    definitions = {"leaf": leaf(source), "pair": shape(source, 1, [])}
    return {**object_of(source, 2, list(definitions)), "$defs": definitions, "title": f"schema {seed}"}


def leaf(source: random.Random) -> dict[str, Any]:
    low = source.randint(-50, 50)
    return source.choice(
        [
            {"type": "string", "maxLength": source.randint(1, 4)},
            {"type": "string", "minLength": 2, "maxLength": 4},
            {"type": "string", "pattern": source.choice(["^[a-f]{2,4}$", "^(red|blue)-[0-9]{1,3}$", "^x?y+z{2}$"])},
            {"enum": ["one", 2, None, True, 'thr"ee']},
            {"const": source.choice(["fixed", 7, {"a": [1]}])},
            {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 200)},
            {"type": "number", "minimum": 0, "maximum": 9},
            {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
        ]
    )


def shape(source: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    kind = source.choice(["leaf", "leaf", "array", "tuple", "object", "union", "one", "reference"])
    if kind == "leaf" or depth == 0:
        return leaf(source)
    if kind == "array":
        return {
            "type": "array",
            "items": shape(source, depth - 1, names),
            "minItems": source.randint(0, 1),
            "maxItems": 2,
        }
    if kind == "tuple":
        return {"type": "array", "prefixItems": [leaf(source), leaf(source)], "items": False, "minItems": 2}
    if kind == "object":
        return object_of(source, depth - 1, names)
    if kind == "union":
        return {"anyOf": [shape(source, depth - 1, names), leaf(source)], "description": "one or the other"}
    if kind == "one":
        return {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 3}]}
    return {"$ref": f"#/$defs/{source.choice(names)}"} if names else leaf(source)


def object_of(source: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    properties = {f"k{number}": shape(source, depth, names) for number in range(source.randint(1, 2))}
    required = [name for name in properties if source.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def test_answers_satisfy_schemas_of_every_shape(llm: LLM, plain: LLM, oracle: LLM) -> None:
    schemas = [make_schema(seed) for seed in range(64)]
    for temperature in (0, 1):
        params = [
            SamplingParams(
                temperature=temperature,
                seed=number,
                max_tokens=32,
                num_speculative_tokens=3,
                guided=Guided(json_schema=schema if temperature else json.dumps(schema)),
            )
            for number, schema in enumerate(schemas)
        ]
        few = 24 if temperature else None  # sampling takes its time
        alike(plain, [llm], [PROMPT] * len(params[:few]), params[:few])
        answers = alike(plain, [oracle], [PROMPT] * len(schemas), params)
        finished = [(s, a.text) for s, a in zip(schemas, answers, strict=True) if a.finish_reason == "stop"]
        assert len(finished) > 40
        for schema, text in finished:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


LIST = 'root ::= item ("," item){0,3}\nitem ::= [a-z]{1,3} | "(" item ")"'
KINDS: list[tuple[Guided, str]] = [
    (Guided(regex=r"[a-z]{3,8} and (dog|cat)s?"), r"[a-z]{3,8} and (dog|cat)s?"),
    (Guided(regex=r"\d{3}-[A-F]+!"), r"\d{3}-[A-F]+!"),
    (Guided(regex="[日本]{2}é?"), "[日本]{2}é?"),
    (Guided(choice=["yes", "no", 'perhaps "so"\n\\', "日本é", "yes, but"]), r'yes(, but)?|no|perhaps "so"\n\\|日本é'),
    (Guided(grammar=LIST), r"[a-z(),]+"),
    (Guided(choice=["yes", "no"], after="."), r"[^.]*\.[^.]*(yes|no)|[^.]*"),
    (Guided(regex="[0-9]{4}", after=" the "), r"(.|\n)* the [0-9]{4}|(.|\n)*"),
]


def test_regex_choice_grammar_and_after(llm: LLM, plain: LLM, oracle: LLM) -> None:
    """Guided and free requests in one batch, greedy and seeded."""
    params: list[SamplingParams] = []
    for number, (guided, _) in enumerate(KINDS * 2):
        params.append(SamplingParams(temperature=number % 2, seed=number, max_tokens=32, guided=guided))
        params.append(replace(params[-1], guided=None, max_tokens=12))
    answers = alike(plain, [llm, oracle], [PROMPT] * len(params), params)
    finished = 0
    for (_, expected), answer in zip(KINDS * 2, answers[::2], strict=True):
        if answer.finish_reason == "stop":
            assert re.fullmatch(expected, answer.text), answer.text
            finished += 1
    assert finished >= 8
    unguided = [replace(each, guided=None) for each in params[1::2]]
    assert ids(plain.generate([PROMPT] * len(unguided), unguided)) == [each.token_ids for each in answers[1::2]]


def test_stops_samples_and_limits_cut_in_the_middle(llm: LLM, plain: LLM, oracle: LLM) -> None:
    words = Guided(regex="([a-z]{2,5} ){2,6}end")
    base = SamplingParams(temperature=1, seed=5, guided=words, max_tokens=30)
    params = [
        replace(base, n=3),
        replace(base, max_tokens=4),
        replace(base, stop=" "),
        replace(base, stop=["e"], include_stop_str_in_output=True),
        replace(base, num_speculative_tokens=1),
        replace(base, top_k=3, frequency_penalty=0.5, repetition_penalty=1.2),
        replace(base, min_tokens=25),
        replace(base, ignore_eos=True),
        replace(base, allowed_token_ids=[5], bad_words=["end"]),  # nothing of both: the grammar has the last word
    ]
    answers = alike(plain, [llm, oracle], [PROMPT] * len(params), params)
    assert len({tuple(each.token_ids) for each in answers[:3]}) == 3
    assert [each.finish_reason for each in answers[3:6]] == ["length", "stop", "stop"]
    for answer in answers[:3] + answers[6:]:
        if answer.finish_reason == "stop" and answer.stop_reason is None:
            assert re.fullmatch("([a-z]{2,5} ){2,6}end", answer.text), answer.text
    assert " " not in answers[4].text


def test_json_objects(llm: LLM, plain: LLM, oracle: LLM) -> None:
    guided = Guided(json_object=True)
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=24, guided=guided) for seed in range(3)]
    for answer in alike(plain, [llm, oracle], [PROMPT] * 3, params):
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)


def test_preemption(plain: LLM) -> None:
    guided = Guided(regex="([a-z]{2,5} ){8,16}end")
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=48, guided=guided) for seed in range(6)]
    expected = plain.generate([PROMPT] * 6, params)
    settings = {"method": "oracle", "num_speculative_tokens": 4, "force": True}
    options: dict[str, Any] = {"max_model_len": 80, "page_size": 4, "max_num_seqs": 6}
    with LLM(speculative_config=settings, **options) as roomy:
        options["kv_cache_memory"] = roomy.budget.page_bytes * 45
    Oracle.truth = [output.prompt_token_ids + output.outputs[0].token_ids for output in expected]
    with LLM(speculative_config=settings, **options) as tight:
        assert ids(tight.generate([PROMPT] * 6, params)) == ids(expected)
        assert tight.engine.scheduler.num_preemptions > 0


def test_logprobs_are_the_targets_own(llm: LLM, plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, guided=Guided(choice=["a dog, yes", "a cat"]))
    (one,), (two,) = llm.generate(PROMPT, params), plain.generate(PROMPT, params)
    (scored,) = plain.score([one.prompt_token_ids + one.outputs[0].token_ids], 2)
    assert one.outputs[0].logprobs is not None
    assert two.outputs[0].logprobs is not None
    assert scored.prompt_logprobs is not None
    own = scored.prompt_logprobs[len(one.prompt_token_ids) :]
    for token, left, right, asked in zip(
        one.outputs[0].token_ids, one.outputs[0].logprobs, two.outputs[0].logprobs, own, strict=True
    ):
        assert left.keys() == right.keys()
        assert asked is not None
        assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-4)
        assert left[token].logprob == pytest.approx(asked[token].logprob, abs=1e-4)


# masks, row by row


def allowed(masks: list[tuple[int, torch.Tensor | Unfilled]], row: int) -> set[int] | None:
    """Ids; None: all, or it does not matter."""
    for number, mask in masks:
        if number == row:
            (bits,) = fill_masks([mask])
            return set((bits[:, None] >> torch.arange(32) & 1).flatten().nonzero().flatten().tolist())
    return None


@pytest.mark.parametrize("after", [None, ".", "stop here"])
def test_masks_of_a_draft_are_those_of_its_tokens_committed(llm: LLM, after: str | None) -> None:
    """Rows against a matcher that never went back; drafts that fit, that do not, and that cross the marker."""
    assert llm.tokenizer is not None
    source = random.Random(1)
    text = '{"name": "Rex", "age": 12, "tags": []}'
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {}}}
    guided = Guided(json_schema=schema, after=after)
    answer = [*llm.tokenizer.encode((f"free{after}" if after else "") + text, add_special_tokens=False), 0, 0, 0]
    guide = llm.engine.guide(guided)
    for begin in range(len(answer)):
        draft = answer[begin : begin + 4]
        wrong = source.randrange(6)
        draft = [source.randrange(4096) if place >= wrong else token for place, token in enumerate(draft)]
        masks = guide.masks(draft)
        for row in range(len(draft) + 1):
            slow = llm.engine.guide(guided)
            fits = [slow.accept(token) for token in answer[:begin] + draft[:row]]
            if all(fits):
                assert allowed(masks, row) == allowed(slow.masks([]), 0)
            else:
                assert allowed(masks, row) is None
        assert guide.accept(answer[begin])
    assert allowed(guide.masks([]), 0) == {0}


def sentencepiece() -> Tokenizer:
    """Byte fallback, and ▁ for spaces."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "é",
        "▁ab",
        "<x>",
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>", "<x>"])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_tokens_are_allowed_by_their_bytes(kind: str, llm: LLM) -> None:
    tokenizer = llm.tokenizer if kind == "byte-level" else sentencepiece()
    assert tokenizer is not None
    end = 0 if kind == "byte-level" else 1
    vocab_size = tokenizer.vocab_size + 5  # a padded head
    choices = ["ab ab", "é a", "a<x>", " b"]
    guide = Grammars(tokenizer, vocab_size, frozenset([end])).guide(Guided(choice=choices))
    source, left = random.Random(2), [choice.encode() for choice in choices]
    special = {id for id in range(vocab_size) if tokenizer.is_silent(id, skip_special_tokens=True)}
    for _ in range(20):
        expected = {
            id
            for id in range(vocab_size)
            if id not in special and any(each.startswith(tokenizer.token_bytes(id)) for each in left)
        } | ({end} if b"" in left else set())
        assert allowed(guide.masks([]), 0) == expected
        token = source.choice(sorted(expected))
        assert guide.accept(token)
        if token == end:
            break
        spelt = tokenizer.token_bytes(token)
        left = [each[len(spelt) :] for each in left if each.startswith(spelt)]
    assert token == end


def test_json_holds_no_control_characters(llm: LLM) -> None:
    """xgrammar alone would allow them in strings of bounded length."""
    assert llm.tokenizer is not None
    guide = llm.engine.guide(Guided(json_schema={"type": "string", "maxLength": 3}))
    (quote,) = llm.tokenizer.encode('"', add_special_tokens=False)
    found = allowed(guide.masks([quote]), 1)
    assert found is not None
    assert len(found) > 100
    assert not any(byte < 32 for id in found for byte in llm.tokenizer.token_bytes(id))


def test_other_options_yield_to_a_grammar(llm: LLM) -> None:
    """Where they leave nothing of what it allows, and then to the target: its likeliest of the allowed ones comes."""
    assert llm.tokenizer is not None
    other = llm.tokenizer.encode("the", add_special_tokens=False)
    guided = Guided(choice=["yes", "no", "perhaps"])
    params = SamplingParams(temperature=0, max_tokens=12, guided=guided)
    (expected,) = llm.generate("Is it so?", params)[0].outputs
    assert expected.text in {"yes", "no", "perhaps"}
    for options in ({"allowed_token_ids": other}, {"allowed_token_ids": other, "repetition_penalty": 1.01}):
        (found,) = llm.generate("Is it so?", replace(params, **options))[0].outputs
        assert found.text == expected.text
    (longer,) = llm.generate("Is it so?", replace(params, min_tokens=12))[0].outputs
    assert longer.text == expected.text, "it ends although it should not yet"


def test_a_dead_end_allows_only_the_end(llm: LLM) -> None:
    assert llm.tokenizer is not None
    guide = llm.engine.guide(Guided(grammar='root ::= "a" never\nnever ::= never "b"'))
    (token,) = llm.tokenizer.encode("a", add_special_tokens=False)
    assert allowed(guide.masks([token]), 1) == {0}
    assert guide.accept(token)
    assert not guide.accept(token)
    assert guide.accept(0)


def test_the_highest_bit_is_masked_too() -> None:
    logits, adjusted = torch.zeros(2, 70), torch.zeros(2, 70)
    guidance = Guidance.of(
        torch.tensor([[0, 0, 0], [1, 0, 0]], dtype=torch.int32),
        torch.tensor([[-(2**31), 0, 1 << 5]], dtype=torch.int32),
    )
    restrict(adjusted, logits, guidance, torch.tensor([0, 1, 2]))
    assert adjusted[0].isfinite().all()
    assert adjusted[1].isfinite().nonzero().flatten().tolist() == [31, 69]
    nothing = torch.full((2, 70), -torch.inf)
    restrict(nothing, logits, guidance, torch.tensor([0, 1, 2]))
    assert nothing[1].isfinite().sum() == 2


# what is refused, before anything is allocated


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": "{"}, "json_schema cannot be used"),
    ({"json_schema": "[]"}, "must be a JSON object"),
    ({"json_schema": {"type": "strin"}}, "strin"),
    ({"json_schema": {"a": object()}}, "json_schema cannot be used"),
    ({"json_schema": {"$ref": "#/$defs/none"}}, "defs"),
    ({"json_schema": {"$ref": "https://example.com/schema"}}, "must point into"),
    ({"json_schema": {"$ref": "#"}}, "nothing this model can write"),
    ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
    ({"json_schema": {"type": "integer", "minimum": 10**30}}, "json_schema cannot be used"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems is not supported"),
    ({"json_schema": {"properties": {"a": {"not": {}}}}}, "not is not supported"),
    ({"json_schema": {"allOf": [{"type": "string"}, {"minLength": 2}]}}, "allOf"),
    ({"json_schema": {"type": "string", "maxLength": 10**9}}, "maxLength"),
    ({"json_schema": {"type": "string", "minLength": -1}}, "minLength"),
    ({"json_schema": {"type": "string", "pattern": "(a"}}, "parenthesis"),
    ({"json_schema": {"type": "string", "pattern": "a" * 2000}}, "characters"),
    ({"json_schema": {"description": "x" * 2**17}}, "characters"),
    ({"json_schema": deep(100)}, "nested"),
    ({"json_schema": deep(5000)}, "json_schema cannot be used"),
    ({"json_schema": "[" * 50000}, "json_schema cannot be used"),
    ({"json_schema": {"prefixItems": [{"type": "string", "maxLength": 16000}] * 9}}, "in all"),
    ({"json_schema": {"properties": {f"p{number}": {} for number in range(1000)}}}, "1000 properties"),
    ({"json_schema": {"required": ["a"], "properties": {}}}, "required names 'a'"),
    ({"json_schema": {"type": "string", "pattern": "a+", "maxLength": 3}}, "only one of"),
    ({"json_schema": {"anyOf": [{"type": "string"}], "type": "string"}}, "anyOf together with type"),
    ({"json_schema": {"$ref": "#", "minLength": 3}}, "together with minLength"),
    ({"json_schema": {"enum": ["a", 3], "type": "string"}}, "not of type"),
    ({"json_schema": {"type": "object", "minProperties": 1, "additionalProperties": True}}, "minProperties together"),
    ({"regex": "(a"}, "regex cannot be used"),
    ({"regex": r"(a)\1"}, "a backreference"),
    ({"regex": "(a|b)*" * 100}, "at most 32"),
    ({"regex": "(" * 100 + "a" + ")" * 100}, "nested"),
    ({"regex": "a{1,99999999999}"}, "repeats"),
    ({"regex": "a" * 5000}, "characters"),
    ({"grammar": 'rooot ::= "a"'}, "root"),
    ({"grammar": "root ::= b"}, "not defined"),
    ({"grammar": 'root ::= root "a"'}, "nothing this model can write"),
    ({"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "nested"),
    ({"grammar": 'root ::= "a"' + " " * 2**16}, "characters"),
    ({"choice": []}, "0 choices"),
    ({"choice": [str(number) for number in range(5000)]}, "5000 choices"),
    ({"choice": ["a" * 2**16]}, "characters"),
    ({"choice": ["a\0b"]}, "zero character"),
    ({"choice": ["a"], "after": "x" * 5000}, "after"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_kept_is_refused(fields: dict[str, Any], message: str, llm: LLM) -> None:
    free = llm.engine.scheduler.pool.num_free
    with pytest.raises(ValueError, match=message):
        llm.generate([PROMPT, PROMPT], [SamplingParams(), SamplingParams(guided=Guided(**fields))])
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pool.num_free == free


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"json_object": True, "json_schema": {}},
        {"regex": ""},
        {"regex": 3},
        {"choice": "abc"},
        {"choice": ["a", ""]},
        {"json_object": "yes"},
        {"json_schema": 3},
        {"regex": "a", "after": ""},
    ],
)
def test_exactly_one_constraint_of_the_right_type(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="guided"):
        Guided(**fields)
    with pytest.raises(ValueError, match="guided"):
        SamplingParams(guided=fields)  # type: ignore[arg-type]


def test_models_that_cannot_be_guided(target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(guided=Guided(regex="a"))
    with LLM(target_path("llama"), None, max_model_len=32) as bare, pytest.raises(ValueError, match="tokenizer"):
        bare.generate([[1, 2, 3]], params)
    with pytest.raises(ValueError, match="ends a text"):
        Grammars(sentencepiece(), 300, frozenset())
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with LLM(speculative_config=None, **SMALL) as made, pytest.raises(ValueError, match="serve"):
        made.generate(PROMPT, params)


def test_a_padded_head_and_compiling_once(tmp_path: Path) -> None:
    """The tiny tokenizer has 256 tokens and its target a wider head: no id beyond them is ever chosen."""
    path = tiny.save_target(tmp_path, "llama", vocab_size=300)
    tiny.save_tokenizer(path)
    with LLM(path, None, max_model_len=64) as made:
        made.engine.end_ids = frozenset([299])
        guides = [made.engine.guide(Guided(regex="[a-c]{2}d")) for _ in range(2)]
        assert all(isinstance(guide, Guide) for guide in guides)
        params = SamplingParams(temperature=1, seed=1, max_tokens=8, guided=Guided(regex="[a-c]{2}d"))
        (output,) = made.generate("hello", params)
    assert output.outputs[0].finish_reason == "stop"
    assert re.fullmatch("[a-c]{2}d", output.outputs[0].text)


def test_a_grammar_does_not_import_transformers() -> None:
    """Which takes long; and nothing that stands in for it stays behind."""
    code = """
import sys
from outrider.grammar.compiler import Guided, GrammarCompiler, Words
words = [bytes([code]) for code in range(256)] + [b""]
ended = frozenset([256])
GrammarCompiler(Words(words, ended, ended, frozenset())).compile(Guided(regex="a+"))
print("xgrammar" in sys.modules, "transformers" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["True", "False"]
