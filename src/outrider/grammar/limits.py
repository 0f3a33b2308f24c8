"""What a client may ask a grammar to be: bounded before it is compiled, and nothing taken that would not be kept.
xgrammar passes over what it does not know; here that is an error, or put in words that it does know."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from outrider.grammar.regex_dialect import check_dialect
from outrider.grammar.size import check_grammar_size, check_regex_size

MAX_SCHEMA_LEN = 2**16  # characters
MAX_XML_SCHEMA_LEN = 2**14  # these take four times as long to compile
MAX_SCHEMA_DEPTH = 64
MAX_GRAMMAR_LEN = 2**15
MAX_REGEX_LEN = 2**10
MAX_NESTING = 64  # of brackets, in a regular expression or a grammar
MAX_QUANTIFIERS = 32  # in a regular expression, or in one rule of a grammar: compilation is quadratic in them
MAX_REPEATS = 2**14
MAX_TOTAL_REPEATS = 2**16  # of all lengths and counts in a schema
MAX_PROPERTIES = 2**9  # of one object
MAX_COUNTED_OPTIONAL = 64  # optional properties of an object that bounds their number: compilation is cubic in them
MAX_SHOWN_PATH = 120  # characters, in an error

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_UNKNOWN = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "multipleOf", "propertyNames"),
    *("dependentSchemas", "dependentRequired", "dependencies", "$dynamicRef", "$recursiveRef", "patternProperties"),
)
_DECIDING = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")  # xgrammar looks at nothing beside one of these
_ABOUT = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties"),
    ),
}
_SCHEMA_KEYS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP_KEYS = ("properties", "$defs", "definitions")
_NOTES = ("description", "title", "examples", "default", "$comment", "$schema")  # for readers; they bind nothing
_TAG_TEXTS = {"const_string": ("value",), "tag": ("begin", "end"), "tags_with_separator": ("separator",)}
_TAG_PARTS = {"sequence": "elements", "or": "elements", "tags_with_separator": "tags", "tag": "content"}


def schema_text(schema: Mapping[str, Any] | str) -> str:
    """A JSON schema as xgrammar takes it: what satisfies the result satisfies the schema (oneOf is taken as anyOf)."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if len(text) > MAX_SCHEMA_LEN:
            raise ValueError(f"it has {len(text)} characters; at most {MAX_SCHEMA_LEN} are taken")
        read = json.loads(text)
        if not isinstance(read, dict):
            raise ValueError("it must be a JSON object")
        return _bounded(json.dumps(_settled(read, ())))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"guided: the json_schema cannot be used ({error}); correct it") from error


def tag_text(tag: Mapping[str, Any], max_whitespace: int) -> str:
    """A structural tag's format as xgrammar takes it: schemas settled, and of the kinds those that bind all they match
    (no free text). All of it together may be as large as one schema."""
    try:
        return _bounded(json.dumps({"type": "structural_tag", "format": _settled_tag(tag, max_whitespace, 0)}))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"guided: the structural_tag cannot be used ({error}); correct it") from error


def _settled_tag(tag: Any, max_whitespace: int, depth: int) -> Any:
    if depth > MAX_SCHEMA_DEPTH:
        raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep")
    if not isinstance(tag, Mapping):
        raise ValueError(f"a part of it must be an object, not {tag!r}")
    kind = tag.get("type")
    if kind == "json_schema":
        return _settled_schema_tag(tag, max_whitespace)
    if kind == "token" and isinstance(tag.get("token"), int):
        return dict(tag)
    if kind not in _TAG_TEXTS and kind not in _TAG_PARTS:
        raise ValueError(f"{kind!r} is not supported")
    settled = dict(tag)
    for key in _TAG_TEXTS.get(kind, ()):
        if isinstance(tag.get(key), Mapping):  # a token
            settled[key] = _settled_tag(tag[key], max_whitespace, depth + 1)
        elif not isinstance(tag.get(key), str) or "\0" in tag[key]:
            raise ValueError(f"{key} must be text without zero characters")
    if kind in _TAG_PARTS:
        parts = tag.get(_TAG_PARTS[kind])
        if isinstance(parts, list):
            settled[_TAG_PARTS[kind]] = [_settled_tag(part, max_whitespace, depth + 1) for part in parts]
        else:
            settled[_TAG_PARTS[kind]] = _settled_tag(parts, max_whitespace, depth + 1)
    return settled


