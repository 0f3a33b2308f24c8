"""A stage of a pipeline: some of a target's layers, one after the other, and how a pass goes on from stage to stage.
Taps are numbered over all layers. Those of earlier stages travel with the hidden states, so that the last has all. A
stage that has sent something goes on with the next round: nobody waits for who comes after."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.kernels.collective import Ranks, Sent


@dataclass(frozen=True)
class Stage:
    number: int
    count: int
    begin: int  # the first of its layers
    end: int
    world: Ranks  # of all stages
    back: Ranks  # the same, for what the last one tells the others: they hear it later than it is said
    _under_way: deque[Sent] = field(default_factory=deque, compare=False)

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    @property
    def _step(self) -> int:
        """From a rank to its neighbour in the next stage."""
        return self.world.size // self.count

    @property
    def last_rank(self) -> int:
        """The first rank of the last stage: what that stage finds, it says."""
        return self.world.size - self._step

    def receive(self, x: Tensor, taps: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """What the stage before has computed, for rows that are embedded as x [T, H]; and the taps so far."""
        known = sorted({tap for tap in taps if tap <= self.begin})
        if self.number == 0:
            return x, dict.fromkeys(known, x)
        streams = self.world.receive(x.new_empty(len(x), 1 + len(known), x.shape[-1]), self.world.rank - self._step)
        return streams[:, 0].contiguous(), dict(zip(known, streams[:, 1:].unbind(1), strict=True))

    def send(self, x: Tensor, streams: dict[int, Tensor]) -> None:
        """Sends hidden states to the next stage."""
        sent = [x, *(streams[tap] for tap in sorted(streams))]
        self._keep(self.world.send(torch.stack(sent, dim=1), self.world.rank + self._step))

    def tell(self, values: Tensor, *, everybody: bool = True) -> None:
        """The last stage tells all others, or rank 0 alone: its first rank does."""
        if self.world.rank == self.last_rank:
            for rank in range(self.last_rank if everybody else 1):
                self._keep(self.back.send(values, rank))

    def hear(self, room: Tensor) -> Tensor:
        """What the last stage tells, in the shape of `room`."""
        return self.back.receive(room, self.last_rank)

    def _keep(self, sent: Sent | None) -> None:
        """No more rounds are under way than there are stages: what was sent in those before has been received."""
        if sent is not None:
            self._under_way.append(sent)
        self.settle(self.count * (2 + self.last_rank) if self.is_last else self.count)

    def settle(self, most: int = 0) -> None:
        """Waits until no more than so many messages are under way: one that is given up would never come."""
        while len(self._under_way) > most:
            self._under_way.popleft().wait()


def borders(num_layers: int, num_stages: int, together: Collection[tuple[int, int]] = ()) -> list[int]:
    """Where stages begin, and where the last ends: about as many layers in each. `together`: layers (first, last)
    of which one reads what the other remembers, so that no border may come between them."""
    if num_stages > num_layers:
        raise ValueError(
            f"config.json: {num_layers} layers cannot be split over {num_stages} stages (pipeline_parallel_size)"
        )
    found = [0]
    for stage in range(1, num_stages):
        wanted, left = stage * num_layers / num_stages, num_stages - stage
        allowed = [
            place
            for place in range(found[-1] + 1, num_layers - left + 1)
            if not any(first < place <= last for first, last in together)
        ]
        if not allowed:
            raise ValueError(
                f"config.json: the {num_layers} layers cannot be split over {num_stages} stages "
                "(pipeline_parallel_size): too many of them read what earlier ones remember"
            )
        found.append(min(allowed, key=lambda place: abs(place - wanted)))
    return [*found, num_layers]
