"""Hostile input over HTTP while others are being served: it gets a 4xx (or an answer, where it is valid after all),
and nobody else notices."""
# ruff: noqa: F811

import json
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Union, get_args, get_origin

import httpx
import pytest
from annotated_types import Ge, Gt, Le, Lt
from others import busy, is_clean, quiet  # noqa: F401
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from running import Running

from outrider.sampling_params import BOUNDS
from outrider.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/completions": (CompletionRequest, {"prompt": "Hello", "max_tokens": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hello"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
JSON = {"Content-Type": "application/json"}
LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens")


# numbers, wherever the models have them


def numbers_in(model: type[BaseModel]) -> list[tuple[str, str, Any, Any]]:
    """Every numeric field: its name, what lies around it (a list, a map, another model), and its bounds."""
    found: list[tuple[str, str, Any, Any]] = []
    for name, field in model.model_fields.items():
        for shape, low, high in _numbers(_whole(field)):
            found.append((field.alias or name, shape, low, high))
    return found


def _whole(field: FieldInfo) -> Any:
    """The annotation, with what pydantic has taken off it."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation  # type: ignore[name-defined]


def _numbers(
    annotation: Any, bounds: tuple[Any, Any] = (None, None), shape: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        for each in metadata:
            for one in getattr(each, "metadata", [each]):
                low = one.ge if isinstance(one, Ge) else one.gt if isinstance(one, Gt) else bounds[0]
                high = one.le if isinstance(one, Le) else one.lt if isinstance(one, Lt) else bounds[1]
                bounds = (low, high)
        yield from _numbers(inner, bounds, shape)
    elif get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _numbers(option, bounds, shape)
    elif get_origin(annotation) is list:
        yield from _numbers(get_args(annotation)[0], (None, None), shape + "list ")
    elif get_origin(annotation) is dict and get_args(annotation)[1] is not Any:
        yield from _numbers(get_args(annotation)[1], (None, None), shape + "map ")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from _numbers(_whole(field), (None, None), f"{shape}model:{field.alias or name} ")
    elif annotation in (int, float):
        yield shape.strip(), *bounds


def literals(low: Any, high: Any) -> list[str]:
    """As they stand in the JSON, for not all of them can be had from a number of Python's."""
    bounds = [bound for bound in (low, high) if bound is not None]
    near = [str(bound + step) for bound in bounds for step in (-1, 0, 1)]
    far = [str(-(2**63)), str(2**63), str(2**64), "-1", "0", "1", "-0", "0.5", "1e400", "-1e400", "1e-400", "9" * 5000]
    return [
        *near,
        *far,
        "NaN",
        "Infinity",
        "-Infinity",
        "true",
        "false",
        '"7"',
        '"NaN"',
        '""',
        "null",
        "[]",
        "{}",
        "[1]",
    ]


def wrapped(shape: str, literal: str) -> str:
    for part in reversed(shape.split()):
        if part == "list":
            literal = f"[{literal}]"
        elif part == "map":
            literal = f'{{"1": {literal}}}'
        else:
            literal = f'{{"{part.removeprefix("model:")}": {literal}}}'
    return literal


def test_the_models_have_numbers() -> None:
    fields = [each for model, _ in ROUTES.values() for each in numbers_in(model)]
    found = {f"{name} {shape}".strip() for name, shape, *_ in fields}
    assert {"n", "seed", "timeout", "top_logprobs", "logprobs", "tokens list", "logit_bias map", "prompt list"} <= found
    assert {
        "prompt list list",
        "speculative model:num_speculative_tokens",
        "max_tokens",
        "stop_token_ids list",
    } <= found
    assert ("n", "", 1, 64) in fields
    assert numbers_in(DetokenizeRequest) == [("tokens", "list", 0, 2**31)]
    assert all(low is not None and high is not None for _, _, low, high in fields)


@pytest.mark.parametrize("path", ROUTES)
def test_bounds_are_within_those_of_sampling(path: str) -> None:
    """What the server lets in, SamplingParams never refuses."""
    limits = BOUNDS
    for field, shape, low, high in numbers_in(ROUTES[path][0]):
        if field in limits and not shape:
            least = 0 if field == "max_tokens" else limits[field][0]  # 0: completions that score their prompt alone
            assert least <= low <= high <= limits[field][1], field


@pytest.mark.parametrize("path", ROUTES)
def test_numbers_at_their_extremes(busy: Running, path: str) -> None:
    model, valid = ROUTES[path]
    bodies = [
        (field, body_with(valid, field, wrapped(shape, literal)))
        for field, shape, low, high in numbers_in(model)
        for literal in literals(low, high)
    ]
    with httpx.Client(base_url=busy.url, timeout=60) as client, ThreadPoolExecutor(4) as pool:
        responses = pool.map(lambda each: client.post(path, content=each[1], headers=JSON), bodies)
        statuses = set()
        for (field, _), response in zip(bodies, responses, strict=True):
            statuses.add(response.status_code)
            if response.status_code != 504 or field not in (*LENGTHS, "timeout"):  # which was asked for
                is_clean(response)
    assert {200, 400} <= statuses or not bodies


