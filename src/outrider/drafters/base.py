"""What every drafter is, and what drafters with layers of their own share: following the text, then stepping ahead.
A drafter file names no target. It keeps nothing about requests: that lives in the slots and pages of the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.config import SpeculativeConfig
from outrider.drafters.fresh import Fresh, Plan
from outrider.drafters.lesson import Lesson, Loss
from outrider.kernels.ahead import Ahead, rows_ahead
from outrider.kernels.collective import Ranks
from outrider.kernels.round import Catching, extension_rows
from outrider.kernels.sampling import choose
from outrider.kernels.taps import shift_taps
from outrider.models.base import Target
from outrider.registry import Registry
from outrider.types import (
    ATTENTION_WORK,
    NULL_PAGE,
    Batch,
    Checkpoint,
    Draft,
    Hidden,
    Recurrence,
    Resolved,
    Step,
    Verdict,
    Weight,
)

drafters: Registry[type[Drafter]] = Registry("speculative method", "outrider.drafters")
LAST_ROWS = "single rows"  # in a pass's memo: those that were made last
# What logits are multiplied by where tokens are drawn. A drafter knows less than its target, so what it expects is
# flatter than what the target will say. Five drafters stood more often so, or as often (docs/diary.md, 2026-11-18).
SHARPNESS = 1.15


class Sureness(IntEnum):
    """How surely a checkpoint is one of a method's, by its config.json. The method with the greatest is meant."""

    NO = 0
    PERHAPS = 1  # a whole model, which may as well be a target
    BY_KEYS = 2  # it has keys that only such drafters have
    BY_NAME = 3  # it is named
    IN_PARTICULAR = 4  # it is named, and of a special kind


class Drafter(nn.Module):
    """Subclasses set `taps` (the target's hidden states they want) and propose a draft after every verdict."""

    taps: tuple[int, ...] = ()
    num_carried: int = 1  # how many rows' taps it wants to see again in the next round
    lookahead: int
    needs_tokenizer_of_target = False  # its checkpoint has a tokenizer that must be the target's
    reads_tokens_only = (
        False  # it has no layers and reads tokens only, so that it can go before another in a combination
    )
    weights_in_target = False  # without a checkpoint of its own, its weights are in the target's
    drafts_in_parallel = False  # it knows what to do with parallel_drafting
    own_settings: Mapping[str, Any] = {}  # of speculative_config: a Setting of each name, or its default; see build()
    ranks: Ranks | None = None  # that run it together, where one process does not run it alone
    recordable = True  # propose() asks the host nothing, so that a round can be recorded and replayed
    reads_last = True  # propose() looks at Hidden.last, and not at the taps alone

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Drafter:
        raise NotImplementedError

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> Sureness:
        """How surely a checkpoint with this config.json is one of this method's."""
        return Sureness.NO

    @classmethod
    def replaces(cls, method: str, settings: SpeculativeConfig, config: Mapping[str, Any]) -> bool:
        """Whether this method is meant where another one is named, or was recognised, with such settings and such a
        config.json."""
        return False

    @classmethod
    def supports(cls, target: type[Target]) -> bool:
        """Whether a drafter of this method can exist for such targets."""
        return True

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        """Drafts for every request of the step, already committed; [B, lookahead] tokens."""
        raise NotImplementedError

    def learn(self, tokens: Sequence[int], tenant: str | None) -> None:
        """A request has ended: its whole text. Called between steps, on the host."""

    def weights(self) -> dict[str, Weight]:
        return {}

    def canonical(self, name: str) -> str:
        """The name under which weights() and ignores() know a tensor of the checkpoint."""
        return name

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the checkpoint carries nothing this drafter needs."""
        return False

    def check(self) -> None:
        """Raises ValueError if the weights, now loaded, cannot be right."""

    def provenance(self) -> dict[str, Resolved]:
        """Every setting as it was understood, and where it was read."""
        return {}

    def target_ids(self) -> Tensor | None:
        """The target's id of every draft id, or None where they are the same."""
        return None

    def readings(self) -> list[Reading]:
        """Other ways to understand the same checkpoint, for whoever measures which of them it was trained with."""
        return []

    def reread(self, **changes: Any) -> Self:
        """The same drafter with other fields of its config, as one of readings() asks for. It may want other taps, but
        as many. Both share weights and the layers that hold the cache, so they must not run in two engines at once."""
        raise NotImplementedError

    # training

    trainable = False  # it has a loss, and a checkpoint to begin with
    matrix_rate = 0.03  # the share of a matrix that a step of its training changes, unless somebody says otherwise

    @classmethod
    def found_in(cls, target: Target, checkpoint: Checkpoint, plan: Plan) -> Fresh | None:
        """A drafter that the target's own checkpoint holds already: then training begins with that one."""
        return None

    @classmethod
    def fresh(cls, target: Target, plan: Plan) -> Fresh:
        """A checkpoint of a new drafter for this target."""
        raise NotImplementedError

    def loss(self, lesson: Lesson) -> Loss:
        """How far its drafts are from what the target says."""
        raise NotImplementedError

    def frozen(self) -> tuple[str, ...]:
        """Parameters that training leaves as they are, where the whole vocabulary is not trained."""
        return ()


