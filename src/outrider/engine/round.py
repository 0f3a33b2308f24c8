"""One round, in three parts: the target's pass, the choice of tokens with the verdict on drafts, and the next draft.
No part asks the host anything, so that each can be called as it is, or recorded and replayed (graphs.py). Between the
first two the host may still say what grammars allow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.drafting import Drafting
from outrider.engine.sampler import sample
from outrider.engine.upload import to_host, upload
from outrider.engine.verify import SyntheticChoice
from outrider.kernels.collective import Ranks
from outrider.kernels.mail import Mail
from outrider.kernels.round import judge, write_outcome
from outrider.kernels.take import take_rows
from outrider.models.base import Target
from outrider.types import Draft, Guidance, Hidden, ReadRows, Step, Verdict

CHECKS = "OUTRIDER_CHECK_RANKS"  # set to anything in the environment: ranks compare what they remember, every round


@dataclass(frozen=True)
class Pass:
    """What the target computed in a round."""

    hidden: Hidden
    logits: Tensor  # [L, V] of the judged rows; where ranks share the vocabulary, of this one's ids


class Round:
    def __init__(
        self,
        target: Target,
        drafting: Drafting,
        synthetic_choice: SyntheticChoice | None,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: those that do the round together, where one does not do it alone."""
        self.target, self.drafting, self._synthetic_choice = target, drafting, synthetic_choice
        self.ranks = ranks

    def of(self, step: Step) -> EagerRound:
        """Such a round, to be done part by part."""
        return EagerRound(self, step)

    def forward(self, step: Step, out: Pass | None = None) -> Pass:
        """`out`: where to put what it computes, as far as the other parts need it; then only judged rows have a last
        state, unless a drafter reads it. Otherwise all have: somebody may want log-probabilities of a prompt."""
        taps = self.drafting.taps(step.shape)
        if out is None:
            hidden = self.target(step.batch, taps)
            return Pass(hidden, self.target.own_logits(self.judged_of(hidden, step)))
        reads_all = self.drafting.reads_last or step.shape.judges_all
        read = None if reads_all else ReadRows(step.judged, step.judged_start, 1 + step.shape.max_drafts)
        hidden = self.target(step.batch, taps, out.hidden.taps, read)
        judged = self.judged_of(hidden, step) if reads_all else hidden.last
        if self.drafting.reads_last:
            out.hidden.last.copy_(hidden.last)
        return Pass(hidden, self.target.own_logits(judged, out.logits))

    def judged_of(self, hidden: Hidden, step: Step) -> Tensor:
        """The states [L, H] of the judged rows."""
        return hidden.last if step.shape.judges_all else take_rows(hidden.last, step.judged)

    def choose(self, step: Step, logits: Tensor, out: Verdict | None = None) -> Verdict:
        """The target's own tokens, and how much of the drafts they agree with; committed. Writes over the logits what
        options and grammars make of them. `out`: where to put the verdict."""
        choice = sample(logits, step, self.target.head.columns)
        if self._synthetic_choice is not None and step.shape.max_drafts:
            choice = self._synthetic_choice(choice, step)
        return judge(step, choice, out)

    def draft(self, step: Step, hidden: Hidden, verdict: Verdict, width: int = 0, mail: Mail | None = None) -> Tensor:
        """A draft for the next round, kept; what the host must know is written down, [B, ...]: see write_outcome().
        `width`: of the draft, where other ranks have a part in it. `mail`: where the outcome goes, if that is known."""
        draft = self.drafting.draft(step, hidden, verdict)
        if self.ranks is not None and width:
            draft = self.of_first_rank(draft, step.starts, width)
        return write_outcome(step, verdict, draft, mail)

    # where several ranks do it together

    def of_first_rank(self, draft: Draft | None, like: Tensor, width: int) -> Draft:
        """Rank 0 alone knows what a request predicts, and what was said before: what it drafts is the draft of all.
        `like`: [B] on the device."""
        assert self.ranks is not None
        if self.ranks.rank == 0:
            assert draft is not None
            self.ranks.from_rank(0, torch.cat([draft.tokens, draft.count[:, None]], dim=1))
            return draft
        told = self.ranks.from_rank(0, like.new_zeros(len(like), width + 1))
        return Draft(told[:, :width].contiguous(), told[:, width].contiguous())

    def whole_logits(self, logits: Tensor, *, written_over: bool = True) -> Tensor:
        """A round's logits [L, V], with those of other ranks; a copy, if later parts and rounds write over them."""
        columns = self.target.head.columns
        if columns is not None:
            return columns.gathered(logits)
        return logits.clone() if written_over else logits

    def last_hidden(self, hidden: Hidden) -> Hidden:
        """What came out of the last layer."""
        return hidden

    def logits_of(self, states: Tensor) -> Tensor:
        """The logits [R, V] of hidden states [R, H], of the whole vocabulary."""
        return self.target.logits(states)


