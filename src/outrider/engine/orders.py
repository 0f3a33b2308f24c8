"""Several ranks, one engine: rank 0 decides what happens, and tells the others before it does the same itself. All have
the same slot tables and pages, so an order is as small as what the host tells its own device."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.engine.channel import Channel
from outrider.engine.options import SamplingNeeds
from outrider.engine.placing import Placing
from outrider.engine.request import Request
from outrider.engine.snapshot_pool import Marks
from outrider.engine.snapshots import WantedSnapshots
from outrider.engine.text_pass import TextShape
from outrider.sampling_params import SamplingParams
from outrider.types import Images, RoundShape

# of a request's params, what the device is told of
PARAMS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "max_tokens", "logit_bias", "allowed_token_ids", "stop_token_ids", "extra_args"),
)


class Orders:
    """Rank 0's side. What need not be done at once waits for the next order that must be."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._orders: list[dict[str, Any]] = []
        self._tensors: list[Tensor] = []
        self._number = 0  # of the last round
        self.waits = True  # until others have heard it: they have nothing else to do, and should begin at once

    def place(self, placing: Placing) -> None:
        if not placing:
            return
        self._orders.append(
            {
                "do": "place",
                "admitted": [self._admission(request, reused) for request, reused in placing.admitted],
                "places": placing.places,
                "wanted": [[each.slot, each.column, each.end, each.place] for each in placing.wanted],
            }
        )

    def catch_up(self, table: Tensor, shape: RoundShape, asked: SamplingNeeds) -> None:
        self._send(do="catch_up", table=table.tolist(), shape=vars(shape), asked=vars(asked))

    def forward(self, table: Tensor, shape: RoundShape, asked: SamplingNeeds, *, has_images: bool) -> int:
        """The first part of a round, which is given a number."""
        self._number += 1
        told = {"table": table.tolist(), "shape": vars(shape), "asked": vars(asked), "has_images": has_images}
        self._send(do="forward", number=self._number, **told)
        return self._number

    def finish(
        self, number: int, said: tuple[Tensor, Tensor] | None, *, gathers: tuple[bool, bool], draft_width: int
    ) -> None:
        """The other parts of a round; rounds before it have none left. `gathers`: whether rank 0 needs all logits, and
        whether all hidden states.
        `draft_width`: tokens of the draft that rank 0 will send, at most; 0: none."""
        said_at = None if said is None else self._attach(*said)
        self._send(do="finish", number=number, said=said_at, gathers=gathers, draft_width=draft_width)

    def land(self, number: int, *, at_once: bool) -> None:
        """Of rounds in stages: what the last one tells of it is to be heard, before anything else that follows."""
        self._orders.append({"do": "land", "number": number})
        if at_once:
            self._send()

    def logits(self, states: Tensor) -> None:
        """Tells all ranks that logits of hidden states [R, H] are wanted, of the whole vocabulary."""
        self._send(do="logits", states=self._attach(states))

    def read_texts(self, shape: TextShape, tokens: Tensor, documents: Tensor) -> None:
        """Tells all ranks to run the target over texts [R, S]: rank 0 has what comes of it."""
        self._send(do="read_texts", shape=vars(shape), rows=self._attach(tokens.int(), documents.int()))

    def refill(self, values: Mapping[str, Tensor]) -> None:
        """Gives the drafter, all of which is on every rank, these weights."""
        self._send(do="refill", names=list(values), values=self._attach(*values.values()))

    def close(self) -> None:
        self._send(do="close")

    def _admission(self, request: Request, reused: Sequence[int]) -> dict[str, Any]:
        params, images = vars(request.params), request.images
        return {
            "slot": request.slot,
            "tokens": request.tokens,
            "prompt_len": len(request.prompt),
            "params": {name: _plain(params[name]) for name in PARAMS},
            "seed": request.seed,
            "end_ids": sorted(request.end_ids),
            "bad_words": request.bad_words,
            "reused": list(reused),
            "restored": request.marks.restored,
            "images": None if images is None else self._images(images),
        }

    def _images(self, images: Images) -> dict[str, Any]:
        positions = [] if images.positions is None else [images.positions]
        return {"tensors": self._attach(images.indices, images.features, *positions), "spans": images.spans}

    def _attach(self, *tensors: Tensor) -> list[int]:
        """Adds tensors to a message: where they are among the message's tensors."""
        self._tensors += tensors
        return list(range(len(self._tensors) - len(tensors), len(self._tensors)))

    def _send(self, **order: Any) -> None:
        orders, tensors = [*self._orders, order] if order else self._orders, self._tensors
        self._orders, self._tensors = [], []
        self._channel.send(orders, tensors)
        if self.waits:
            self._channel.settle()


def _plain(value: Any) -> Any:
    """A value as JSON has it: many ids are held as an array."""
    return list(value) if isinstance(value, array) else value


def placing_of(order: dict[str, Any], tensors: Sequence[Tensor]) -> Placing:
    """A Placing as it was on rank 0, as far as the device is told of it."""
    return Placing(
        admitted=[(_request(each, tensors), each["reused"]) for each in order["admitted"]],
        places=[(slot, place, page) for slot, place, page in order["places"]],
        wanted=[WantedSnapshots(*each) for each in order["wanted"]],
    )


def _request(admission: dict[str, Any], tensors: Sequence[Tensor]) -> Request:
    given = admission["params"]
    bias = given["logit_bias"]
    params = SamplingParams(**{**given, "logit_bias": bias and {int(token): value for token, value in bias.items()}})
    tokens = admission["tokens"]
    request = Request(
        request_id="",
        prompt=tokens[: admission["prompt_len"]],
        params=params,
        seed=admission["seed"],
        end_ids=frozenset(admission["end_ids"]),
        bad_words=admission["bad_words"],
        images=_images_of(admission["images"], tensors),
    )
    request.tokens, request.slot, request.marks = tokens, admission["slot"], Marks(admission["restored"])
    return request


def _images_of(told: dict[str, Any] | None, tensors: Sequence[Tensor]) -> Images | None:
    if told is None:
        return None
    indices, features, *positions = (tensors[place] for place in told["tensors"])
    spans = tuple((begin, end) for begin, end in told["spans"])
    return Images(indices, features, spans, names=(), positions=positions[0] if positions else None)


def seats_of(order: dict[str, Any]) -> tuple[Tensor, RoundShape, SamplingNeeds]:
    """Who takes part in a round, its sizes, and what is asked of sampling."""
    return torch.tensor(order["table"], dtype=torch.long), RoundShape(**order["shape"]), SamplingNeeds(**order["asked"])