def recognised(config: Mapping[str, Any]) -> tuple[str, Sureness]:
    """The method whose checkpoints look most like this config.json, and how surely it is meant."""
    sureness = {name: drafters[name].recognises(config) for name in drafters}
    best = max(sureness, key=lambda name: sureness[name])
    return best, sureness[best]


@dataclass(frozen=True)
class Reading:
    """Another way to understand a drafter's checkpoint, told apart only by how well it drafts."""

    name: str
    advice: str  # what to change in which file, should this be the right one
    changes: Mapping[str, Any]  # to the drafter's config: see Drafter.reread

    def apply(self, drafter: Drafter) -> Drafter:
        """The loaded drafter, read in this way. Both share weights and cache memory: see Drafter.reread."""
        return drafter.reread(**self.changes)


@dataclass
class Extension:
    """The rows with which a drafter catches up with the text, and the last of them for each request."""

    batch: Batch
    last: Tensor  # [B]
    back: int = 0  # rows of each request that were run before


def extend(step: Step, first_key: int = 0, lag: int = 0, *, back: int = 0, extra: int = 0) -> Extension:
    """One row for every token of the pass and one more: cache indices start .. start + num_rows.

    The first of them was written before, from the same inputs (or never, after a prefix hit: then this is where it
    is made up for). The last is the newest token. Rows of rejected drafts are written to the dump. A row's rotary
    position is that of the token `lag` places before it. Recurrent layers start from before the first row, and keep
    the states before and after the newest token: the next extension starts from the former, the draft goes on from
    the latter.

    `back`: as many rows before the first are run again. `extra`: as many places after the newest token are written
    too, for rows whose token is not known yet; those of a request follow its `last` row.
    """
    batch, state = step.batch, step.state
    catching = Catching(first_key, lag, back, extra)
    rows, positions, last = extension_rows(step, catching)
    followed = replace(
        batch,
        input_ids=rows.input_ids,
        positions=state.positions_at(rows.row_slots, positions),
        indices=rows.indices,
        query_start=rows.query_start,
        request=rows.request,
        row_slots=rows.row_slots,
        write_locations=rows.locations,
        max_len=batch.max_len + 1 + extra,
        max_rows=batch.max_rows + catching.more,
        first_key=first_key,
        last_key=None,
        # rows that are run again may be images, though none of the pass is
        features=state.features_at(rows.row_slots, rows.indices) if back or batch.features is not None else None,
        # a state cannot be taken back, so rows that are run again have none to start from
        recurrence=_recurrence(step, last) if state.recurrent and not back else None,
        memo={},
    )
    return Extension(followed, last, back)


def _recurrence(step: Step, last: Tensor) -> Recurrence:
    rows = torch.stack([last - 1, last], dim=1)
    return Recurrence(torch.zeros_like(last), rows, wanted=step.state.wanted)


def shifted(hidden: Hidden, extension: Extension, step: Step) -> Tensor:
    """The taps that go with each row of the extension: those of the token before it, [rows, n, H]. Rows beyond the
    target's own repeat its last."""
    assert hidden.carry is not None
    assert extension.back < hidden.carry.shape[1], "rows that are run again need taps carried: see Drafter.num_carried"
    return shift_taps(step, hidden.taps, hidden.carry, extension.batch, extension.back)


def single_rows(step: Step, ahead: int, tokens: Tensor, first_key: int = 0, lag: int = 0) -> Batch:
    """One row per request, `ahead` places after the newest committed token."""
    batch = step.batch
    rows, before = _rows_ahead(step, lag), batch.memo.get(LAST_ROWS)
    made = batch.memo[LAST_ROWS] = replace(
        rows,
        input_ids=tokens,
        positions=rows.positions[ahead],
        indices=rows.indices[ahead],
        write_locations=rows.write_locations[ahead],
        max_len=batch.max_len + 1 + ahead,
        first_key=first_key,
        last_key=None,
        features=None,
        recurrence=_kept_ahead(rows, ahead) if step.state.recurrent else None,
        # a key more or less does not change how attention's work is shared out among programs
        memo={} if before is None else {name: each for name, each in before.memo.items() if _is_work(name)},
    )
    return made


