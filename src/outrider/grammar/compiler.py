"""From what a client asks for to a compiled grammar of one vocabulary. xgrammar does it; a compilation cannot be cut
short, so limits.py and size.py bound what it is given, and a server tries it out elsewhere first."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from outrider.extras import extra_missing
from outrider.grammar.limits import MAX_GRAMMAR_LEN, check_grammar, check_regex, schema_text, tag_text
from outrider.sampling_params import Guided

if TYPE_CHECKING:
    import xgrammar

MAX_CHOICES = 2**10
CACHE_BYTES = 2**26
NUM_THREADS = 2
_CONTROL = frozenset(range(32)) - frozenset(b"\n\r")


@dataclass(frozen=True)
class Words:
    """What a compiler knows of a vocabulary. Plain data, for any process."""

    token_bytes: list[bytes]  # of each id
    end_ids: frozenset[int]
    silent: frozenset[int]  # ids that are no text: special tokens, and those that the vocabulary does not use
    unused: frozenset[int]  # the latter


@dataclass(frozen=True, eq=False)
class Dialect:
    """A vocabulary as grammars of one kind see it."""

    compiler: xgrammar.GrammarCompiler
    banned: frozenset[int]  # ids that no answer may hold
    special: frozenset[int]  # ids that are asked for by their number, and not by what they spell


class GrammarCompiler:
    """Compiles grammars for one vocabulary. What was compiled lately is kept."""

    def __init__(self, words: Words) -> None:
        import_xgrammar()  # or an error that says how to get it
        self._words = words

    def compile(self, guided: Guided) -> xgrammar.CompiledGrammar:
        compiler, text = self.dialect(guided).compiler, grammar_text(guided)
        try:
            if is_json(guided):
                return compiler.compile_json_schema(text, max_whitespace_cnt=guided.max_whitespace)
            if guided.regex is not None:
                return compiler.compile_regex(text)
            if guided.structural_tag is not None:
                return compiler.compile_structural_tag(text)
            return compiler.compile_grammar(text)
        except RuntimeError as error:  # what xgrammar raises for all that it cannot read
            reason = re.sub(r"^\[[\d:]+\] \S+: (Check failed: \(.*?\) is false: )?", "", str(error).strip())[:300]
            raise ValueError(f"guided: the {guided.kind} cannot be used ({reason}); correct it") from error

    def dialect(self, guided: Guided) -> Dialect:
        if guided.structural_tag is not None:
            return self._for_tags
        return self._for_json if is_json(guided) else self._for_text

    @cached_property
    def _for_text(self) -> Dialect:
        """Special tokens are no text, and so never part of an answer; the head may be wider than the vocabulary."""
        return self._dialect(self._words.silent)

    @cached_property
    def _for_json(self) -> Dialect:
        return self._dialect(self._words.silent | self._control)

    @cached_property
    def _for_tags(self) -> Dialect:
        """Structural tags may ask for special tokens by their ids. These are spelt as bytes that no text has."""
        unused = self._words.unused
        return self._dialect(self._control | unused, self._words.silent - unused)

    @cached_property
    def _control(self) -> frozenset[int]:
        """Tokens that hold control characters: JSON needs none but line ends, and xgrammar, where a string's length is
        bounded, would allow them in it."""
        return frozenset(id for id, text in enumerate(self._words.token_bytes) if _CONTROL & set(text))

    def _dialect(self, banned: frozenset[int], special: frozenset[int] = frozenset()) -> Dialect:
        xgrammar, words = import_xgrammar(), self._words
        vocabulary = list(words.token_bytes)
        for id in special:
            vocabulary[id] = b"\xff%d" % id
        for id in banned | words.end_ids:
            vocabulary[id] = b""
        info = xgrammar.TokenizerInfo(
            vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=sorted(words.end_ids)
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=NUM_THREADS, cache_limit_bytes=CACHE_BYTES)
        return Dialect(compiler, banned, special)


def grammar_text(guided: Guided) -> str:
    """What is compiled: a schema, a regular expression, a structural tag or a grammar, checked as far as can be told
    without compiling it."""
    if guided.json_object:
        return '{"type": "object"}'
    if guided.json_schema is not None:
        return schema_text(guided.json_schema)
    if guided.regex is not None:
        check_regex(guided.regex)
        return guided.regex
    if guided.choice is not None:
        return choice_grammar(guided.choice)
    if guided.structural_tag is not None:
        return tag_text(guided.structural_tag, guided.max_whitespace)
    assert guided.grammar is not None
    check_grammar(guided.grammar)
    return guided.grammar


def is_json(guided: Guided) -> bool:
    return guided.json_object or guided.json_schema is not None


def choice_grammar(choices: Sequence[str]) -> str:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise ValueError(f"guided: {len(choices)} choices; between 1 and {MAX_CHOICES} are taken")
    if sum(map(len, choices)) > MAX_GRAMMAR_LEN:
        raise ValueError(f"guided: the choices have more than {MAX_GRAMMAR_LEN} characters; shorten them")
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, text))}"' for text in choices)


def _escaped(character: str) -> str:
    code = ord(character)
    if code == 0 or 0xD800 <= code < 0xE000:
        raise ValueError("guided: a choice holds a zero character or half of a surrogate pair; remove it")
    return character if character.isascii() and character.isalnum() else f"\\U{code:08x}"


def import_xgrammar() -> Any:
    try:
        with _without_transformers():
            import xgrammar
    except ImportError as error:
        raise extra_missing("guided", "serve", error) from error
    return xgrammar


class _Nothing(ModuleType):
    """A module in which every name is a class of its own, but those that Python asks every module for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _without_transformers() -> Iterator[None]:
    """xgrammar asks transformers for classes that vocabularies could be of, and ours never are: most of a second of
    importing, in every process that knows a grammar."""
    if "transformers" in sys.modules or "xgrammar" in sys.modules:
        yield
        return
    sys.modules["transformers"] = _Nothing("transformers")
    try:
        yield
    finally:
        del sys.modules["transformers"]
