"""Structured output: what a grammar allows after every row of a draft, and how far an answer has come in it.
xgrammar does the matching; grammar_limits.py bounds what it is given: a compilation cannot be cut short."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.grammar_limits import MAX_GRAMMAR_LEN, check_grammar, check_regex, schema_text
from outrider.sampling_params import Guided
from outrider.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

MAX_CHOICES = 2**10
MAX_AFTER_LEN = 2**10
MAX_WHITESPACE = 24  # characters between two parts of a JSON text: some models never stop otherwise
CACHE_BYTES = 2**26


class _Compiler(NamedTuple):
    compiler: xgrammar.GrammarCompiler
    barred: frozenset[int]  # ids that no answer may hold


class Grammars:
    """Compiles what requests ask for, for one vocabulary; what was compiled lately is kept."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: frozenset[int]) -> None:
        if tokenizer is None:
            raise ValueError("guided needs a tokenizer, and this model has none: leave guided out")
        if not end_ids:
            raise ValueError("guided needs a token that ends a text, and this model names none: leave guided out")
        _xgrammar()  # or an error that says how to get it
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, end_ids
        # special tokens are no text, and so never part of an answer; the head may be wider than the vocabulary
        silent = {id for id in range(vocab_size) if tokenizer.is_silent(id, skip_special_tokens=True)}
        self._silent = frozenset(silent - end_ids)

    @cached_property
    def _for_text(self) -> _Compiler:
        return self._compiler(self._silent)

    @cached_property
    def _for_json(self) -> _Compiler:
        """Without tokens that hold control characters: JSON needs none but line ends, and xgrammar, where a string's
        length is bounded, would allow them in it."""
        control = bytes(set(range(32)) - set(b"\n\r"))
        spelt = {id: self._tokenizer.token_bytes(id) for id in range(self._vocab_size)}
        return self._compiler(self._silent | {id for id, text in spelt.items() if set(text) & set(control)})

    def _compiler(self, barred: frozenset[int]) -> _Compiler:
        xgrammar, tokenizer = _xgrammar(), self._tokenizer
        left_out = barred | self._end_ids
        vocabulary = [b"" if id in left_out else tokenizer.token_bytes(id) for id in range(self._vocab_size)]
        info = xgrammar.TokenizerInfo(
            vocabulary, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=sorted(self._end_ids)
        )
        return _Compiler(xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=CACHE_BYTES), barred)

    def guide(self, guided: Guided) -> Guide:
        if len(guided.after or "") > MAX_AFTER_LEN:
            raise ValueError(f"guided: after has more than {MAX_AFTER_LEN} characters; shorten it")
        is_json = guided.json_object or guided.json_schema is not None
        compiler, barred = self._for_json if is_json else self._for_text
        matcher = _xgrammar().GrammarMatcher(self._compile(guided, compiler))
        num_words = -(-self._vocab_size // 32)
        guide = Guide(matcher, guided.after, self._tokenizer, self._end_ids, barred, num_words)
        if guide.is_stuck:
            raise ValueError(f"guided: nothing this model can write satisfies the {guided.kind}; correct it")
        return guide

    def _compile(self, guided: Guided, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
        try:
            if guided.json_object:
                return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_WHITESPACE)
            if guided.json_schema is not None:
                schema = schema_text(guided.json_schema)
                return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
            if guided.regex is not None:
                check_regex(guided.regex)
                return compiler.compile_regex(guided.regex)
            if guided.choice is not None:
                return compiler.compile_grammar(choice_grammar(guided.choice))
            assert guided.grammar is not None
            check_grammar(guided.grammar)
            return compiler.compile_grammar(guided.grammar)
        except RuntimeError as error:  # what xgrammar raises for all that it cannot read
            reason = re.sub(r"^\[[\d:]+\] \S+: (Check failed: \(.*?\) is false: )?", "", str(error).strip())[:300]
            raise ValueError(f"guided: the {guided.kind} cannot be used ({reason}); correct it") from error


class Guide:
    """Where one answer stands in its grammar."""

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        after: str | None,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        barred: frozenset[int],  # ids that no answer may hold
        num_words: int,  # 32 ids each
    ) -> None:
        self._matcher, self._tokenizer, self._num_words = matcher, tokenizer, num_words
        self._end_ids, self._barred = end_ids, barred
        self._marker = after.encode() if after is not None else b""
        # the end of the text so far, as long as the answer is free; None once the grammar has begun
        self._free: bytes | None = b"" if after is not None else None
        self._num_matched = 0  # tokens that the matcher has taken

    def accept(self, token: int) -> bool:
        """Takes the next token of the answer; false, and nothing happens, where the grammar forbids it."""
        if self._free is not None:
            text = self._free + self._tokenizer.token_bytes(token)
            keep = len(self._marker) - 1
            self._free = None if self._marker in text else text[-keep:] if keep else b""
            return True
        if token in self._barred:  # xgrammar would refuse it too, but not without a warning
            return False
        if not self._matcher.is_terminated() and self._matcher.accept_token(token):
            self._num_matched += 1
            return True
        return token in self._end_ids and self.is_stuck

    def masks(self, draft: Sequence[int]) -> list[tuple[int, Tensor]]:
        """What is allowed after row 0 (the committed text), and after each token of a draft: (row, bits).

        Left out are rows where all is allowed, and those after a draft token that is forbidden: it will be rejected."""
        free, num_matched = self._free, self._num_matched
        found: list[tuple[int, Tensor]] = []
        for row in range(len(draft) + 1):
            if row and not self.accept(draft[row - 1]):
                break
            if self._free is None:
                found.append((row, self._mask()))
        if self._num_matched > num_matched:
            self._matcher.rollback(self._num_matched - num_matched)
        self._free, self._num_matched = free, num_matched
        return found

    @property
    def is_stuck(self) -> bool:
        """Whether nothing more can come: the grammar has ended, or allows nothing this vocabulary can write."""
        return self._matcher.is_terminated() or not self._next().any()

    def _mask(self) -> Tensor:
        bits = self._next() if not self._matcher.is_terminated() else torch.zeros(self._num_words, dtype=torch.int32)
        return bits if bits.any() else self._ends()

    def _next(self) -> Tensor:
        bits = torch.empty(1, self._num_words, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(bits)
        return bits[0]

    def _ends(self) -> Tensor:
        """End tokens only."""
        allowed = torch.zeros(self._num_words * 32, dtype=torch.int64)
        allowed[sorted(self._end_ids)] = 1
        words = (allowed.view(-1, 32) << torch.arange(32)).sum(1)
        return words.to(torch.int32)  # wraps around: the highest bit is the sign


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


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError('guided needs xgrammar: install the extra "serve" (pip install "outrider[serve]")') from error
    return xgrammar
