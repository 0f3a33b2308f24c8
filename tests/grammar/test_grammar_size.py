"""Repetitions of repetitions are refused before they are compiled; what people write is taken."""

import pytest

from outrider.grammar.limits import check_grammar, check_regex, schema_text


@pytest.mark.parametrize(
    "regex",
    [
        "((([a-z]{0,16384}){0,16384}){0,16384}){0,16384}",
        "(((([a-z]*)*)*)*)*",
        "([a-z]{0,1000}){0,1000}",
        "(([a-z]{0,200})?[0-9]{0,3}){0,200}",
        "(?:(?<name>[a-z]{0,1000})|x){1000}",
        r"([\)\]]{0,1000}){0,1000}",
    ],
)
def test_nested_repetition_is_refused(regex: str) -> None:
    with pytest.raises(ValueError, match="repeats repetitions"):
        check_regex(regex)


@pytest.mark.parametrize(
    "regex",
    [
        r"(\d{1,3}\.){3}\d{1,3}",
        "[a-z]{0,16384}",
        r"([A-Z][a-z]{1,40} ){1,400}\.",
        r"((\w+(\s\w+)*)?,?)*",
        r"(([A-Z][a-z]+ )+\. )+",
        r"\{(\"[a-z]{1,99}\": \d{1,99},){0,999}\}",
        r"([a-z]{8}-){4}[a-z]{8}",
    ],
)
def test_what_people_write_is_taken(regex: str) -> None:
    check_regex(regex)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= a{0,1000}\na ::= b{0,1000}\nb ::= [a-z]{0,1000}",
        'root ::= "x" (a | b){0,500}\na ::= b*\nb ::= ([a-z]{0,500} | "}"?)',
    ],
)
def test_repetition_through_rules_is_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match="repeats repetitions"):
        check_grammar(grammar)


def test_grammars_that_people_write_are_taken() -> None:
    check_grammar('root ::= item ("," item){0,500}\nitem ::= [a-z]{1,200} ("(" root ")")?  # {0,999}')
    check_grammar('root ::= "{0,9999}" | root "a"')


def test_many_optional_properties_are_not_counted() -> None:
    properties = {f"p{number}": {"type": "integer"} for number in range(300)}
    with pytest.raises(ValueError, match="300 optional"):
        schema_text({"type": "object", "properties": properties, "maxProperties": 9})
    schema_text({"type": "object", "properties": properties})
    schema_text({"type": "object", "properties": properties, "required": list(properties)[:250], "maxProperties": 260})