def _settled_schema_tag(tag: Mapping[str, Any], max_whitespace: int) -> dict[str, Any]:
    style, schema = tag.get("style", "json"), _settled(tag.get("json_schema"), ())
    if style not in ("json", "qwen_xml"):
        raise ValueError(f"the style {style!r} is not supported")
    if style != "json" and len(json.dumps(schema)) > MAX_XML_SCHEMA_LEN:
        raise ValueError(f"a schema for XML has more than {MAX_XML_SCHEMA_LEN} characters")
    return {"type": "json_schema", "style": style, "json_schema": schema, "max_whitespace_cnt": max_whitespace}


def _bounded(settled: str) -> str:
    if len(settled) > MAX_SCHEMA_LEN:
        raise ValueError(f"it has {len(settled)} characters; at most {MAX_SCHEMA_LEN} are taken")
    counts = re.findall(r'"(?:min|max)(?:Length|Items|Properties)": (\d+)', settled)
    if sum(map(int, counts)) > MAX_TOTAL_REPEATS:
        raise ValueError(f"its lengths and counts are more than {MAX_TOTAL_REPEATS} in all")
    return settled


def _settled(schema: Any, path: tuple[str, ...]) -> Any:
    """A schema and all those within it, checked and rewritten. `path` leads to it from the whole, one part a level."""
    if len(path) > MAX_SCHEMA_DEPTH:
        raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} deep")
    if not isinstance(schema, dict):  # true, false, or something that xgrammar will refuse
        return schema
    try:
        _check_schema(schema)
    except ValueError as error:
        raise ValueError(f"{_shown(path)}: {error}" if path else str(error)) from error
    settled = {key: value for key, value in schema.items() if key not in _NOTES}
    for key in _SCHEMA_KEYS:
        if key in schema:
            settled[key] = _settled(schema[key], (*path, key))
    for key in _LIST_KEYS:
        if isinstance(schema.get(key), list):
            settled[key] = [_settled(each, (*path, f"{key}.{number}")) for number, each in enumerate(schema[key])]
    for key in _MAP_KEYS:
        if isinstance(schema.get(key), dict):
            settled[key] = {name: _settled(each, (*path, f"{key}.{name}")) for name, each in schema[key].items()}
    return _with_type(settled)


def _shown(path: tuple[str, ...]) -> str:
    """Short enough for an error message, whatever a client calls its properties."""
    text = ".".join(path)
    return text if len(text) <= MAX_SHOWN_PATH else "..." + text[-MAX_SHOWN_PATH:]


def _with_type(schema: dict[str, Any]) -> dict[str, Any]:
    """xgrammar passes over most conditions where no type is given. Values of other types are left out."""
    kinds = [kind for kind, keys in _ABOUT.items() if any(key in schema for key in keys)]
    if "type" in schema or not kinds or any(key in schema for key in _DECIDING):
        return schema
    return {**schema, "type": kinds if len(kinds) > 1 else kinds[0]}


def _check_schema(schema: Mapping[str, Any]) -> None:
    for key in (*_UNKNOWN, *(["uniqueItems"] if schema.get("uniqueItems") else [])):
        if key in schema:
            raise ValueError(f"{key} is not supported")
    for key in _COUNTS:
        count = schema.get(key, 0)
        if not isinstance(count, int) or not 0 <= count <= MAX_REPEATS:
            raise ValueError(f"{key} must be a whole number up to {MAX_REPEATS}, not {count!r}")
    if schema.get("minLength", 0) > schema.get("maxLength", MAX_REPEATS):
        raise ValueError("minLength is above maxLength")
    _check_company(schema)
    _check_properties(schema)
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise ValueError(f"$ref must point into the schema itself, with #/, not {reference!r}")
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise ValueError(f"pattern must be text, not {schema['pattern']!r}")
        try:
            check_regex(schema["pattern"])
        except ValueError as error:
            raise ValueError(f"pattern: {str(error).removeprefix('guided: ')}") from error


