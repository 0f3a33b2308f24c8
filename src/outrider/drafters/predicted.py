"""Predicted outputs: the draft is what the client expects the answer to be, as long as the answer follows it.
No method that anybody chooses: it goes before whatever drafter there is, in steps with requests that bring one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.combined import Combined
from outrider.types import Draft, Hidden, Prediction, Step, Verdict

SHORTEST = 3  # tokens at the answer's end by which a lost place is found again: two agree by chance too often
LONGEST = 32  # tokens that are compared at most


def with_predictions(lookahead: int, drafter: Drafter | None) -> Drafter:
    """Drafts from predictions, and as the drafter does where they have nothing to say."""
    predicted = Predicted(lookahead)
    return predicted if drafter is None else Combined([predicted, drafter])


class Predicted(Drafter):
    """Up to `lookahead` tokens for every request with a prediction, whatever depth others want: what a request wants
    itself is cut by the scheduler. Where the answer stands in a prediction is kept with the request."""

    reads_tokens_only = True
    recordable = False  # it looks things up on the host

    def __init__(self, lookahead: int) -> None:
        super().__init__()
        self.lookahead = lookahead

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        device = step.batch.slots.device
        tokens = torch.zeros(len(step.batch.slots), self.lookahead, dtype=torch.long)
        count = torch.zeros(len(tokens), dtype=torch.long)
        rows = [number for number, prediction in enumerate(step.predictions) if prediction is not None]
        for number, (length, emits, *recent) in zip(rows, self._texts(step, rows), strict=True):
            prediction = step.predictions[number]
            assert prediction is not None
            if not emits:
                continue
            align(prediction, length - prediction.begin, recent)
            room = step.state.tokens.shape[1] - 1 - length
            found = continuation(prediction, min(self.lookahead, room))
            count[number] = len(found)
            tokens[number, : len(found)] = torch.from_numpy(found)
        return Draft(tokens.to(device), count.to(device), predicted=(count > 0).to(device))

    def _texts(self, step: Step, rows: Sequence[int]) -> list[list[int]]:
        """Of these requests: number of tokens, whether it has just got one, its last tokens. One copy to the host."""
        state, device = step.state, step.batch.slots.device
        index = torch.tensor(rows, device=device)
        slots = step.batch.slots[index]
        lengths = state.lengths[slots]
        size = LONGEST + self.lookahead + 1
        places = lengths[:, None] - torch.arange(size, 0, -1, device=device)
        recent = state.tokens[slots[:, None], places.clamp(min=0)]
        return torch.cat([lengths[:, None], step.emits[index, None].long(), recent], dim=1).tolist()


def align(prediction: Prediction, num_outputs: int, recent: Sequence[int]) -> None:
    """Notes where an answer of `num_outputs` tokens stands, of which `recent` are the last."""
    num_new = num_outputs - prediction.num_seen
    answer = recent[max(len(recent) - num_outputs, 0) :]
    new = answer[max(len(answer) - num_new, 0) :] if num_new > 0 else ()  # none: a step that broke is done again
    expected = prediction.tokens[prediction.place : prediction.place + len(new)].tolist()
    same = next((at for at, pair in enumerate(zip(new, expected, strict=False)) if pair[0] != pair[1]), len(expected))
    prediction.num_seen = num_outputs
    prediction.place += same
    prediction.num_agreed += same
    if not same == len(new) == num_new:
        _find(prediction, answer)


def _find(prediction: Prediction, answer: Sequence[int]) -> None:
    """The place after the longest piece of the prediction that the answer ends with; of several, the first from the
    last known place on, else the last one before."""
    tokens = prediction.tokens
    ends = np.arange(1, len(tokens) + 1)
    size = 0
    for back in range(1, min(len(answer), LONGEST) + 1):
        left = ends[ends >= back]
        left = left[tokens[left - back] == answer[-back]]
        if not len(left):
            break
        ends, size = left, back
    prediction.num_agreed = size if size >= SHORTEST else 0
    if prediction.num_agreed:
        number = int(np.searchsorted(ends, prediction.place))
        prediction.place = int(ends[number] if number < len(ends) else ends[-1])


def continuation(prediction: Prediction, most: int) -> np.ndarray:
    """What comes next. At first the prediction is trusted; a place that was found again earns its depth: as far ahead
    as the texts have agreed."""
    if prediction.place != prediction.num_seen or prediction.num_agreed != prediction.num_seen:
        most = min(most, prediction.num_agreed) if prediction.num_agreed >= SHORTEST else 0
    return prediction.tokens[prediction.place : prediction.place + max(most, 0)]
