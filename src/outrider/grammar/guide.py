"""Structured output: what a grammar allows after every row of a draft, and how far an answer has come in it.
xgrammar does the matching."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.grammar.compiler import Dialect, GrammarCompiler, import_xgrammar, is_json
from outrider.grammar.ending import BYTES_PER_TOKEN, Countdown, JsonEnding
from outrider.grammar.forced import certain_text
from outrider.grammar.masks import Unfilled, fill_masks, mask_of
from outrider.grammar.trial import GrammarTrial
from outrider.grammar.vocabulary import Spelling, Vocabulary, begun_of, is_past
from outrider.sampling_params import PROMPT_TAIL, Guided
from outrider.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

MAX_MARKER_LEN = 2**8
# What an answer may take of everybody's time, in seconds of computing: honest grammars take a hundredth of it.
SECONDS_PER_ANSWER, SECONDS_PER_TOKEN = 0.5, 0.005
SECONDS_AT_ONCE = 0.3  # that are counted: a machine that stood still, or garbage that was collected, looks the same


class Grammars:
    """Compiles what requests ask for, for one vocabulary; what was compiled lately is kept."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: frozenset[int]) -> None:
        if tokenizer is None:
            raise ValueError("guided needs a tokenizer, and this model has none: leave guided out")
        if not end_ids:
            raise ValueError("guided needs a token that ends a text, and this model names none: leave guided out")
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer, vocab_size, end_ids)
        words = self._vocabulary.words()
        self._compiler = GrammarCompiler(words)
        self.trial = GrammarTrial(words)  # for grammars that a stranger has written
        self._spellings: dict[Dialect, Spelling] = {}

    @cached_property
    def _ending(self) -> JsonEnding:
        return JsonEnding(self._vocabulary, self._spelling(self._compiler.dialect(Guided(json_object=True))))

    def _spelling(self, dialect: Dialect) -> Spelling:
        if dialect not in self._spellings:
            self._spellings[dialect] = Spelling(self._vocabulary, dialect.banned | dialect.special)
        return self._spellings[dialect]

    def guide(self, guided: Guided, prompt: Sequence[int] = ()) -> Guide:
        """For one answer to a prompt, whose end may have opened the part that is free."""
        if max(len(guided.after or ""), len(guided.opening or "")) > MAX_MARKER_LEN:
            raise ValueError(f"guided: after or opening has more than {MAX_MARKER_LEN} characters; shorten it")
        dialect = self._compiler.dialect(guided)
        matcher = import_xgrammar().GrammarMatcher(self._compiler.compile(guided))
        ending = self._ending if is_json(guided) and guided.close else None
        words = self._vocabulary, self._spelling(dialect)
        guide = Guide(matcher, words, dialect.banned, self._free_prefix(guided, prompt), ending)
        if guide.is_stuck:
            raise ValueError(f"guided: nothing this model can write satisfies the {guided.kind}; correct it")
        return guide

    def _free_prefix(self, guided: Guided, prompt: Sequence[int]) -> FreePrefix | None:
        if guided.after is None:
            return None
        if guided.opening is None:
            return FreePrefix(guided.after.encode())
        tail = self._tokenizer.decode(prompt[-PROMPT_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(guided.after):  # opened and closed, as where reasoning is switched off
            return None
        return FreePrefix(guided.after.encode(), None if tail.endswith(guided.opening) else guided.opening.encode())


@dataclass(frozen=True)
class FreePrefix:
    """Text before the grammar that may be anything, up to a marker."""

    closing: bytes
    opening: bytes | None = None  # only where the answer begins with this; None: in any case


@dataclass(frozen=True)
class _Place:
    """Where an answer stands; a draft is tried from here, and taken back to here."""

    free: bytes | None = None  # how much of the closing marker is there; None: bound by the grammar
    begun: bytes | None = None  # text that may yet become the opening marker; None: it is known
    pending: tuple[int, ...] = ()  # its tokens
    num_matched: int = 0  # tokens that the matcher has taken
    countdown: Countdown | None = None  # to the end of an answer that is to be closed in time

    @property
    def is_bound(self) -> bool:
        return self.free is None and self.begun is None


class Guide:
    """Where one answer stands in its grammar."""

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        words: tuple[Vocabulary, Spelling],
        banned: frozenset[int],  # ids that no answer may hold
        free_prefix: FreePrefix | None = None,
        ending: JsonEnding | None = None,
    ) -> None:
        self._matcher, self._banned, self._ending = matcher, banned, ending
        self._vocabulary, self._spelling = words
        self._closing = free_prefix.closing if free_prefix is not None else b""
        self._opening = (free_prefix.opening if free_prefix is not None else None) or b""
        if free_prefix is None:
            self._place = _Place()
        else:
            self._place = _Place(free=b"") if free_prefix.opening is None else _Place(begun=b"")
        self._seconds_left = SECONDS_PER_ANSWER
        self.is_too_slow = False  # its answer is to be failed

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What is done in it is charged to the answer."""
        begin = time.thread_time()
        yield
        self._seconds_left -= min(time.thread_time() - begin, SECONDS_AT_ONCE)
        self.is_too_slow |= self._seconds_left < 0

    def end_within(self, num_tokens: int) -> None:
        """Before the first token: so many may come, and an answer that is still open by then is closed."""
        if self._ending is not None:
            self._place = replace(self._place, countdown=Countdown.of(num_tokens))

    @property
    def is_closing(self) -> bool:
        """Whether the answer was, or is being, closed because it had no more room."""
        return self._place.countdown is not None and self._place.countdown.is_closing

    def accept(self, token: int) -> bool:
        """Takes the next token of the answer; false, and nothing happens, where the grammar forbids it."""
        self._seconds_left += SECONDS_PER_TOKEN
        with self.timed():
            return self._taken(token)

    def _taken(self, token: int) -> bool:
        before, countdown = self._place, self._place.countdown
        if countdown is None or self._ending is None:
            return self._accept(token)
        if (countdown.way is not None and not self._is_on_way(token, countdown.way)) or not self._accept(token):
            return False
        if before.is_bound and token not in self._vocabulary.end_ids:
            countdown = self._ending.after(token, countdown, self._matcher)
        else:
            countdown = self._ending.passed(countdown)
        self._place = replace(self._place, countdown=countdown)
        return True

    def _is_on_way(self, token: int, way: tuple[int, ...]) -> bool:
        return token == way[0] if way else token in self._vocabulary.end_ids

    def _accept(self, token: int) -> bool:
        if self._place.free is not None:
            return self._accept_free(self._place.free + self._vocabulary.token_bytes[token])
        if self._place.begun is not None:
            return self._accept_undecided(token, self._place.begun + self._vocabulary.token_bytes[token])
        return self._accept_bound(token)

    def _accept_free(self, text: bytes) -> bool:
        if is_past(text, self._closing):  # what follows the marker would be bound by nothing
            return False
        free = None if self._closing in text else begun_of(text, self._closing)
        self._place = _Place(free=free, num_matched=self._place.num_matched)
        return True

    def _accept_undecided(self, token: int, text: bytes) -> bool:
        """While the text may be the opening marker or not, the matcher waits."""
        place = self._place
        if token not in self._vocabulary.end_ids and text.startswith(self._opening):
            return self._accept_free(text[len(self._opening) :])
        if token not in self._vocabulary.end_ids and self._opening.startswith(text):
            self._place = replace(place, begun=text, pending=(*place.pending, token))
            return True
        self._place = replace(place, begun=None, pending=())
        if all(self._accept_bound(each) for each in (*place.pending, token)):
            return True
        self._go_back(place)
        return False

    def _accept_bound(self, token: int) -> bool:
        if token in self._banned:  # xgrammar would refuse it too, but not without a warning
            return False
        if not self._matcher.is_terminated() and self._matcher.accept_token(token):
            self._place = replace(self._place, num_matched=self._place.num_matched + 1)
            return True
        return token in self._vocabulary.end_ids and self.is_stuck

    def _go_back(self, place: _Place) -> None:
        if self._place.num_matched > place.num_matched:
            self._matcher.rollback(self._place.num_matched - place.num_matched)
        self._place = place

    def masks(self, draft: Sequence[int]) -> list[tuple[int, Tensor | Unfilled]]:
        """What is allowed after row 0 (the committed text), and after each token of a draft: (row, bits).

        Left out are rows where all is allowed, and those after a draft token that is forbidden: it will be rejected."""
        place = self._place
        found: list[tuple[int, Tensor | Unfilled]] = []
        for row in range(len(draft) + 1):
            if row and not self._taken(draft[row - 1]):
                break
            bits = self._mask()
            if bits is not None:
                found.append((row, bits))
        self._go_back(place)
        return found

    def num_fitting(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft the grammar allows, up to the first that it forbids."""
        place, count = self._place, 0
        with self.timed():
            while count < len(draft) and self._taken(draft[count]):
                count += 1
            self._go_back(place)
        return count

    def forced(self, limit: int) -> list[int]:
        """Tokens, `limit` at most, that come next because nothing else can. The text is certain; where it could be
        cut into tokens in several ways, they are a guess."""
        place, found = self._place, list[int]()
        way = place.countdown.way if place.countdown is not None else None
        if way is not None:
            return [*way, *self._only_end()][:limit]
        while place.is_bound and len(found) < limit and not self._matcher.is_terminated():
            text = certain_text(self._matcher, self._vocabulary, BYTES_PER_TOKEN * (limit - len(found)))
            tokens = self._spelling.tokens(text) or self._only_end()
            taken = list(takewhile(self._accept_bound, tokens[: limit - len(found)]))
            found += taken
            if not taken or len(taken) < len(tokens):
                break
        self._go_back(place)
        return found

    def _only_end(self) -> tuple[int, ...]:
        """The token that ends the answer, where nothing else may follow and there is one such token only."""
        way = self._place.countdown.way if self._place.countdown is not None else None
        ends = self._vocabulary.end_ids
        if len(ends) > 1 or (way is None and not self._matcher.is_completed()):
            return ()
        return tuple(ends) if way is not None or self._bound_bits().equal(self._vocabulary.ends) else ()

    @property
    def is_stuck(self) -> bool:
        """Whether nothing more can come: the grammar has ended, or allows nothing this vocabulary can write."""
        if self._matcher.is_terminated():
            return True
        return not mask_of(self._matcher, self._vocabulary.num_words).any()

    def _mask(self) -> Tensor | Unfilled | None:
        """The mask of tokens that the grammar allows next; None: all are allowed."""
        place = self._place
        way = place.countdown.way if place.countdown is not None else None
        if way is not None:
            return self._vocabulary.bits(way[:1]) if way else self._vocabulary.ends
        if place.free is not None:
            return self._vocabulary.within(place.free, self._closing)
        if place.begun is None:
            return self._bound_mask()
        bits = self._vocabulary.opening(self._opening[len(place.begun) :], self._closing)
        self._place = replace(place, begun=None, pending=())
        if all(self._accept_bound(each) for each in place.pending):
            bits = bits | self._bound_bits()
        self._go_back(place)
        return bits

    def _bound_mask(self) -> Tensor | Unfilled:
        ends = self._vocabulary.ends
        return ends if self._matcher.is_terminated() else Unfilled(self._matcher.fork(), ends)

    def _bound_bits(self) -> Tensor:
        return fill_masks([self._bound_mask()])[0]