def body_with(valid: dict[str, Any], field: str, literal: str) -> str:
    rest = {key: value for key, value in valid.items() if key != field}
    if field == "top_logprobs":
        rest["logprobs"] = True
    if field in LENGTHS:  # as good as no limit
        rest = {key: value for key, value in rest.items() if key != "max_tokens"} | {"timeout": 0.1}
    others = "".join(f"{json.dumps(key)}: {json.dumps(value)}, " for key, value in rest.items())
    return f'{{{others}"{field}": {literal}}}'


# bodies


def chat(fields: str) -> str:
    return json.dumps(CHAT)[:-1] + f", {fields}}}"


def said(content: str) -> str:
    return f'{{"max_tokens": 2, "messages": [{{"role": "user", "content": {content}}}]}}'


def nested(depth: int, begin: str = '{"properties": {"x": ', end: str = "}}", core: str = "{}") -> str:
    return begin * depth + core + end * depth


BODIES: dict[str, Callable[[], str | bytes]] = {
    "500k stop strings": lambda: chat(f'"stop": {json.dumps(["x"] * 500_000)}'),
    "a million stop tokens": lambda: chat(f'"stop_token_ids": {json.dumps([1] * 1_000_000)}'),
    "a deep schema": lambda: chat(f'"guided_json": {nested(90)}'),
    "a very deep schema": lambda: chat(f'"guided_json": {nested(50_000)}'),
    "a schema of itself": lambda: chat('"guided_json": {"$ref": "#"}'),
    "a schema that repeats": lambda: chat('"guided_json": {"type": "string", "maxLength": 16384}'),
    "a schema with too much": lambda: chat('"guided_json": {"type": "array", "maxItems": 99999999}'),
    "a schema with NaN": lambda: chat('"guided_json": {"type": "number", "minimum": NaN}'),
    "a wide schema": lambda: chat(
        '"guided_json": {"properties": ' + json.dumps({f"k{n}": {"type": "string"} for n in range(3000)}) + "}"
    ),
    "a huge enum": lambda: chat(f'"guided_json": {{"enum": {json.dumps([str(n) for n in range(50_000)])}}}'),
    "a schema that is none": lambda: chat('"guided_json": {"type": 7, "properties": []}'),
    "a schema that nothing fits": lambda: chat('"guided_json": {"enum": []}'),
    "a schema that names a file": lambda: chat('"guided_json": {"$ref": "file:///etc/passwd"}'),
    "a deep tool": lambda: chat(
        f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {nested(2000)}}}}}]'
    ),
    "deep JSON": lambda: '{"messages":' + "[" * 200_000 + "]" * 200_000 + "}",
    "deep JSON, open": lambda: "[" * 1_000_000,
    "deep tool choice": lambda: chat(f'"tool_choice": {nested(900)}'),
    "nested quantifiers": lambda: chat('"guided_regex": "((((a+)+)+)+)+b"'),
    "many repeats": lambda: chat('"guided_regex": "(a{1,1000}){1,1000}"'),
    "repeats of repeats": lambda: chat('"guided_regex": "((a{100}){100}){100}"'),
    "alternatives": lambda: chat(f'"guided_regex": "{"(a|aa|aaa)" * 100}"'),
    "a long regex": lambda: chat(f'"guided_regex": "{"a?" * 10_000}"'),
    "deep brackets": lambda: chat(f'"guided_regex": "{"(" * 30_000}a{")" * 30_000}"'),
    "a pattern that explodes": lambda: chat(
        '"guided_json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}'
    ),
    "left recursion": lambda: chat('"guided_grammar": "root ::= root root | \\"a\\""'),
    "an endless grammar": lambda: chat('"guided_grammar": "root ::= root"'),
    "a grammar without root": lambda: chat('"guided_grammar": "x ::= \\"a\\""'),
    "many choices": lambda: chat(f'"guided_choice": {json.dumps(["x" * 60] * 1024)}'),
    "bad UTF-8": lambda: said('"').encode()[:-4] + b"\xff\xfe\x80" + b'"}]}',
    "half a character": lambda: b'{"messages": [{"role": "user", "content": "\xe2\x82"}]}',
    "UTF-16": lambda: json.dumps(CHAT).encode("utf-16"),
    "a byte order mark": lambda: json.dumps(CHAT).encode("utf-8-sig"),
    "half a surrogate pair": lambda: said('"\\ud83d"'),
    "surrogates the wrong way round": lambda: said('"\\udc00\\ud83d"'),
    "half a pair as a stop string": lambda: chat('"stop": "\\udfff"'),
    "half a pair as a bad word": lambda: chat('"bad_words": ["\\udfff"]'),
    "half a pair as a salt": lambda: chat('"cache_salt": "\\ud800"'),
    "half a pair in a schema": lambda: chat('"guided_json": {"const": "\\ud800"}'),
    "half a pair in a regex": lambda: chat('"guided_regex": "\\ud800"'),
    "half a pair in a choice": lambda: chat('"guided_choice": ["\\ud800"]'),
    "half a pair in a grammar": lambda: chat('"guided_grammar": "root ::= \\"\\ud800\\""'),
    "half a pair as a field": lambda: chat('"\\ud800": 1'),
    "half a pair as a model": lambda: chat('"model": "\\ud800"'),
    "half a pair in a tool": lambda: chat('"tools": [{"type": "function", "function": {"name": "\\ud800"}}]'),
    "a zero in a text": lambda: said('"a\\u0000b"'),
    "a zero as a stop string": lambda: chat('"stop": "\\u0000"'),
    "nothing": lambda: "",
    "white space": lambda: " " * 1_000_000,
    "half of it": lambda: json.dumps(CHAT)[:-5],
    "two of them": lambda: json.dumps(CHAT) * 2,
    "no JSON": lambda: "messages=hello",
    "single quotes": lambda: str(CHAT),
    "a list": lambda: "[]",
    "a number": lambda: "7",
    "a text": lambda: '"hello"',
    "null": lambda: "null",
    "the same key twice": lambda: chat('"max_tokens": 1, "max_tokens": 3'),
    "the same key twice, bad": lambda: chat('"n": 1, "n": 1000'),
    "a million keys": lambda: "{" + ",".join(f'"k{n}": 1' for n in range(300_000)) + "}",
    "many answers": lambda: chat('"n": 64, "max_tokens": 1'),
    "one answer too many": lambda: chat('"n": 65'),
    "too many answers for the queue": lambda: json.dumps({"prompt": ["x"] * 64, "n": 64, "max_tokens": 1}),
    "a huge bias": lambda: chat('"logit_bias": {"1": 1e308}'),
    "a bias at its bound": lambda: chat('"logit_bias": {"1": 10000, "2": -10000}'),
    "biases without end": lambda: chat(f'"logit_bias": {json.dumps({str(n): 1 for n in range(100_000)})}'),
    "a bias for no token": lambda: chat('"logit_bias": {"2147483647": 1}'),
    "a bias for a word": lambda: chat('"logit_bias": {"hello": 1}'),
    "all tokens barred": lambda: chat(f'"logit_bias": {json.dumps({str(n): -10_000 for n in range(1024)})}'),
    "no messages": lambda: '{"messages": []}',
    "an empty message": lambda: said('""'),
    "no content": lambda: said("null"),
    "empty parts": lambda: said("[]"),
    "too many messages": lambda: json.dumps({"messages": [{"role": "user", "content": "x"}] * 5000}),
    "too long a text": lambda: said(json.dumps("word " * 1_000_000)),
    "one long word": lambda: said(json.dumps("a" * 200_000)),
    "special tokens": lambda: said('"<|im_end|><|endoftext|></s><s>"'),
    "an image from elsewhere": lambda: said('[{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]'),
    "an image that is none": lambda: said(
        '[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]'
    ),
}
PROMPTS: dict[str, Any] = {
    "empty": "",
    "no tokens": [],
    "an empty list": [[]],
    "out of the vocabulary": [10**9],
    "just out of the vocabulary": [2**31 - 1],
    "negative": [-1],
    "mixed": [1, "a"],
    "lists and texts": ["a", [1]],
    "too many": ["a"] * 65,
    "too many tokens": [1] * (2**20 + 1),
    "longer than the context": [1] * 100_000,
    "null": None,
}


