"""Parsers of tool calls and reasoning: what they say, and that no way of cutting the text can change it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models

from outrider.server.parsers import (
    Event,
    ParserNames,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolOptions,
    answer_parser,
    choose,
    merged,
    reasoning_parsers,
    tool_parsers,
)
from outrider.server.parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from outrider.server.parsers.harmony import HarmonyParser
from outrider.tokenizer import Tokenizer

HARMONY_MARKS = HarmonyParser.marks()
FORMS = ("hermes", "llama3", "mistral", "deepseek", "qwen3_coder", "harmony")
MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MARKERS += (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, "<think>", "</think>", "[THINK]", "[/THINK]")


@dataclass
class Call:
    name: str
    arguments: str = ""
    closed: bool | None = None
    id: str = ""


@dataclass
class Said:
    """All events of an answer put together; `order` keeps how text, reasoning and calls follow one another."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    order: list[tuple[str, str]] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> "Said":
        for event in events:
            match event:
                case Text(text):
                    self.text += text
                    self._follow("text", text)
                case Reasoning(text):
                    self.reasoning += text
                    self._follow("reasoning", text)
                case ToolCallBegin(index, id, name):
                    assert index == len(self.calls)
                    assert not self.calls or self.calls[-1].closed is not None, "a call begins inside another"
                    assert id not in [call.id for call in self.calls]
                    self.calls.append(Call(name, id=id))
                    self._follow(f"call {index}", name)
                case ToolArguments(index, text):
                    assert index == len(self.calls) - 1
                    assert self.calls[index].closed is None
                    self.calls[index].arguments += text
                case ToolCallEnd(index, closed):
                    assert index == len(self.calls) - 1
                    assert self.calls[index].closed is None
                    self.calls[index].closed = closed
        return self

    def _follow(self, kind: str, text: str) -> None:
        assert text, "an empty event"
        if self.order and self.order[-1][0] == kind:
            text = self.order.pop()[1] + text
        self.order.append((kind, text))

    @property
    def short(self) -> tuple[str, list[tuple[str, str]]]:
        assert all(call.closed is not None for call in self.calls), "a call was never ended"
        return self.text, [(call.name, call.arguments) for call in self.calls]


def parse(
    form: str | None, pieces: Iterable[str], reasoning: str | None = None, prompt: str = "", **options: Any
) -> Said:
    numbers = count()
    options = {"make_id": lambda: f"id{next(numbers)}", "schemas": SCHEMAS, **options}
    parser = answer_parser(ParserNames(form, reasoning), prompt, ToolOptions(**options))
    said = Said()
    for piece in pieces:
        said.add(parser.feed(piece))
    return said.add(parser.finish())


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:stop] for start, stop in pairwise(edges)]


