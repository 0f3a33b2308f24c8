"""JSON schemas of many shapes, made from a seed. All of them are bounded, so that a small model comes to an end."""

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Make = Callable[[random.Random, int], Schema]

KEYS = [
    "name",
    "größe",
    "名前",
    "two words",
    "a-b",
    "dollar$",
    "emoji😀",
    'quo"te',
    "back\\slash",
    "x",
    "type",
    "items",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4"]
PATTERNS = ["[a-f]{2,4}", "(yes|no)", "[A-Z][a-z]{1,3}", "\\d{3}-\\d{2}", "v[0-9]\\.[0-9]"]


def text(rng: random.Random, depth: int) -> Schema:
    shortest = rng.randint(0, 3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 6)}


def pattern(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"}


def form(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def whole(rng: random.Random, depth: int) -> Schema:
    low = rng.choice([-1000, -5, 0, 1, 99])
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 3, 500])}


def excluded(rng: random.Random, depth: int) -> Schema:
    return {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": rng.choice([2, 10, 1000])}


def simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(["red", "grün", "青", 7, -1, True, None, 'a"b', "line\nbreak"], rng.randint(1, 6))}


def big_enum(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "enum": [f"option-{rng.randint(0, 10**6)}-{number}" for number in range(300)]}


def const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(["fixed", 12, False, None, "schön"])}


def array(rng: random.Random, depth: int) -> Schema:
    fewest = rng.randint(0, 2)
    return {"type": "array", "items": any_of_them(rng, depth + 1), "minItems": fewest, "maxItems": fewest + 1}


def pair(rng: random.Random, depth: int) -> Schema:
    items = [any_of_them(rng, depth + 1), any_of_them(rng, depth + 1)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2, "maxItems": 2}


def thing(rng: random.Random, depth: int) -> Schema:
    """Some of the fields may be left out."""
    names = rng.sample(KEYS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: any_of_them(rng, depth + 1) for name in names},
        "required": names[: rng.randint(0, len(names))],
        "additionalProperties": False,
    }


def either(rng: random.Random, depth: int) -> Schema:
    return {
        rng.choice(["anyOf", "anyOf", "oneOf"]): [
            const(rng, depth),
            {"type": "integer", "minimum": 13, "maximum": rng.choice([13, 40])},
        ]
    }


def deep(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "boolean"}
    for _ in range(8):
        schema = {"type": "object", "properties": {"in": schema}, "required": ["in"], "additionalProperties": False}
    return schema


LEAVES: list[Make] = [text, pattern, form, whole, excluded, simple, enum, const]
NESTED: list[Make] = [array, pair, thing, either]


def any_of_them(rng: random.Random, depth: int) -> Schema:
    kinds = LEAVES if depth >= 3 else LEAVES + NESTED
    return rng.choice(kinds)(rng, depth)


def tool(rng: random.Random, depth: int) -> Schema:
    """What a call of a function looks like."""
    return {
        "type": "object",
        "properties": {"name": {"const": "walk"}, "arguments": thing(rng, 1)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def shared(rng: random.Random, depth: int) -> Schema:
    place = rng.choice(["$defs", "definitions"])
    part = {"$ref": f"#/{place}/part"}
    return {
        "type": "object",
        "properties": {"one": part, "two": {"anyOf": [part, {"type": "null"}]}},
        "required": ["one", "two"],
        "additionalProperties": False,
        place: {"part": thing(rng, 2)},
    }


def extended(rng: random.Random, depth: int) -> Schema:
    """Names that the schema does not know; how many is bounded, else a small model goes on for ever."""
    return {
        "type": "object",
        "properties": {"known": whole(rng, depth)},
        "required": ["known"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    }


ROOTS: list[Make] = [thing, thing, array, pair, either, shared, tool, deep, big_enum, extended, form, pattern, enum]


def schemas(count: int, seed: int = 0) -> list[Schema]:
    """Every kind of root in turn, as long as it has something new; no two are alike."""
    rng, made = random.Random(seed), {}
    for number in itertools.count():
        schema = ROOTS[number % len(ROOTS)](rng, 0)
        made.setdefault(json.dumps(schema), schema)
        if len(made) == count:
            break
    return list(made.values())