def _is_work(name: object) -> bool:
    return isinstance(name, tuple) and name[0] == ATTENTION_WORK


def chain_rows(step: Step, first_key: int = 0, lag: int = 0) -> Batch:
    """All rows of single_rows() from the first place ahead on, one place after the other."""
    rows = _rows_ahead(step, lag)
    positions = rows.positions[1:]  # [depth - 1, B], or [depth - 1, 3, B]
    return replace(
        rows,
        positions=positions.flatten() if positions.dim() == 2 else positions.transpose(0, 1).flatten(1),
        indices=rows.indices[1:].flatten(),
        write_locations=rows.write_locations[1:].flatten(),
        first_key=first_key,
        last_key=None,
        features=None,
        memo={},
    )


def block_rows(step: Step, tokens: Tensor) -> Batch:
    """Rows [B, R] of a block that begins with each request's newest token: layers that look both ways (see
    AttentionOptions) let a row see the whole of its block."""
    batch, state = step.batch, step.state
    num_rows, device = tokens.shape[1], tokens.device
    request = torch.arange(len(tokens), device=device).repeat_interleave(num_rows, output_size=tokens.numel())
    newest = (state.lengths[batch.slots] - 1)[request]
    indices = newest + torch.arange(num_rows, device=device).repeat(len(tokens))
    return replace(
        batch,
        input_ids=tokens.flatten(),
        positions=state.positions_at(batch.slots[request], indices),
        indices=indices,
        query_start=torch.arange(0, tokens.numel() + 1, num_rows, dtype=torch.int32, device=device),
        request=request,
        row_slots=batch.slots[request],
        write_locations=_locations(batch, request, indices, step.emits[request]),
        max_len=batch.max_len + num_rows,
        max_rows=num_rows,
        first_key=0,
        last_key=newest + num_rows - 1,
        features=None,
        recurrence=None,
        memo={},
    )


def _rows_ahead(step: Step, lag: int) -> Batch:
    """What single_rows() takes apart: the rows of all places at once, [depth, B]."""
    batch, ahead = step.batch, _ahead(step)
    return replace(
        batch,
        input_ids=ahead.request,
        positions=step.state.positions_at(batch.slots, ahead.lagging(lag)),
        indices=ahead.indices,
        query_start=ahead.query_start,
        request=ahead.request,
        row_slots=batch.slots,
        write_locations=ahead.locations,
        max_rows=1,
        memo={},
    )


def _ahead(step: Step) -> Ahead:
    """The places that a draft takes, found once."""
    memo, depth = step.batch.memo, max(step.depth, 1)
    name = ("ahead", depth)
    if name not in memo:
        memo[name] = rows_ahead(step, depth)
    return memo[name]


def draft_positions(step: Step) -> Tensor:
    """Where the tokens of a draft will stand, [depth, B]."""
    return _ahead(step).following()


def _kept_ahead(rows: Batch, ahead: int) -> Recurrence:
    return Recurrence(torch.full_like(rows.request, ahead), rows.request[:, None], first=ahead + 1)


def draft_chain(
    step: Step,
    lookahead: int,
    first: Tensor,
    advance: Callable[[Tensor, int], Tensor],
    ids: Tensor | None = None,
    sharpness: float = SHARPNESS,
) -> Draft:
    """Token after token: `first` [B, V] are the logits after the newest token, `advance(token, n)` those after
    draft token n. Choices use the target's own noise. `ids` maps a reduced vocabulary to the target's."""
    slots, ahead = step.batch.slots, _ahead(step)
    positions = draft_positions(step)
    new = slots.new_empty if lookahead == step.depth else slots.new_zeros
    tokens, logits = new(lookahead, len(slots)), first
    for number in range(step.depth):
        choose(logits, step.sampling, slots, positions[number], ids, tokens[number], sharpness)
        if number + 1 < step.depth:
            logits = advance(tokens[number], number + 1)
    return Draft(tokens.T, ahead.count)


def no_draft(step: Step, lookahead: int) -> Draft:
    count = torch.zeros_like(step.num_drafts)
    return Draft(count[:, None].expand(-1, lookahead), count)


def _locations(batch: Batch, request: Tensor, indices: Tensor, wanted: Tensor) -> Tensor:
    page = batch.page_table[request, indices // batch.page_size].long()
    return torch.where(wanted, page, NULL_PAGE) * batch.page_size + indices % batch.page_size