def deepseek_call(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def deepseek_v31_call(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


TRICKY = r'{"a": {"b": [1, {"c": "}]"}]}, "q": "\"\\", "u": "\u00e9\ud83d\ude00", "m": "</tool_call>[TOOL_CALLS]"}'
# form, text, expected text, expected calls
EXAMPLES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {TRICKY}}}\n</tool_call>', "", [("f", TRICKY)]),
    ("hermes", 'a\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nb', "a\n\nb", [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '"{\\"x\\": 1}"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "null")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": 7}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "\\u00e9t\\u00e9", "arguments": {}}</tool_call>', "", [("été", "{}")]),
    # what models get wrong: no closing tag, a brace forgotten, a brace too many, the tag twice
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} so', " so", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>.', ".", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>.', ".", [("f", "{}")]),
    ("hermes", '<tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>\n", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama3", '{"name": "f", "parameters": {"x": "é"}}', "", [("f", '{"x": "é"}')]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3", 'Sure. <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "Sure. ", [("f", "{}")]),
    (
        "llama3",
        f'\n{{"name": "f", "parameters": {TRICKY}}}; {{"name": "g", "arguments": {{}}}} ok; {{}}',
        "\n ok; {}",
        [("f", TRICKY), ("g", "{}")],
    ),
    ("llama3", '{"name": "f", "parameters": {}};<|python_tag|>{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
    ("llama3", '<|python_tag|>{"name": "f"};{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', "", [("f", '{"x": 1}')]),
    (
        "mistral",
        f'a[TOOL_CALLS] [{{"name": "f", "arguments": {TRICKY}}}, {{"arguments": {{}}, "name": "g", "id": "a"}}] b',
        "a b",
        [("f", TRICKY), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"x": [1]}[TOOL_CALLS]g-h[ARGS]{} end',
        " end",
        [("f", '{"x": [1]}'), ("g-h", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{TRICKY}", "", [("f", TRICKY)]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', "", [("f", '{"x": 1}')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, no', ", no", [("f", "{}")]),
    ("deepseek", f"a{CALLS_BEGIN}{deepseek_call('f', TRICKY)}{CALLS_END}b", "ab", [("f", TRICKY)]),
    ("deepseek", f"{CALLS_BEGIN}{deepseek_v31_call('f', TRICKY)}{CALLS_END}", "", [("f", TRICKY)]),
    (
        "deepseek",
        f"{CALLS_BEGIN}{deepseek_call('f', '{}')}\n{deepseek_call('g', '{}')}{CALLS_END}\n",
        "\n",
        [("f", "{}"), ("g", "{}")],
    ),
    ("deepseek", deepseek_v31_call("function", "{}"), "", [("function", "{}")]),
    ("deepseek", f"{deepseek_v31_call('f', '{}')} and", " and", [("f", "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
    (
        "qwen3_coder",
        'a<tool_call>\n<function=f>\n<parameter=text>\n"x" < </b\n\n</parameter>\n<parameter=number>\n3\n</parameter>\n'
        "</function>\n</tool_call> b",
        "a b",
        [("f", r'{"text": "\"x\" < </b\n", "number": 3}')],
    ),
    (
        "qwen3_coder",
        '<function=f><parameter=list>[1, "</p"]</parameter><parameter=list>no</parameter>'
        "<parameter=é>\\</parameter></function>",
        "",
        [("f", r'{"list": [1, "</p"], "list": "no", "é": "\\"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f></function></tool_call>\n<tool_call>\n<function=g-h></function>",
        "\n",
        [("f", "{}"), ("g-h", "{}")],
    ),
]
SCHEMAS = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "integer"},
            "list": {"anyOf": [{"type": "array"}, {"type": "string"}]},
        }
    }
}
# not calls: everything is text, exactly
PLAIN = [
    "",
    "Use `<tool_call>` to call, then </tool_call>.",
    "1 < 2 <t <tool <tool_cal l> [TOOL [TOOL_CALLS] is a marker; <|python_tag|> too <｜tool▁calls",
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"name": "f", "argu',
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"x": 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": }</tool_call>',
    "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    '{"answer": {"name": "f"}}',
    '{"name": "Ada", "age": 36}',
    '{"name": "Ada"}',
    '{"name": "Ada", "parameters": 3}',
    'The call {"name": "f", "parameters": {}} is not at the start',
    '<|python_tag|>brave_search.call(query="x")',
    "[TOOL_CALLS][]",
    "[TOOL_CALLS][1]",
    "[TOOL_CALLS]f[ARGS]x",
    "[TOOL_CALLS][ARGS]{}",
    "[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}",
    f"{CALLS_BEGIN}{CALLS_END}",
    f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}f\n```json\nno{CALL_END}",
    f"{CALL_BEGIN}f{{}}",
    f"{CALL_BEGIN}{SEPARATOR}{{}}",
]
# begun and then broken: a call with what was written, not closed
BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": nul', "", ("f", "nul")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "abc', "", ("f", '{"x": "abc')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a\\', "", ("f", '{"x": "a\\')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [1}}</tool_call>.', ".", ("f", '{"x": [1}}')),
    ("llama3", '{"name": "f", "parameters": {"x": 1', "", ("f", '{"x": 1')),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": ', "", ("f", '{"x": ')),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x', "", ("f", '{"x')),
    ("deepseek", f"{CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{", "", ("f", "{")),
    ("qwen3_coder", "<tool_call><function=f><parameter=text>abc\n</par", "", ("f", '{"text": "abc\\n</par')),
    ("qwen3_coder", "<function=f><parameter=number>1</parameter>\nso", "\nso", ("f", '{"number": 1')),
]
THINKING = [  # text, prompt, expected reasoning, expected text
    ("<think>why\n</think>\n\nso", "", "why\n", "\n\nso"),
    ("\n<think></think>so", "", "", "\nso"),
    ("why</think>so", "ask<think>\n", "why", "so"),
    ("<think>why</think>so", "ask<think>\n", "why", "so"),
    ("<think>never closed </thin", "", "never closed </thin", ""),
    ("why </thinks> <tool_call></think>x</think>", "<think>", "why </thinks> <tool_call>", "x</think>"),
    ("so</think>x", "<think>\n\n</think>\n\n", "", "so</think>x"),
    ("The <think> tag</think>", "", "", "The <think> tag</think>"),
    ("<thi", "", "", "<thi"),
    ("", "<think>", "", ""),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), EXAMPLES)
def test_calls_and_the_text_around_them(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text), cut(text, range(0, len(text), 3))):
        said = parse(form, pieces)
        assert said.short == (content, calls)
        assert all(call.closed for call in said.calls)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    assert parse(form, [text]).short == parse(form, text).short == (text, [])


@pytest.mark.parametrize(("form", "text", "content", "call"), BROKEN)
def test_a_call_that_breaks_off_keeps_its_raw_arguments(
    form: str, text: str, content: str, call: tuple[str, str]
) -> None:
    for pieces in ([text], list(text)):
        said = parse(form, pieces)
        assert said.short == (content, [call])
        assert said.calls[0].closed is False


@pytest.mark.parametrize(("text", "prompt", "reasoning", "content"), THINKING)
def test_reasoning(text: str, prompt: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        said = parse(None, pieces, "think", prompt)
        assert (said.reasoning, said.text) == (reasoning, content)


def test_mistral_reasoning() -> None:
    said = parse("mistral", "[THINK]why[/THINK]so[TOOL_CALLS]f[ARGS]{}", "mistral")
    assert said.order == [("reasoning", "why"), ("text", "so"), ("call 0", "f")]


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {"y": "é"}}\n</tool_call>'
F, G = ("f", '{"x": 1}'), ("g", '{"y": "é"}')
# the boundaries that one accepted run fused in production (rtp-llm pull request 694): the pieces as they came
FUSED = {
    "reasoning end, text and tool start": (["<think>hm", "</think> xxx<tool_call>", CALL[11:]], " xxx", [F]),
    "tool start in mid-stream": (["a", "b" + CALL[:33], CALL[33:]], "ab", [F]),
    "tool end and newline": ([CALL[:-14], "}\n</tool_call>\n"], "\n", [F]),
    "tool end and text going on": ([CALL[:-13], "\n</tool_call>yyy", "zzz"], "yyyzzz", [F]),
    "a whole call in one piece": ([CALL], "", [F]),
    "several calls in one piece": ([f"..{CALL}{OTHER[:20]}", OTHER[20:]], "..", [F, G]),
    "one tool's end with the next one's start": ([CALL[:-12], "</tool_call><tool_call>", OTHER[11:]], "", [F, G]),
}


@pytest.mark.parametrize("case", FUSED)
def test_fused_boundaries(case: str) -> None:
    pieces, text, calls = FUSED[case]
    said = parse("hermes", pieces, "think")
    assert said.short == (text, calls)
    assert said == parse("hermes", "".join(pieces), "think")
    assert said.reasoning == ("hm" if case.startswith("reasoning") else "")


SOURCES = [(form, text) for form, text, *_ in EXAMPLES + BROKEN] + [(form, text) for form in FORMS for text in PLAIN]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SOURCES), st.booleans(), st.lists(st.integers(0, 10**6), max_size=12))
def test_cuts_change_nothing(source: tuple[str, str], thinks: bool, places: list[int]) -> None:
    form, text = source
    text = f"<think>{text}</think>{text}" if thinks else text
    assert parse(form, cut(text, places), "think") == parse(form, [text], "think")


FRAGMENTS = [
    *MARKERS,
    *'{}[]",:;\\ \n<[`é😀',
    '{"name": "f", ',
    '"arguments": ',
    '"parameters": {',
    "```json\n",
    "f",
    "tool",
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORMS), st.lists(st.sampled_from(FRAGMENTS), max_size=25), st.integers(1, 60), st.data())
def test_any_text_whatever(form: str, fragments: list[str], limit: int, data: st.DataObject) -> None:
    """Nothing raises, every cut agrees, also with a small limit, and without calls the text is whole."""
    text = "".join(fragments)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = parse(form, [text], held_limit=limit)
    assert parse(form, cut(text, places), held_limit=limit) == parse(form, text, held_limit=limit) == whole
    whole.short  # noqa: B018  (every call was ended)
    if not whole.calls:
        assert whole.text == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(MARKERS) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent),
    st.dictionaries(st.text(max_size=5) | st.sampled_from(MARKERS), JSON, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
WORDS = st.sampled_from(["", "So. ", "a < b\n", "[TOOL", "<tool", "é😀", "</tool_call", "<｜tool"])
RENDERED: dict[str, tuple[str, Callable[[list[tuple[str, str]]], str]]] = {
    "Hermes": (
        "hermes",
        lambda calls: "".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls),
    ),
    "Llama": (
        "llama3",
        lambda calls: "<|python_tag|>" + "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls),
    ),
    "Mistral list": (
        "mistral",
        lambda calls: "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]",
    ),
    "Mistral names": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)),
    "V3": ("deepseek", lambda calls: CALLS_BEGIN + "\n".join(deepseek_call(n, a) for n, a in calls) + CALLS_END),
    "V3.1": ("deepseek", lambda calls: CALLS_BEGIN + "".join(deepseek_v31_call(n, a) for n, a in calls) + CALLS_END),
}


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(sorted(RENDERED)),
    st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a-b.c"]), ARGUMENTS), min_size=1, max_size=3),
    st.tuples(WORDS, WORDS, WORDS),
    st.lists(st.integers(0, 10**6), max_size=10),
)
def test_what_a_template_writes_is_read_back(
    kind: str, calls: list[tuple[str, str]], words: tuple[str, str, str], places: list[int]
) -> None:
    form, render = RENDERED[kind]
    thought, before, after = words
    text = f"<think>{thought}</think>{before}{render(calls)}{after}"
    said = parse(form, cut(text, places), "think")
    assert said.short == (before + after, calls)
    assert said.reasoning == thought


