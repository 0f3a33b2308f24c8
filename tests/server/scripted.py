"""The embedded target, made to say a script token by token, with a drafter that knows it: so a test decides what an
accepted run holds. All else is real: masks, verification, commits, the engine's thread, HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from samples import Oracle
from torch import Tensor

from outrider import LLM
from outrider.engine.request import Request
from outrider.grammar.guide import Guide
from outrider.grammar.masks import fill_masks
from outrider.grammar.vocabulary import Vocabulary
from outrider.prompts import Prompt
from outrider.sampling_params import SamplingParams
from outrider.types import Draft, Hidden, Images, Step, Verdict

MAX_DRAFT = 64
FILLER = 5  # what is drafted after the end


@dataclass
class Script:
    tokens: list[int] = field(default_factory=list)  # what the target says first; afterwards it is free
    cuts: Sequence[int] = ()  # rounds end after so many tokens; the first token always comes alone
    overdraft: int = 0  # tokens that are drafted beyond the end of the script

    @property
    def draft_positions(self) -> list[int]:
        """As they must come out: the last token of a run is the target's own."""
        runs = [end - begin for begin, end in pairwise([0, 1, *self.cuts, len(self.tokens)]) if end > begin]
        return [place if place < size else 0 for size in runs for place in range(1, size + 1)]

    def draft(self, num_said: int) -> list[int]:
        end = next((cut for cut in self.cuts if cut > num_said), None)
        if end is not None:
            return self.tokens[num_said : end - 1]
        if self.overdraft:
            return self.tokens[num_said:] + [FILLER] * self.overdraft
        return self.tokens[num_said:-1]


class ScriptGuide:
    """Allows the script alone while it lasts, and of that only what the request's own guide allows too."""

    def __init__(self, script: Script, vocabulary: Vocabulary, own: Guide | None) -> None:
        self._script, self._vocabulary, self._own = script.tokens, vocabulary, own
        self._num_said = 0

    is_too_slow = False

    def timed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def accept(self, token: int) -> bool:
        self._num_said += 1
        return self._own is None or self._own.accept(token)

    @property
    def is_closing(self) -> bool:
        return self._own is not None and self._own.is_closing

    def num_fitting(self, draft: Sequence[int]) -> int:
        return len(draft)

    def forced(self, limit: int) -> list[int]:
        return []  # the draft is the script's

    def masks(self, draft: Sequence[int]) -> list[tuple[int, Tensor]]:
        own = {row: fill_masks([mask])[0] for row, mask in self._own.masks(draft)} if self._own is not None else {}
        for row in range(len(draft) + 1):
            if self._num_said + row < len(self._script):
                forced = self._vocabulary.bits([self._script[self._num_said + row]])
                own[row] = forced & own[row] if row in own else forced
        return sorted(own.items(), key=lambda item: item[0])


class Scripted(LLM):
    script: Script | None = None

    def __init__(self, **options: Any) -> None:
        settings = {"method": "oracle", "num_speculative_tokens": MAX_DRAFT, "force": True}
        super().__init__(speculative_config=settings, **options)
        assert isinstance(self.drafter, Oracle)
        assert self.tokenizer is not None
        self.vocabulary = Vocabulary(self.tokenizer, self.target.vocab_size, self.end_ids)
        self._prompts: dict[int, tuple[list[int], Script]] = {}  # by the prompt's length
        self.drafter.propose = self._propose  # type: ignore[method-assign]

    def requests_for(self, prompt: Prompt, params: SamplingParams, number: int) -> list[Request]:
        return self._scripted(super().requests_for(prompt, params, number))

    def make_requests(self, ids: list[int], params: SamplingParams, images: Images | None = None) -> list[Request]:
        return self._scripted(super().make_requests(ids, params, images))

    def _scripted(self, requests: list[Request]) -> list[Request]:
        for request in requests if self.script is not None else ():
            assert self.script is not None
            ids = list(request.prompt)
            self._prompts[len(ids)] = (ids, self.script)
            request.guide = ScriptGuide(self.script, self.vocabulary, request.guide)  # type: ignore[assignment]
        return requests

    def _propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        rows, counts = [], []
        for slot in step.batch.slots.tolist():
            text = step.state.tokens[slot, : int(step.state.lengths[slot])].tolist()
            draft: list[int] = []
            for ids, script in self._prompts.values():
                if text[: len(ids)] == ids and len(text) > len(ids):
                    draft = script.draft(len(text) - len(ids))
            draft = draft[: min(step.depth, MAX_DRAFT)]
            counts.append(len(draft))
            rows.append((draft + [0] * MAX_DRAFT)[:MAX_DRAFT])
        return Draft(torch.tensor(rows), torch.where(step.emits, torch.tensor(counts), 0))

    def tokens(self, *pieces: str) -> list[int]:
        """Pieces of text as tokens; no token reaches over the edge of two pieces."""
        assert self.tokenizer is not None
        encoded = [self.tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        return [token for ids in encoded for token in ids]
