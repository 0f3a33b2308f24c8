"""A target in stages: every rank keeps the layers of its own. The last stage has the drafter and the head; what it
chose and what it drafted travel back together, and then all ranks hold the same verdict."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from outrider.drafters.base import Drafter, no_draft
from outrider.engine.round import Pass, Round
from outrider.engine.sampler import sample
from outrider.kernels.collective import Ranks
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


def split_layers(target: Target, drafter: Drafter | None, number: int, count: int, world: Ranks) -> None:
    """Leaves the target those layers that stage `number` of `count` has."""
    places = borders(target.num_layers, count, _together(target, drafter))
    target.keep_stage(Stage(number, count, places[number], places[number + 1], world))


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
    """A round of which the last stage chooses, and all stages judge."""

    @property
    def _stage(self) -> Stage:
        assert self.target.stage is not None
        return self.target.stage

    def forward(self, step: Step, out: Pass | None = None) -> Pass:
        hidden = self.target(step.batch, self.drafting.taps(step.shape))
        if not self._stage.is_last:
            return Pass(hidden, hidden.last.new_empty(len(step.judged), 0))
        return Pass(hidden, self.target.own_logits(hidden.last[step.judged]))

    def choose(self, step: Step, logits: Tensor, out: Verdict | None = None) -> Verdict:
        """Only the last stage knows yet. Others have no say in it until the draft comes."""
        if not self._stage.is_last:
            nothing = torch.zeros_like(step.num_rows)
            return Verdict(nothing[:, None], nothing, nothing)
        self._choice = sample(logits, step, self.target.head.columns)
        if self._synthetic_choice is not None and step.shape.max_drafts:
            self._choice = self._synthetic_choice(self._choice, step)
        return judge(step, self._choice)

    def draft(self, step: Step, hidden: Hidden, verdict: Verdict, width: int = 0) -> Tensor:
        stage, count = self._stage, len(step.batch.slots)
        reads_tokens_only = self.drafting.drafter is None or self.drafting.drafter.reads_tokens_only
        drafted = 0 if reads_tokens_only else width
        said = torch.zeros(len(step.judged) + count * (drafted + 1), dtype=torch.long, device=step.starts.device)
        draft: Draft | None = None
        if stage.is_last:
            draft = None if reads_tokens_only else self.drafting.draft(step, hidden, verdict)
            parts = [self._choice]
            if drafted:
                assert draft is not None
                parts += [draft.tokens.flatten(), draft.count]
            said[: sum(part.numel() for part in parts)] = torch.cat(parts)
        said = stage.world.from_rank(stage.last_rank, said)
        choice, tokens = said[: len(step.judged)], said[len(step.judged) :]
        if not stage.is_last:
            verdict = judge(step, choice)
            if drafted:
                draft = Draft(tokens[: count * drafted].view(count, drafted), tokens[count * drafted :])
        if reads_tokens_only and width:
            draft = self.drafting.draft(step, hidden, verdict) if stage.world.rank == 0 else None
            draft = self.of_first_rank(draft, step.starts, width)
        return write_outcome(step, verdict, draft)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """[L, V] of the last stage, for everybody."""
        stage, size = self._stage, self.target.vocab_size
        if stage.is_last:
            logits = super().whole_logits(logits)
        else:
            logits = logits.new_zeros(len(logits), size)
        return stage.world.from_rank(stage.last_rank, logits.contiguous())

    def last_hidden(self, hidden: Hidden) -> Hidden:
        stage = self._stage
        return replace(hidden, last=stage.world.from_rank(stage.last_rank, hidden.last.contiguous()))

    def logits_of(self, states: Tensor) -> Tensor:
        stage = self._stage
        logits = self.target.logits(states) if stage.is_last else states.new_zeros(len(states), self.target.vocab_size)
        return stage.world.from_rank(stage.last_rank, logits.contiguous())