def marker_tail(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of a text may still become a marker."""
    lengths = range(1, max(map(len, markers)))
    return max((n for n in lengths if any(len(m) > n and text.endswith(m[:n]) for m in markers)), default=0)


@pytest.mark.parametrize("form", FORMS)
def test_no_more_is_held_back_than_may_become_a_marker(form: str) -> None:
    text = "a <tool <<tool_cal [TOOL_[TOOL_CALL <|python<|python_tag <｜tool▁call<｜tool▁calls▁ b"
    parser, said = tool_parsers[form](), Said()
    for end, char in enumerate(text, 1):
        said.add(parser.feed(char))
        assert said.text == text[: end - marker_tail(text[:end], tool_parsers[form].markers)]
    assert said.add(parser.finish()).text == text


def test_reasoning_holds_back_only_its_marker() -> None:
    text = "a < b </t </thin </thinker"
    parser, said = reasoning_parsers["think"](opened=True), Said()
    for end, char in enumerate(text, 1):
        said.add(parser.feed(char))
        if end > 1:  # the very first characters may still be the opening marker
            assert said.reasoning == text[: end - marker_tail(text[:end], ("</think>",))]
    assert said.add(parser.finish()).reasoning == text


@pytest.mark.parametrize(
    ("form", "head"), [("hermes", '<tool_call>{"name": "f", "arguments": '), ("mistral", "[TOOL_CALLS]f[ARGS]")]
)
def test_arguments_stream_without_delay(form: str, head: str) -> None:
    parser = tool_parsers[form]()
    assert parser.feed(head) == []
    (begin, first) = parser.feed("{")
    assert isinstance(begin, ToolCallBegin)
    assert first == ToolArguments(0, "{")
    for char in '"x": "</tool_call>", "y": [1, 2':
        assert parser.feed(char) == [ToolArguments(0, char)]


def test_plain_json_is_let_go_at_the_first_key_that_no_call_has() -> None:
    parser = tool_parsers["llama3"]()
    assert parser.feed('{"name": "Ada", ') == []
    assert parser.feed('"age": ') == [Text('{"name": "Ada", "age": ')]
    assert parser.feed("36") == [Text("36")]


def test_calls_without_a_marker_must_name_a_tool_of_the_request() -> None:
    text = '{"name": "Ada", "parameters": {}}'
    assert parse("llama3", [text], tool_names=frozenset({"f"})).short == (text, [])
    assert parse("llama3", [text], tool_names=frozenset({"Ada"})).short == ("", [("Ada", "{}")])
    assert parse("llama3", [f"<|python_tag|>{text}"], tool_names=frozenset({"f"})).short == ("", [("Ada", "{}")])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "head", ['<tool_call>{"x": "', '{"parameters": {"', "[TOOL_CALLS]   ", CALLS_BEGIN, "[TOOL_CALLS][", "<tool_call>"]
)
def test_what_is_held_back_is_bounded(form: str, head: str) -> None:
    parser, said = tool_parsers[form](ToolOptions(held_limit=1000)), Said()
    fill = '"' if head.endswith('"') else " "
    total = head
    said.add(parser.feed(head))
    for _ in range(50):
        said.add(parser.feed(fill.replace('"', "y") * 100))
        total += fill.replace('"', "y") * 100
        assert len(total) - len(said.text) <= 1000 + 100
    assert said.add(parser.finish()).text == total


def test_deep_arguments_need_no_memory() -> None:
    depth = 20000
    arguments = '{"x": ' + "[" * depth + "]" * depth + "}"
    said = parse("mistral", [f"[TOOL_CALLS]f[ARGS]{arguments}."])
    assert said.short == (".", [("f", arguments)])
    assert said.calls[0].closed


def test_ids() -> None:
    texts = [f"[TOOL_CALLS]f[CALL_ID]{id}[ARGS]{{}}" for id in ("abcdefghi", "abcdefghi", "abc")]
    ids = [call.id for call in parse("mistral", texts, make_id=None).calls]
    assert ids[0] == "abcdefghi", "the model's own"
    assert ids[1] != ids[0], "the model repeated itself"
    assert all(len(id) == 9 and id.isalnum() for id in ids), "templates accept no other"
    assert parse("hermes", [CALL], make_id=None).calls[0].id.startswith("call_")


def checkpoint(template: str | None, *special: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(backend, templates={} if template is None else {"default": template})


@pytest.mark.parametrize(
    ("template", "special", "tools", "reasoning"),
    [
        ("{{ tools }} <tool_call>\n ... <think>", (), "hermes", "think"),
        ("... <|python_tag|>", (), "llama3", None),
        ('Respond with {"name": function name, "parameters": ...', (), "llama3", None),
        ("[TOOL_CALLS] [THINK]", (), "mistral", "mistral"),
        (f"{CALLS_BEGIN} </think>", (), "deepseek", "think"),
        ("<tool_call>\n<function=name>", (), "qwen3_coder", None),
        ("{% if tools %}", ("[TOOL_CALLS]",), "mistral", None),  # only the vocabulary shows it
        ("no word of them", ("[TOOL_CALLS]", "<think>"), None, None),
        ("<tool_call>\n<arg_key>", (), None, None),  # a form that no parser reads
        ("<tool_call> [TOOL_CALLS] [THINK] <think>", (), None, None),
        (None, ("[TOOL_CALLS]",), None, None),
    ],
)
def test_parsers_are_chosen_by_the_checkpoint(
    template: str | None, special: tuple[str, ...], tools: str | None, reasoning: str | None
) -> None:
    chosen = choose(ParserNames("auto", "auto"), checkpoint(template, *special))
    assert (chosen[0].name, chosen[1].name) == (tools, reasoning)
    assert all(choice.reason for choice in chosen)
    assert [choice.name for choice in choose(ParserNames(None, "none"), checkpoint(template))] == [None, None]
    assert [choice.name for choice in choose(ParserNames("llama3", "think"), checkpoint(template))] == [
        "llama3",
        "think",
    ]


def test_tools_may_have_a_template_of_their_own() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    tokenizer = Tokenizer(backend, templates={"default": "<think>", "tool_use": "[TOOL_CALLS]"})
    tools, reasoning = choose(ParserNames("auto", "auto"), tokenizer)
    assert (tools.name, reasoning.name) == ("mistral", "think")
    assert "[TOOL_CALLS]" in tools.reason


def test_refusals_name_the_choices() -> None:
    ambiguous, _ = choose(ParserNames("auto"), checkpoint("<tool_call> [TOOL_CALLS]"))
    assert "hermes, mistral" in ambiguous.reason
    with pytest.raises(ValueError, match=r"unknown tool parser 'nosuch'; known: .*hermes"):
        choose(ParserNames("nosuch"), None)
    with pytest.raises(ValueError, match="unknown reasoning parser"):
        choose(ParserNames(reasoning="nosuch"), None)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SOURCES), st.lists(st.integers(0, 10**6), max_size=12))
def test_merged_events_are_those_of_the_whole_text(source: tuple[str, str], places: list[int]) -> None:
    def events(pieces: Iterable[str]) -> list[Event]:
        parser = answer_parser(ParserNames(source[0], "think"), "", ToolOptions(make_id=lambda: "id"))
        return merged([event for piece in pieces for event in parser.feed(piece)] + parser.finish())

    whole = "<think>why</think>" + source[1]
    assert events(cut(whole, places)) == events([whole])


def test_reasoning_ends_with_the_last_character_of_its_marker() -> None:
    parser = answer_parser(ParserNames(None, "think"))
    states = [(parser.feed(character), parser.thinks)[1] for character in "<think>a</think>b"]
    assert states == [False] * 6 + [True] * 9 + [False] * 2


HEAD = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
HARMONY = [  # text, expected order of reasoning, text and calls, arguments
    ("<|channel|>final<|message|>Hi.", [("text", "Hi.")], []),
    (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        [("reasoning", "hm"), ("text", "Hi.")],
        [],
    ),
    (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + HEAD + '{"x": 1}<|call|>',
        [("reasoning", "hm"), ("call 0", "f")],
        ['{"x": 1}'],
    ),
    (
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.g"
        + "<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
        + HEAD
        + '{"y": "<|end"}',
        [("text", "First."), ("call 0", "g"), ("call 1", "f")],
        ["{}", '{"y": "<|end"}'],
    ),
    (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>analysis<|message|>b<|end|>",
        [("reasoning", "ab")],
        [],
    ),
    ("<|channel|>analysis<|message|>never clo", [("reasoning", "never clo")], []),
    ("plain", [("text", "plain")], []),
    ("<|channel|>final", [("text", "<|channel|>final")], []),
]


@pytest.mark.parametrize(("text", "order", "arguments"), HARMONY)
def test_harmony(text: str, order: list[tuple[str, str]], arguments: list[str]) -> None:
    for pieces in ([text], list(text), cut(text, range(0, len(text), 7))):
        said = parse("harmony", pieces, "harmony")
        assert said.order == order
        assert [call.arguments for call in said.calls] == arguments
        assert all(call.closed for call in said.calls)


def test_harmony_counts_what_is_analysis() -> None:
    parser = answer_parser(ParserNames("harmony", "harmony"))
    pieces = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "hm",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
    ]
    states = [(parser.feed(piece), parser.thinks)[1] for piece in [*pieces, "<|message|>", "so"]]
    assert states == [False, False, True, True] + [False] * 7
    assert choose(ParserNames("auto", "auto"), checkpoint("<|channel|>"))[1].name == "harmony"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*HARMONY_MARKS, "analysis", "final", " to=functions.f", "{}", "a", " "]), max_size=14),
    st.data(),
)
def test_harmony_cut_anywhere(fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    whole = parse("harmony", [text], "harmony")
    assert parse("harmony", cut(text, places), "harmony") == whole
    whole.short  # noqa: B018  (every call was ended)
