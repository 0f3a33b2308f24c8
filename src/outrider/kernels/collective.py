"""What ranks of a group say to each other inside a round. Sums are added in ascending order of ranks, each element for
itself, so that their bits are the same on every rank, and depend on nothing else that is summed with them. Who has
something to say says it and goes on, whatever the others are doing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MOST_UNHEARD = 64  # messages to all that a rank is ahead of the others, at most


class Done(Protocol):
    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


@dataclass(frozen=True)
class Sent:
    """A message under way, and what it is made of until then."""

    work: Done
    values: Tensor

    def wait(self) -> None:
        """Until it is received."""
        self.work.wait()


class Group(Protocol):
    """What is needed of a process group of torch.distributed."""

    def _allgather_base(self, output: Tensor, values: Tensor) -> Done: ...

    def broadcast(self, tensor: Tensor, root: int) -> Done: ...

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Done: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Done: ...


class Ranks:
    """The ranks that share one model, as one of them sees them."""

    def __init__(self, rank: int, size: int, group: Group, *, through_host: bool = False) -> None:
        """`through_host`: the group carries tensors of the host alone."""
        self.rank, self.size = rank, size
        self._group, self._through_host = group, through_host
        self._unheard: deque[Sent] = deque()

    def gather(self, values: Tensor) -> Tensor:
        """[...] of every rank -> [ranks, ...], in their order. Shapes are the same on all ranks."""
        sent = self._sent(values)
        found = sent.new_empty((self.size, *values.shape))
        if sent.numel():
            self._group._allgather_base(found.view(-1), sent.view(-1)).wait()
        return found.to(values.device)

    def sum(self, values: Tensor) -> Tensor:
        """[...] of every rank -> their sum: in float32, then rounded."""
        first, *others = self.gather(values).unbind()
        total = first.float()
        for other in others:
            total = total + other
        return total.to(values.dtype)

    def from_rank(self, rank: int, values: Tensor) -> Tensor:
        """What that rank has of `values`, of which everybody has the shape. The others wait for it; that rank does not
        wait for them."""
        sent = self._sent(values)
        if not sent.numel():
            return values
        sent = sent.clone() if sent.data_ptr() == values.data_ptr() else sent
        work = self._group.broadcast(sent.view(-1), rank)
        if rank != self.rank:
            work.wait()
            return sent.to(values.device)
        self._unheard.append(Sent(work, sent))
        while self._unheard and (self._unheard[0].work.is_completed() or len(self._unheard) > MOST_UNHEARD):
            self._unheard.popleft().wait()
        return values

    def settle(self) -> None:
        """Waits until all have heard what this rank has said to all."""
        while self._unheard:
            self._unheard.popleft().wait()

    def send(self, values: Tensor, rank: int) -> Sent | None:
        """Sends a tensor, which must not be changed any more, to one rank, which receives it. Does not wait for that;
        whoever sends much should, sooner or later. None: there is nothing to send."""
        if not values.numel():
            return None
        sent = self._sent(values)
        return Sent(self._group.send([sent], rank, 0), sent)

    def receive(self, room: Tensor, rank: int) -> Tensor:
        """What that rank sends, in the shape of `room`."""
        found = room.cpu() if self._through_host else room
        if found.numel():
            self._group.recv([found], rank, 0).wait()
        return found.to(room.device)

    def best(self, values: Tensor, ids: Tensor) -> Tensor:
        """The id of the highest value over all ranks, by row; of equals, that of the first rank. values and ids [R]:
        every rank's own best."""
        pairs = torch.stack([values.double(), ids.double()])  # both exact
        all_values, all_ids = self.gather(pairs).unbind(1)  # [ranks, R]
        return all_ids.gather(0, all_values.argmax(0, keepdim=True))[0].long()

    def _sent(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        return values.cpu() if self._through_host else values
