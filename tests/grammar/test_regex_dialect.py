"""Regular expressions that a grammar cannot keep are refused by name, and all others are taken as they are."""

import json
from collections.abc import Iterator

import pytest

from outrider import LLM, SamplingParams
from outrider.grammar.regex_dialect import check_dialect
from outrider.sampling_params import Guided

REFUSED = {
    r"^(?=.*[0-9])[a-z0-9]+$": r"a lookahead, \(\?= at character 2",
    r"(?!x)[a-z]+": r"a negative lookahead, \(\?! at character 1",
    r"(?<=a)b": "a lookbehind",
    r"a(?<!b)c": "a negative lookbehind",
    r"(a|b)\1": r"a backreference, \\1 at character 6",
    r"(?<n>a)\k<n>": "a backreference",
    r"\bfoo\b": "a word boundary",
    r"(?i)abc": "a group modifier",
    r"(?>ab)c": "a group modifier",
    r"(?P<n>a)": "a group modifier",
    r"\p{L}+": "a Unicode class",
    r"[\p{L}]": "a Unicode class",
    r"\Aab\Z": r"an unknown escape, \\A",
    r"a*+b": "a possessive quantifier",
    r"a^b": "an anchor that is not at the beginning",
    r"(a|^b)c|x(^y)": "an anchor that is not at the beginning",
    r"(a$|b)c": "an anchor that is not at the end",
    r"a$b": "an anchor that is not at the end",
    r"(^a)+b": "an anchor that is repeated",
}
TAKEN = [
    r"^[a-z]{2,4}$",
    r"^(?:red|blue)-\d{1,3}$",
    r"^a|b$",
    r"(?<year>\d{4})-\d\d",
    r"[\w.+-]+@[\w-]+\.[a-z]{2,}?",
    r"\(\?=a\)",
    r"[(?=a)]+\\1",
    r"[\^$\]]x",
    r"[^a$]{2}",
    r"\x41\u0042\/\-",
    r"\$5\^",
]
ANCHORED = [r"^(a|(b$))$", r"(^a|b)c$", r"(?:^|^a)b$"]  # where an anchor that is passed over changes nothing


@pytest.mark.parametrize("regex", REFUSED)
def test_what_cannot_be_kept_is_named(regex: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[regex]):
        check_dialect(regex)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=64) as made:
        yield made


@pytest.mark.parametrize("regex", TAKEN)
def test_what_can_be_kept_is_taken(regex: str, llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """xgrammar warns on the error stream of what it passes over: there is nothing."""
    llm.engine.guide(Guided(regex=regex))
    llm.engine.guide(Guided(json_schema={"type": "string", "pattern": regex}))
    assert "Warning" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("regex", ANCHORED)
def test_anchors_at_the_ends_of_groups(regex: str, llm: LLM) -> None:
    llm.engine.guide(Guided(regex=regex))
    llm.engine.guide(Guided(json_schema={"type": "string", "pattern": regex}))


@pytest.mark.parametrize("regex", REFUSED)
def test_both_ways_of_asking_are_refused(regex: str, llm: LLM) -> None:
    """As guided_regex, and as a pattern deep in a schema, with the way to it."""
    with pytest.raises(ValueError, match="cannot be kept: it holds " + REFUSED[regex]):
        llm.generate("a", SamplingParams(guided=Guided(regex=regex)))
    inner = {"type": "object", "properties": {"code": {"anyOf": [{"type": "null"}, {"pattern": regex}]}}}
    schema = {"type": "array", "items": inner}
    for form in (schema, json.dumps(schema)):
        with pytest.raises(ValueError, match=r"items\.properties\.code\.anyOf\.1: pattern: .* " + REFUSED[regex]):
            llm.generate("a", SamplingParams(guided=Guided(json_schema=form)))
