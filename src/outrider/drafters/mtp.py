"""Multi-token prediction: modules that were trained with the target, and live in its checkpoint, draft for it.
Module k sees a hidden state and the token k + 1 places after it; with one module this is an EAGLE-like chain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.config import SpeculativeConfig
from outrider.drafters.base import SHARPNESS, Drafter, Reading, Sureness, drafters, extend, shifted
from outrider.drafters.feedback import twin
from outrider.drafters.fresh import Fresh, Plan
from outrider.drafters.lesson import Branches, Guess, Lesson, Loss, joined, judged, rows_of, teaching, unrolled
from outrider.drafters.mtp_added import added_modules, are_added, fresh_modules
from outrider.kernels.sampling import choose
from outrider.layers.attention import SelfAttention
from outrider.layers.embedding import embed_rows
from outrider.layers.linear import deferred
from outrider.layers.mtp import MtpModule
from outrider.models.base import Mtp, Target
from outrider.types import NULL_PAGE, Batch, Checkpoint, Draft, Hidden, Resolved, Step, Verdict, Weight

OWN = "TargetMtpModules"  # architecture of a checkpoint that holds a target's own modules and nothing else of it
FIRST_KEY = 1  # of module 0: an entry stands at the index of its token, which comes after the hidden state


@dataclass
class Window:
    """Rows of hidden states, each beside the token after it, that all modules run over."""

    batch: Batch  # as module 0 takes it
    last: Tensor  # [B] each request's newest row
    kept: Tensor  # [T] rows whose entries are remembered


@drafters.register("mtp")
class MultiTokenPrediction(Drafter):
    """The last rows of module k > 0 were built from drafted tokens, so all modules run again over as many rows as there
    are modules: whatever was accepted, entries of committed tokens come from them and the target's own states."""

    weights_in_target = True
    reads_last = False

    def __init__(self, mtp: Mtp, target: Target, settings: SpeculativeConfig) -> None:
        super().__init__()
        self.lookahead = settings.num_speculative_tokens
        self.num_modules = min(mtp.num_modules, self.lookahead)  # a module after the last draft token has no use
        self.taps = (target.num_layers,)
        self.num_carried = self.num_modules
        self.mtp = mtp
        self.each = nn.ModuleList(mtp.build(number) for number in range(self.num_modules))
        self._target = (target,)  # in a tuple: shared, not owned
        self._prefixes = tuple(_prefix(weights) for weights in self._weights())

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> MultiTokenPrediction:
        if checkpoint is not None and are_added(checkpoint.config):
            return cls(added_modules(checkpoint.config, target), target, settings)
        if not cls.supports(type(target)):
            names = ", ".join(target.config.get("architectures") or [type(target).__name__])
            raise ValueError(f"method mtp: {names} has no multi-token-prediction modules; choose another method")
        if target.mtp is None:
            raise ValueError(
                "method mtp: the target's config.json speaks of no multi-token-prediction modules "
                "(num_nextn_predict_layers): use a checkpoint that was published with them, or another method"
            )
        mtp = target.mtp
        if checkpoint is not None and _are_own(checkpoint.config):
            mtp = replace(mtp, num_modules=checkpoint.config.get("num_nextn_predict_layers", mtp.num_modules))
            made_for = [checkpoint.config.get(key) for key in ("target_architectures", "num_target_layers")]
            if made_for != [target.config.get("architectures"), target.num_layers]:
                raise ValueError(
                    f"{checkpoint.path} holds modules of a target with {made_for[1]} layers ({made_for[0]}), this one "
                    f"has {target.num_layers} ({target.config.get('architectures')}): they belong to another target"
                )
        if settings.taps is not None:
            raise ValueError("method mtp reads the state after the last layer and no other: remove taps")
        drafter = cls(mtp, target, settings)
        if checkpoint is not None and all(drafter.ignores(target.canonical(name)) for name in checkpoint.names()):
            raise ValueError(
                f"{checkpoint.path} holds nothing below {' and '.join(drafter._prefixes)}, where the multi-token-"
                "prediction modules that the target's config.json speaks of should be. Whoever saved it left them out: "
                'use the original, or give a checkpoint that has them as "model"'
            )
        return drafter

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> Sureness:
        return Sureness.BY_NAME if are_added(config) or _are_own(config) else Sureness.NO

    @classmethod
    def supports(cls, target: type[Target]) -> bool:
        return target.mtp is not Target.mtp  # its class says how modules look; its config, whether there are some

    # drafting

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        """All modules run, also those whose token nobody wants now: later rounds look back on their entries."""
        slots = step.batch.slots
        lengths = step.state.lengths[slots]
        tokens = torch.zeros(len(slots), self.lookahead, dtype=torch.long, device=slots.device)
        window, source = self._text(step, hidden)
        state = source
        newest: list[Tensor] = []  # of every module the last row, which stands in for the next of the target's states
        for number in range(max(step.depth, self.num_modules)):
            place = number % self.num_modules
            if number and place == 0:  # the modules' tokens are used up: what they drafted is taken for text
                window, state = self._drafted(step, number), torch.stack(newest, dim=1).flatten(0, 1)
                source, newest = state, []
            feeds_all = self.mtp.chained and place + 1 < self.num_modules  # the next module reads every row
            fed = self._run(place, self._rows(step, window, place, tokens), state, None if feeds_all else window.last)
            newest.append(fed[window.last] if feeds_all else fed)
            state = fed if self.mtp.chained else source
            if number < step.depth:
                logits = self.logits(place, newest[-1])
                tokens[:, number] = choose(logits, step.sampling, slots, lengths + number, sharpness=SHARPNESS)
        return Draft(tokens, torch.where(step.emits, step.depth, 0))

    def _text(self, step: Step, hidden: Hidden) -> tuple[Window, Tensor]:
        """The rows of this pass and the carried ones before them, with the target's own states."""
        extension = extend(step, FIRST_KEY, lag=1, back=self.num_modules - 1)
        batch, target = extension.batch, self._target[0]
        states = shifted(hidden, extension, step)[:, 0]
        kept = (batch.indices >= FIRST_KEY) & (batch.indices < step.state.lengths[batch.slots][batch.request])
        return Window(batch, extension.last, kept), target.norm(states) if self.mtp.reads_normed else states

    def _drafted(self, step: Step, number: int) -> Window:
        """The rows of the `num_modules` tokens that were drafted before token `number`."""
        batch, state, count = step.batch, step.state, self.num_modules
        ends = count * torch.arange(len(batch.slots) + 1, device=batch.slots.device)
        request = torch.arange(len(batch.slots), device=ends.device).repeat_interleave(count)
        slots = batch.slots[request]
        offset = torch.arange(count, device=ends.device).repeat(len(batch.slots))
        indices = state.lengths[slots] + number - count + offset
        rows = replace(
            batch,
            positions=state.positions_at(slots, indices - 1),
            indices=indices,
            query_start=ends.int(),
            request=request,
            row_slots=slots,
            max_len=batch.max_len + 1 + number,
            max_rows=count,
            features=None,
            last_key=None,
            recurrence=None,
        )
        return Window(rows, ends[1:] - 1, step.emits[request])

    def _rows(self, step: Step, window: Window, place: int, tokens: Tensor) -> Batch:
        """The window as module `place` takes it: the same states, at the same rotary positions, each beside a token
        `place` further on. Beyond the committed text that is a draft."""
        batch, state = window.batch, step.state
        slots, indices = batch.row_slots, batch.indices + place
        ahead = indices - state.lengths[slots]
        drafted = tokens[batch.request, ahead.clamp(0, self.lookahead - 1)]
        page = batch.page_table[batch.request, indices // batch.page_size].long()
        # entries before the pass are right already, and others may be reading them where a page is shared
        kept = window.kept & (indices >= step.starts[batch.request])
        return replace(
            batch,
            input_ids=torch.where(ahead < 0, state.tokens[slots, indices], drafted),
            indices=indices,
            write_locations=torch.where(kept, page, NULL_PAGE) * batch.page_size + indices % batch.page_size,
            max_len=batch.max_len + place,
            first_key=FIRST_KEY + place,
            features=None if batch.features is None else state.features_at(slots, indices),
            memo={},
        )

    def _run(self, place: int, rows: Batch, state: Tensor, wanted: Tensor | None = None) -> Tensor:
        """What is fed on [T, H]: the module's output, normed if its family does so. `wanted`: of these rows, None: of
        all."""
        module = self.module(place)
        embedding = embed_rows(module.embed if module.embed is not None else self._target[0].embed, rows)
        if self.mtp.zero_first_embedding:  # beside the state of the very first token
            embedding = torch.where((rows.indices == rows.first_key)[:, None], 0, embedding)
        output = module(embedding, state, rows, wanted)
        return module.norm(output) if self.mtp.feeds_normed else output

    def module(self, place: int) -> MtpModule:
        module = self.each[place]
        assert isinstance(module, MtpModule)
        return module

    def logits(self, place: int, fed: Tensor) -> Tensor:
        """What a module fed on [B, H] -> [B, V]."""
        module = self.module(place)
        head = module.head if module.head is not None else self._target[0].head
        return head(fed if self.mtp.feeds_normed else module.norm(fed))

    def readings(self) -> list[Reading]:
        zeroed = self.mtp.zero_first_embedding
        if zeroed is None:
            return []
        name = "first embedding kept" if zeroed else "first embedding zeroed"
        advice = f'set "mtp_zero_first_embedding": {str(not zeroed).lower()} in the target\'s config.json'
        return [Reading(name, advice, {"zero_first_embedding": not zeroed})]

    def reread(self, **changes: Any) -> Self:
        other = twin(self)
        other.mtp = replace(self.mtp, **changes)
        return other

    # training

    trainable = True
    matrix_rate = 0.02  # modules that build on each other: measured with three (docs/diary.md)

    @classmethod
    def fresh(cls, target: Target, plan: Plan) -> Fresh:
        if plan.draft_ids is not None:
            raise ValueError(
                "mtp modules share the target's head, so they say all of its tokens: no --draft-vocabulary"
            )
        return fresh_modules(target, plan)

    @classmethod
    def found_in(cls, target: Target, checkpoint: Checkpoint, plan: Plan) -> Fresh | None:
        """The modules that a target came with, in the target's names."""
        if target.mtp is None:
            return None
        settings = SpeculativeConfig(method="mtp", num_speculative_tokens=plan.depth)
        with deferred():  # only asked for names
            modules = cls(target.mtp, target, settings)
        names = {target.canonical(name): name for name in checkpoint.names()}
        own = {canonical: name for canonical, name in names.items() if not modules.ignores(canonical)}
        config = {
            "architectures": [OWN],
            "model_type": "mtp_modules",
            "num_nextn_predict_layers": modules.num_modules,
            "num_target_layers": target.num_layers,
            "target_architectures": target.config.get("architectures"),
            "torch_dtype": "bfloat16",
        }
        return Fresh(config, {each: checkpoint.tensor(name).clone() for each, name in own.items()})

    @property
    def _window(self) -> int:
        """How far modules look back; one number for all."""
        attentions = [part for part in self.each.modules() if isinstance(part, SelfAttention)]
        return attentions[0].shape.window if attentions else 0

    def loss(self, lesson: Lesson) -> Loss:
        """All modules over the whole text, one after the other, beside the text's tokens; a module that is used again
        goes on from its own output, as a draft does."""
        target, guesses = self._target[0], self.guesses(lesson)
        if self.module(0).head is None:
            return judged(lesson, target, teaching(lesson, target, None, None), guesses)
        heads = [self.module(guess.ahead % self.num_modules).head for guess in guesses]  # each has its own
        return joined(
            [judged(lesson, target, teaching(lesson, target, head, None), [guess])
             for head, guess in zip(heads, guesses, strict=True)]
        )  # fmt: skip

    def guesses(self, lesson: Lesson) -> list[Guess]:
        source = lesson.last.flatten(0, 1)
        if self.mtp.reads_normed:
            with torch.no_grad():
                source = self._target[0].norm(source)
        if self.num_modules == 1:
            return unrolled(lesson, self._window, source, lambda rows, state: self._read(0, rows, state))
        branches, state, found = Branches(lesson, self._window), source, []
        newest = (branches.columns + 1).clamp(max=lesson.shape[1] - 1)
        for place in range(min(lesson.depth, self.num_modules)):  # several are learnt as far as they reach
            rows = rows_of(lesson.ahead(lesson.tokens, 1 + place), lesson.places, branches.of(None))
            read, fed = self._read(place, rows, state)
            state = fed if self.mtp.chained else source
            found.append(Guess(read.unflatten(0, lesson.shape), newest, place, lesson.reaches(1)))
        return found

    def _read(self, place: int, rows: Batch, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads, and what is fed back."""
        fed = self._run(place, rows, state)
        return fed if self.mtp.feeds_normed else self.module(place).norm(fed), fed

    def frozen(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.named_parameters() if name.endswith(("embed.weight", "head.weight")))

    # loading

    def _weights(self) -> list[dict[str, Weight]]:
        return [self.mtp.weights(place, self.module(place)) for place in range(self.num_modules)]

    def weights(self) -> dict[str, Weight]:
        return {
            f"each.{place}.{name}": weight
            for place, weights in enumerate(self._weights())
            for name, weight in weights.items()
        }

    def canonical(self, name: str) -> str:
        return self._target[0].canonical(name)

    def ignores(self, name: str) -> bool:
        """Everything outside the modules is the target's; within them, what they store of it again."""
        if not name.startswith(self._prefixes):
            return True
        return any(re.search(pattern, name) for pattern in (*Target.ignored, *self.mtp.copies))

    def provenance(self) -> dict[str, Resolved]:
        mtp, family = self.mtp, "the target's architecture"
        if self.num_modules < mtp.num_modules:
            count = f"num_speculative_tokens, fewer than the {mtp.num_modules} that the target's config.json names"
        else:
            count = "the target's config.json"
        reads, feeds = ("after" if normed else "before" for normed in (mtp.reads_normed, mtp.feeds_normed))
        first = self.module(0)
        zeroed = {} if mtp.zero_first_embedding is None else {"first embedding": self._first_embedding()}
        return {
            "modules": Resolved(self.num_modules, count),
            "taps": Resolved(self.taps, family),
            "state of the target": Resolved(f"{reads} its final norm", family),
            "state fed on": Resolved(f"{feeds} the module's norm", family),
            "chained": Resolved(mtp.chained, family),
            "embedding": Resolved("the target's" if first.embed is None else "each module's own", family),
            "head": Resolved("the target's" if first.head is None else "each module's own", family),
            **zeroed,
        }

    def _first_embedding(self) -> Resolved:
        key = "mtp_zero_first_embedding"
        said = key in self._target[0].config
        source = f"the target's config.json {key}" if said else "default, as in vLLM; ambiguous: others keep it"
        return Resolved("zeroed" if self.mtp.zero_first_embedding else "kept", source)


def _are_own(config: Mapping[str, Any]) -> bool:
    return OWN in (config.get("architectures") or [])


def _prefix(weights: dict[str, Weight]) -> str:
    """What the names of all of a module's tensors begin with, up to a dot."""
    names = [name for weight in weights.values() for name in weight.names]
    first, last = min(names).split("."), max(names).split(".")
    common = next(place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return "".join(f"{part}." for part in first[:common])
