"""Writes down what a drafter proposes after each text, whatever becomes of it."""

from dataclasses import dataclass, field

from outrider.drafters.base import Drafter
from outrider.types import Draft, Hidden, Step, Verdict


@dataclass
class Recorder:
    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def watch(self, drafter: Drafter) -> None:
        propose = drafter.propose

        def watched(step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
            draft = propose(step, hidden, verdict)
            for number, slot in enumerate(step.batch.slots.tolist()):
                text = step.state.tokens[slot, : int(step.state.lengths[slot])].tolist()
                if step.emits[number] and step.depth:
                    self.drafts[tuple(text)] = draft.tokens[number, : int(draft.count[number])].tolist()
            return draft

        drafter.propose = watched  # type: ignore[method-assign]