def _check_company(schema: Mapping[str, Any]) -> None:
    """Conditions of which xgrammar would keep one only."""
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise ValueError("allOf with several schemas is not supported")
    lengths = any(key in schema for key in ("minLength", "maxLength"))
    if lengths + ("pattern" in schema) + ("format" in schema) > 1:
        raise ValueError("only one of pattern, format and minLength or maxLength is supported at a time")
    deciding = [key for key in _DECIDING if key in schema]
    others = [key for keys in (("type",), *_ABOUT.values()) for key in keys if key in schema]
    if {"enum", "const"}.issuperset(deciding):
        others = [key for key in others if key != "type"]
        values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
        if "const" in schema and schema["const"] not in values:
            raise ValueError("const is not among enum")
        if deciding and "type" in schema and not all(_is_of(value, schema["type"]) for value in values):
            raise ValueError(f"enum or const holds a value that is not of type {schema['type']}")
    elif len(deciding) > 1:
        raise ValueError(f"{deciding[0]} together with {deciding[1]} is not supported")
    if deciding and others:
        raise ValueError(f"{deciding[0]} together with {others[0]} is not supported")


def _check_properties(schema: Mapping[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("properties must be an object, and required a list")
    if len(properties) > MAX_PROPERTIES:
        raise ValueError(f"an object has {len(properties)} properties; at most {MAX_PROPERTIES} are taken")
    num_optional = len(properties) - len(required)
    if num_optional > MAX_COUNTED_OPTIONAL and ("minProperties" in schema or "maxProperties" in schema):
        raise ValueError(
            f"an object that counts its properties has {num_optional} optional ones; at most "
            f"{MAX_COUNTED_OPTIONAL} are taken"
        )
    missing = [name for name in required if name not in properties]
    if missing:
        raise ValueError(f"required names {missing[0]!r}, which is not among the properties")
    more = [key for key in ("additionalProperties", "unevaluatedProperties") if schema.get(key, False) is not False]
    if schema.get("minProperties", 0) > len(required) and more:  # nothing keeps a free name from coming twice
        raise ValueError(f"minProperties together with {more[0]} is not supported")


def _is_of(value: Any, types: Any) -> bool:
    names = {str: ["string"], bool: ["boolean"], int: ["integer", "number"], float: ["number"], type(None): ["null"]}
    own = names.get(type(value), ["array"] if isinstance(value, list) else ["object"])
    return any(name in own for name in (types if isinstance(types, list) else [types]))


def check_regex(regex: str) -> None:
    if len(regex) > MAX_REGEX_LEN:
        raise ValueError(f"guided: a regular expression has {len(regex)} characters; at most {MAX_REGEX_LEN} are taken")
    _check_pattern(regex, "a regular expression")
    check_regex_size(regex)
    try:
        check_dialect(regex)
    except ValueError as error:
        raise ValueError(f"guided: the regular expression cannot be kept: {error}; write it without") from error


def check_grammar(grammar: str) -> None:
    if len(grammar) > MAX_GRAMMAR_LEN:
        raise ValueError(f"guided: the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_LEN} are taken")
    for rule in grammar.split("::="):
        _check_pattern(rule, "a rule of the grammar")
    check_grammar_size(grammar)


def _check_pattern(pattern: str, what: str) -> None:
    """Brackets, quantifiers and counts within bounds. Quoted ones are counted too, which errs on the safe side."""
    if "\0" in pattern:
        raise ValueError(f"guided: {what} holds a zero character; remove it")
    depth = deepest = 0
    for character in pattern:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise ValueError(f"guided: {what} is nested more than {MAX_NESTING} deep; flatten it")
    num_quantifiers = sum(pattern.count(character) for character in "*+?{")
    if num_quantifiers > MAX_QUANTIFIERS:
        raise ValueError(f"guided: {what} holds {num_quantifiers} of * + ? {{; at most {MAX_QUANTIFIERS} are taken")
    for count in re.findall(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}", pattern):
        if any(len(number) > 9 or int(number or 0) > MAX_REPEATS for number in count):
            raise ValueError(f"guided: {what} repeats something more than {MAX_REPEATS} times; lower it")