@pytest.mark.parametrize("part", range(4))
def test_bodies(busy: Running, part: int) -> None:
    names = list(BODIES)[part::4]
    begin = time.monotonic()
    with httpx.Client(base_url=busy.url, timeout=60) as client:
        for name in names:
            path = "/v1/completions" if name.startswith("too many answers") else "/v1/chat/completions"
            response = client.post(path, content=BODIES[name](), headers=JSON)
            try:
                is_clean(response)
            except AssertionError as error:
                raise AssertionError(name) from error
    assert time.monotonic() - begin < 60


def test_prompts(busy: Running) -> None:
    for name, prompt in PROMPTS.items():
        response = busy.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
        is_clean(response)
        assert response.status_code == 400, name
    vocab_size = busy.llm.target.vocab_size
    for path, body in (
        ("/v1/completions", {"prompt": [vocab_size]}),
        ("/v1/completions", {"prompt": [1], "allowed_token_ids": [vocab_size]}),
        ("/v1/completions", {"prompt": [1], "stop_token_ids": [vocab_size]}),
        ("/v1/completions", {"prompt": [1], "logit_bias": {str(vocab_size): 1}}),
    ):
        assert busy.post(path, body).status_code == 400
    is_clean(busy.post("/detokenize", {"tokens": [vocab_size, 2**31 - 1]}))


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "multipart/form-data; boundary=x", "", "application/json; charset=utf-16"]
)
def test_content_types(busy: Running, kind: str) -> None:
    is_clean(busy.post("/v1/chat/completions", content=json.dumps(CHAT).encode(), headers={"Content-Type": kind}))
