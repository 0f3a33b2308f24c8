"""The device memory of target and drafter: key/value pages, recurrent states, the taps a page keeps for reuse, and
the slot tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.engine.snapshot_pool import NUM_WANTED
from outrider.engine.snapshots import WantedSnapshots
from outrider.engine.upload import upload
from outrider.host_memory import zeros
from outrider.kernels.take import take_rows
from outrider.kernels.taps import keep_missed, keep_taps
from outrider.layers.cached import CachedLayer, RecurrentLayer, cached_layers, recurrent_layers
from outrider.types import NULL_PAGE, CacheSpec, Hidden, Images, Latent, Recurrent, SlotState, Step, Verdict

NUM_MISSABLE = 64  # rows of a request that a drafter may miss before it must be shown them


@dataclass(frozen=True)
class CacheShape:
    num_pages: int
    page_size: int
    num_slots: int  # the last of them is the null slot, which belongs to no request
    max_len: int  # the longest a request may grow, drafts included
    num_taps: int
    hidden_size: int
    lookahead: int = 0  # draft tokens per round at most
    num_axes: int = 1  # of rotary positions: 3 for M-RoPE
    num_carried: int = 1  # rows whose taps the drafter wants to see again in the next round
    num_missable: int = 0  # rows whose taps can be kept for a drafter that rests
    num_snapshots: int = 0  # of recurrent states, for reuse

    @property
    def num_tails(self) -> int:
        """Rows whose taps a page keeps, so that they can be carried after a reuse."""
        return min(self.num_carried, self.page_size)

    @property
    def pages_per_request(self) -> int:
        return self.max_len // self.page_size + 1  # for index max_len too, where masked writes go


def bytes_per_page(layers: Sequence[CachedLayer], page_size: int, tap_width: int, itemsize: int) -> int:
    """Memory of one page over all layers of target and drafter, with the taps that it keeps."""
    return sum(layer.bytes_per_token(itemsize) for layer in layers) * page_size + tap_width * itemsize


def bytes_per_snapshot(layers: Sequence[RecurrentLayer]) -> int:
    return sum(layer.spec.bytes_per_state for layer in layers)


def bytes_per_slot(layers: Sequence[RecurrentLayer], lookahead: int, missable_bytes: int) -> int:
    """Memory of one slot: recurrent states after every row that may be the last, and taps for a drafter that rests."""
    return bytes_per_snapshot(layers) * (lookahead + 1) + missable_bytes


class Cache:
    def __init__(
        self, shape: CacheShape, models: Sequence[nn.Module], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Gives memory to every layer of the models (target, and drafter if there is one) that remembers."""
        self.shape = shape
        self.layers = [layer for model in models for layer in cached_layers(model)]
        self.recurrent = [layer for model in models for layer in recurrent_layers(model)]
        # one tensor, so that a request is admitted with one copy; setting a single element would wait for the device
        num_wanted = NUM_WANTED if shape.num_snapshots else 0
        self._counts = torch.zeros(5 + 2 * num_wanted, shape.num_slots, dtype=torch.long, device=device)
        lengths, computed, followed, draft_count, kept_state = self._counts[:5].unbind()
        lengths.fill_(1)  # the null slot has a token too
        self.state = SlotState(
            # one column beyond every index, for masked writes
            tokens=zeros((shape.num_slots, shape.max_len + 1), torch.long, device),
            lengths=lengths,
            computed=computed,
            followed=followed,
            draft_count=draft_count,
            kept_state=kept_state,
            wanted=self._counts[5:].view(2, num_wanted, shape.num_slots) if num_wanted else None,
            recurrent=bool(self.recurrent),
        )
        if shape.num_axes > 1:
            width = self.state.tokens.shape[1]
            self.state.positions = zeros((shape.num_slots, shape.num_axes, width), torch.long, device)
        self._images: dict[int, Images] = {}  # by slot
        self.places_late = (
            False  # rounds are told of new pages as they begin; whatever else reads tables calls settle()
        )
        self._unplaced: list[tuple[int, int, int]] = []
        self.page_table = torch.zeros(shape.num_slots, shape.pages_per_request, dtype=torch.int32, device=device)
        # taps of the last kept rows of a slot, and of the last rows of a page; the newest last
        tap_shape = (shape.num_taps, shape.hidden_size)
        self.carry = zeros((shape.num_slots, shape.num_carried, *tap_shape), dtype, device)
        self.tails = zeros((shape.num_pages, shape.num_tails, *tap_shape), dtype, device)
        # taps of what a resting drafter misses: those of cache index i in place i % num_missable
        self._missed = zeros((shape.num_slots, shape.num_missable, *tap_shape), dtype, device)
        for layer in self.layers:
            layer.bind(*self._pages(layer.spec, device, layer.page_dtype or dtype))
        specs = dict.fromkeys(layer.spec for layer in self.recurrent)
        self._states = [pair for spec in specs for pair in self._bind(spec, device)]

    def _bind(self, spec: Recurrent, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Memory for all recurrent layers of a kind at once, so that a request is admitted with few copies: states
        [L, S, E, ...] and snapshots [L, C, ...]."""
        layers = [layer for layer in self.recurrent if layer.spec == spec]
        made = []
        for size in spec.shapes:
            entries, places = (self.shape.num_slots, self.shape.lookahead + 1), (self.shape.num_snapshots,)
            states, snapshots = (zeros((len(layers), *n, *size), torch.float32, device) for n in (entries, places))
            made.append((states, snapshots))
        for number, layer in enumerate(layers):
            own = tuple(states[number] for states, _ in made)
            layer.bind(own, tuple(kept[number] for _, kept in made) if self.shape.num_snapshots else None)
        return made

    def _pages(self, spec: CacheSpec, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = (self.shape.num_pages, self.shape.page_size)
        if isinstance(spec, Latent):
            latent = zeros((*size, 1, spec.dim), dtype, device)
            return latent, latent[..., : spec.value_dim]
        return (
            zeros((*size, spec.num_heads, spec.head_dim), dtype, device),
            zeros((*size, spec.num_heads, spec.value_dim), dtype, device),
        )

    def admit(
        self, slot: int, tokens: Sequence[int], reused: Sequence[int], images: Images | None = None, snapshot: int = 0
    ) -> None:
        """A request takes a slot: its known tokens, the pages whose content it reuses, the images of its prompt, the
        place of the recurrent states that it goes on from. Rounds that are under way are not waited for: what they
        still write to the slot comes before this."""
        state = self.state
        num_reused = len(reused) * self.shape.page_size
        state.tokens[slot, : len(tokens)] = self.upload(torch.tensor(tokens, dtype=torch.long))
        counts = [len(tokens), num_reused, num_reused]
        self._counts[:, slot] = self.upload(torch.tensor(counts + [0] * (len(self._counts) - len(counts))))
        self._place_images(slot, images)
        assert bool(reused) == bool(snapshot) or not self.recurrent, "recurrent states go with the pages"
        for states, snapshots in self._states:
            if snapshot:
                states[:, slot, 0] = snapshots[:, snapshot]
            else:
                states[:, slot, 0] = 0
        self.page_table[slot] = NULL_PAGE
        self.set_pages(slot, 0, reused)
        if reused and self.shape.num_taps:
            count = self.shape.num_carried
            last = self.upload(torch.tensor(reused[-count:] if count else [], dtype=torch.long))
            tails = self.tails[last].flatten(0, 1)[-count:] if count else self.tails[last].flatten(0, 1)
            self.carry[slot, count - len(tails) :] = tails  # a small page holds few of them

    def upload(self, values: Tensor) -> Tensor:
        return upload(values, self.page_table.device)

    def _place_images(self, slot: int, images: Images | None) -> None:
        state = self.state
        if state.positions is not None:
            state.positions[slot] = torch.arange(state.positions.shape[-1])
            if images is not None and images.positions is not None:  # what follows counts on from the highest
                known = images.positions.shape[1]
                state.positions[slot, :, known:] += int(images.positions.max()) + 1 - known
                state.positions[slot, :, :known] = images.positions
        if images is None and not self._images:
            return
        self._images.pop(slot, None)
        if images is not None:
            self._images[slot] = images
        self._rebuild_features()

    def _rebuild_features(self) -> None:
        """The features of all slots, one after the other, and who has which. Admissions with images are rare."""
        state, size = self.state, self.state.tokens.shape
        device = state.tokens.device
        state.feature_rows = torch.full(size, -1, dtype=torch.long, device=device)
        state.last_key = torch.arange(size[1], device=device).repeat(size[0], 1)
        first = 0
        for slot, images in self._images.items():
            state.feature_rows[slot, images.indices] = first + torch.arange(len(images.indices), device=device)
            first += len(images.indices)
            for begin, end in images.spans:
                state.last_key[slot, begin:end] = end - 1
        state.features = torch.cat([images.features for images in self._images.values()]) if self._images else None

    def set_pages(self, slot: int, start: int, pages: Sequence[int]) -> None:
        self.place_pages([(slot, start + number, page) for number, page in enumerate(pages)])

    def place_pages(self, places: Sequence[tuple[int, int, int]]) -> None:
        """(slot, place in its table, page), of any number of requests at once."""
        self._unplaced += places
        if not self.places_late:
            self.settle()

    def settle(self) -> None:
        """The device is told of all new pages."""
        places = self.unplaced()
        if places:
            slot, place, page = self.upload(torch.tensor(places, dtype=torch.long)).unbind(1)
            self.page_table[slot, place] = page.int()

    @property
    def num_unplaced(self) -> int:
        return len(self._unplaced)

    def unplaced(self) -> list[tuple[int, int, int]]:
        """New pages that the device has not been told of; whoever asks tells it."""
        places, self._unplaced = self._unplaced, []
        return places

    def want(self, wanted: Sequence[WantedSnapshots]) -> None:
        """Snapshots that rounds from now on shall take, of any number of requests at once."""
        if wanted:
            assert self.state.wanted is not None
            rows = [(each.column, each.slot, each.end, each.place) for each in wanted]
            column, slot, *what = self.upload(torch.tensor(rows, dtype=torch.long)).unbind(1)
            self.state.wanted[:, column, slot] = torch.stack(what)

    def keep_taps(self, step: Step, hidden: Hidden, verdict: Verdict) -> None:
        """Those that later rounds need; `hidden` is given those that were kept before."""
        if self.shape.num_taps:
            hidden.carry = take_rows(self.carry, step.batch.slots)
            keep_taps(step, hidden.taps, hidden.carry, verdict, (self.carry, self.tails))

    def miss(self, step: Step, hidden: Hidden) -> None:
        """The drafter does not see this step: its taps are kept instead."""
        if self.shape.num_taps:
            keep_missed(step.batch, hidden.taps, self._missed)

    def missed(self, step: Step) -> Hidden:
        """What the target computed in rows that the drafter has missed, as far as drafters look at it."""
        batch = step.batch
        taps = self._missed[batch.row_slots, batch.indices % self.shape.num_missable]
        return Hidden(taps.new_zeros(len(taps), self.shape.hidden_size), taps)

    def free(self) -> None:
        for layer in self.layers:
            layer.unbind()
        for recurrent in self.recurrent:
            recurrent.unbind()
        self._states = []