class RoundParts(Protocol):
    """A round that is done part by part, in this order."""

    @property
    def logits(self) -> Tensor:
        """[L, V] of the judged rows, between forward() and choose()."""
        ...

    @property
    def hidden(self) -> Hidden:
        """The hidden states of all rows, after forward()."""
        ...

    def forward(self) -> None: ...

    def writes_over_logits(self, said: tuple[Tensor, Tensor] | None) -> bool:
        """Whether choose() will, or a later round."""
        ...

    def choose(self, said: tuple[Tensor, Tensor] | None) -> None:
        """`said`: what grammars say, on the host; see Guidance.of()."""
        ...

    def outcome(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """Ends the round, with a draft for the next one. What the host must know, on the host: see write_outcome(); and
        what must happen before it is good, None where it is at once."""
        ...


class EagerRound:
    """A round that is not recorded: every operation is launched as it is called."""

    def __init__(self, parts: Round, step: Step) -> None:
        self._parts, self._step = parts, step
        self.draft_width = 0  # tokens, where ranks have a part in it

    @property
    def number(self) -> int:
        """The number of the round, where other ranks are told of it."""
        return self._step.number

    @property
    def logits(self) -> Tensor:
        return self._passed.logits

    @property
    def hidden(self) -> Hidden:
        return self._passed.hidden

    def forward(self) -> None:
        self._passed = self._parts.forward(self._step)

    def writes_over_logits(self, said: tuple[Tensor, Tensor] | None) -> bool:
        return said is not None or self._step.sampling.needs_adjusting

    def choose(self, said: tuple[Tensor, Tensor] | None) -> None:
        if said is not None:
            self._step.guidance = Guidance.of(*(upload(each, self.logits.device) for each in said))
        self._verdict = self._parts.choose(self._step, self.logits)

    def outcome(self) -> tuple[Tensor, torch.cuda.Event | None]:
        return to_host(self.draft())

    def draft(self) -> Tensor:
        """The same, on the device."""
        return self._checked(self._parts.draft(self._step, self.hidden, self._verdict, self.draft_width))

    def _checked(self, outcomes: Tensor) -> Tensor:
        if self._parts.ranks is not None and is_checked():
            check_same(self._parts.ranks, self._step)
        return outcomes


def is_checked() -> bool:
    return bool(os.environ.get(CHECKS))


def check_same(ranks: Ranks, step: Step) -> None:
    """An error where ranks do not remember the same of a round's requests: they would never agree again."""
    state, slots = step.state, step.batch.slots
    place = 1 + torch.arange(state.tokens.shape[1], device=slots.device)
    texts = (state.tokens[slots, :-1] * place[:-1]).sum(1)  # the last column is a dump
    found = ranks.gather(torch.stack([state.lengths[slots], state.computed[slots], state.draft_count[slots], texts]))
    for rank, each in enumerate(found):
        if not torch.equal(each, found[0]):
            raise RuntimeError(f"rank {rank} and rank 0 do not remember the same: {each.tolist()}, {found[0].tolist()}")
