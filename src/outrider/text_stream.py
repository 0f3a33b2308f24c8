"""An answer's text as its tokens come: characters settle, stop strings end it. Where no stop string is watched for, the
text is not made before somebody looks at it, a few dozen tokens at a time: by itself each takes longer to be spelt than
to be counted."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.detokenizer import Detokenizer, StopChecker
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer

MOST_WAITING = 64  # tokens whose text is made at once: everybody waits for it


class TextStream:
    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=params.shown_special_ids,
            prompt_ids=prompt,
        )
        self._stops = StopChecker(list(params.stop_strings), include_stop=params.include_stop_str_in_output)
        self._is_watched = bool(params.stop_strings)
        self._waiting: list[int | None] = []  # None: a token that is no part of the text
        self._is_ending = False  # behind them, the text ends
        self._text = ""
        self._ends: list[int] = []

    @property
    def text(self) -> str:
        if self._waiting or self._is_ending:
            self._make()
        return self._text

    @property
    def ends(self) -> list[int]:
        """Of each token: the length of the text once it was added."""
        if self._waiting or self._is_ending:
            self._make()
        return self._ends

    def add(self, token: int | None, *, may_stop: bool) -> str | None:
        """The stop string that this token completes, if any. None: a token that is no part of the text."""
        if not self._is_watched:
            self._waiting.append(token)
            if len(self._waiting) >= MOST_WAITING:
                self._make()
            return None
        stop = None
        if token is not None:
            piece = self._detokenizer.add(token)
            if may_stop:
                shown, stop = self._stops.add(piece)
                self._text += shown
            else:  # under min_tokens a stop string is ordinary text, and so is what may have begun one
                self._text += self._stops.finish() + piece
        self._ends.append(len(self._text))
        return stop

    def finish(self) -> None:
        """No token follows: what was held back is text."""
        self._is_ending = True

    def _make(self) -> None:
        waiting, self._waiting = self._waiting, []
        add, pieces, end = self._detokenizer.add, [], len(self._text)
        for token in waiting:
            if token is not None:
                piece = add(token)
                pieces.append(piece)
                end += len(piece)
            self._ends.append(end)
        self._text += "".join(pieces)
        if self._is_ending:
            self._is_ending = False
            shown, stop = self._stops.add(self._detokenizer.finish())
            self._text += shown if stop is not None else shown + self._stops.finish()
            if self._ends:
                self._ends[-1] = len(self._text)
