"""How rank 0 tells the others what to do: JSON, and the bytes of tensors behind it. Nothing that is received is ever
run, and no object is made of it but numbers, texts, lists and tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.collective import Ranks

FIRST_BYTES = 4096  # of a message, with its length before them; most are shorter
LENGTH_BYTES = 8
_SENT = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
DTYPES = {str(each).removeprefix("torch."): each for each in _SENT}


class Channel:
    """Messages from rank 0 to all others of its group, on the host."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def send(self, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Does not wait for those who receive it."""
        body = encode(message, tensors)
        length = torch.tensor([len(body)]).view(torch.uint8)
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        begin, rest = body[: FIRST_BYTES - LENGTH_BYTES], body[FIRST_BYTES - LENGTH_BYTES :]
        first[:LENGTH_BYTES] = length
        first[LENGTH_BYTES : LENGTH_BYTES + len(begin)] = begin
        self.ranks.from_rank(0, first)
        if len(rest):
            self.ranks.from_rank(0, rest)

    def settle(self) -> None:
        """Waits until all messages are received."""
        self.ranks.settle()

    def receive(self) -> tuple[Any, list[Tensor]]:
        """Waits for the next message, however long."""
        first = self.ranks.from_rank(0, torch.zeros(FIRST_BYTES, dtype=torch.uint8))
        size = int(first[:LENGTH_BYTES].view(torch.long))
        body = first[LENGTH_BYTES : LENGTH_BYTES + size]
        if len(body) < size:
            rest = self.ranks.from_rank(0, torch.zeros(size - len(body), dtype=torch.uint8))
            body = torch.cat([body, rest])
        return decode(body)


def encode(message: Any, tensors: Sequence[Tensor]) -> Tensor:
    """A message as bytes: the length of the JSON, the JSON, the tensors."""
    held = [tensor.detach().cpu().contiguous() for tensor in tensors]
    forms = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in held]
    text = json.dumps([message, forms], separators=(",", ":")).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *(tensor.view(-1).view(torch.uint8) for tensor in held if tensor.numel())])


def decode(body: Tensor) -> tuple[Any, list[Tensor]]:
    size = int.from_bytes(bytes(body[:LENGTH_BYTES].tolist()), "little")
    message, forms = json.loads(body[LENGTH_BYTES : LENGTH_BYTES + size].numpy().tobytes())
    tensors, begin = [], LENGTH_BYTES + size
    for name, shape in forms:
        tensor = torch.empty(shape, dtype=DTYPES[name])
        end = begin + tensor.numel() * tensor.element_size()
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).copy_(body[begin:end])
        tensors.append(tensor)
        begin = end
    return message, tensors
