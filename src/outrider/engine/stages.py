"""A target in stages: every rank keeps the layers of its own. The last stage has the drafter and the head; what it
chose and what it drafted travel back together, and then all ranks hold the same verdict. Meanwhile the other stages
are at work on rounds of other requests: they hear of a round when it lands."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from outrider.drafters.base import Drafter, no_draft
from outrider.engine.round import EagerRound, Pass, Round
from outrider.engine.sampler import sample
from outrider.engine.team import Team
from outrider.kernels.round import judge, write_outcome
from outrider.layers.attention import SelfAttention
from outrider.layers.shared_attention import SharedAttention
from outrider.layers.stage import Stage, borders
from outrider.models.base import Target
from outrider.types import Draft, Hidden, Step, Verdict


class AbsentDrafter(Drafter):
    """Stands for a drafter that lives on the last stage."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.taps, self.lookahead, self.num_carried = drafter.taps, drafter.lookahead, drafter.num_carried
        self.ranks, self.kind = drafter.ranks, type(drafter)

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        return no_draft(step, self.lookahead)


def split_layers(target: Target, drafter: Drafter | None, team: Team) -> None:
    """Leaves the target those layers that the rank's stage has."""
    assert team.back is not None
    places = borders(target.num_layers, team.num_stages, _together(target, drafter))
    number = team.stage
    target.keep_stage(Stage(number, team.num_stages, places[number], places[number + 1], team.world, team.back))


def _together(target: Target, drafter: Drafter | None) -> list[tuple[int, int]]:
    """Layers that read what others remember, with those; for a drafter, that is up to the last."""
    own = {layer: number for number, block in enumerate(target.layers) for layer in _attentions(block)}
    found = []
    for number, block in enumerate(target.layers):
        sources = [layer.source[0] for layer in block.modules() if isinstance(layer, SharedAttention)]
        found += [(own[source], number) for source in sources]
    if drafter is not None:
        read = [layer.source[0] for layer in drafter.modules() if isinstance(layer, SharedAttention)]
        found += [(own[source], target.num_layers) for source in read]
    return found


def _attentions(block: nn.Module) -> list[SelfAttention]:
    return [layer for layer in block.modules() if isinstance(layer, SelfAttention)]


class StagedRound(Round):
    """A round of which the last stage chooses and drafts, and all stages judge. Whatever is asked of it past the pass,
    the last stage does at once, and the others when it lands."""

    @property
    def _stage(self) -> Stage:
        assert self.target.stage is not None
        return self.target.stage

    @property
    def is_last(self) -> bool:
        return self._stage.is_last

    @property
    def _reads_tokens_only(self) -> bool:
        return self.drafting.drafter is None or self.drafting.drafter.reads_tokens_only

    def of(self, step: Step) -> StagedParts:
        return StagedParts(self, step)

    def forward(self, step: Step, out: Pass | None = None) -> Pass:
        hidden = self.target(step.batch, self.drafting.taps(step.shape))
        if not self.is_last:
            return Pass(hidden, hidden.last.new_empty(len(step.judged), 0))
        return Pass(hidden, self.target.own_logits(self.judged_of(hidden, step)))

    def choose(self, step: Step, logits: Tensor, out: Verdict | None = None) -> Verdict:
        """Only the last stage knows yet. Others have no say in it until the round lands."""
        if not self.is_last:
            nothing = torch.zeros_like(step.num_rows)
            return Verdict(nothing[:, None], nothing, nothing)
        self._choice = sample(logits, step, self.target.head.columns)
        if self._synthetic_choice is not None and step.shape.max_drafts:
            self._choice = self._synthetic_choice(self._choice, step)
        return judge(step, self._choice)

    def tell(self, step: Step, hidden: Hidden, verdict: Verdict, width: int) -> Draft | None:
        """On the last stage: drafts, and tells the others what was chosen and drafted."""
        draft, parts = None, [self._choice]
        if not self._reads_tokens_only:
            draft = self.drafting.draft(step, hidden, verdict)
            if width:
                assert draft is not None
                parts += [draft.tokens.flatten(), draft.count]
        self._stage.tell(torch.cat(parts).long())
        return draft

    def _hear(self, step: Step, width: int) -> tuple[Verdict, Draft | None]:
        """On all others: what the last stage tells. All come to the verdict that it came to."""
        count, num_judged = len(step.batch.slots), len(step.judged)
        drafted = 0 if self._reads_tokens_only else width
        size = num_judged + (count * (drafted + 1) if drafted else 0)
        said = self._stage.hear(torch.empty(size, dtype=torch.long, device=step.starts.device))
        verdict, tokens = judge(step, said[:num_judged]), said[num_judged:]
        if not drafted:
            return verdict, None
        return verdict, Draft(tokens[: count * drafted].view(count, drafted), tokens[count * drafted :])

    def land(self, step: Step, hidden: Hidden, verdict: Verdict, draft: Draft | None, width: int) -> Tensor:
        """What is left of a round, on every stage. `draft`: what the last one has told."""
        if not self.is_last:
            verdict, draft = self._hear(step, width)
        if self._reads_tokens_only and width:
            draft = self.drafting.draft(step, hidden, verdict) if self._stage.world.rank == 0 else None
            draft = self.of_first_rank(draft, step.starts, width)
        return write_outcome(step, verdict, draft)

    def whole_logits(self, logits: Tensor, *, written_over: bool = True) -> Tensor:
        """[L, V] of the last stage, for rank 0."""
        if self.is_last:
            logits = super().whole_logits(logits, written_over=written_over)
            self._stage.tell(logits, everybody=False)
            return logits
        return self._stage.hear(logits.new_empty(len(logits), self.target.vocab_size))

    def last_hidden(self, hidden: Hidden) -> Hidden:
        if self.is_last:
            self._stage.tell(hidden.last, everybody=False)
            return hidden
        return replace(hidden, last=self._stage.hear(torch.empty_like(hidden.last)))

    def logits_of(self, states: Tensor) -> Tensor:
        stage = self._stage
        logits = self.target.logits(states) if stage.is_last else states.new_zeros(len(states), self.target.vocab_size)
        return stage.world.from_rank(stage.last_rank, logits.contiguous())


class StagedParts(EagerRound):
    """A round in stages, part by part. What is left of it after the choice is done when it lands."""

    def __init__(self, parts: StagedRound, step: Step) -> None:
        super().__init__(parts, step)
        self._staged = parts
        self._draft: Draft | None = None  # of the last stage

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which does the rest at once."""
        return self._staged.is_last

    def tell(self) -> None:
        """On the last stage: what was chosen, and what is drafted."""
        self._draft = self._staged.tell(self._step, self.hidden, self._verdict, self.draft_width)
        self._passed = replace(self._passed, logits=self.logits.new_empty(0))  # they are large, and it may land late

    def draft(self) -> Tensor:
        return self._checked(self._staged.land(self._step, self.hidden, self._verdict, self._draft, self.draft_width))
