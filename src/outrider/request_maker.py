"""From a prompt and its params to requests of the engine: token ids and images, grammars, predictions, seeds."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.compatibility.llm import PROMPT
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.grammar.guide import Guide
from outrider.prompts import Prompt, Prompts, salted
from outrider.sampling_params import SamplingParams
from outrider.text_stream import TextStream
from outrider.types import Images, Prediction
from outrider.vision import VisionTower, prompt_with_images, vision_of


class RequestMaker:
    """Makes the requests of one engine. Several threads may ask at once."""

    def __init__(self, engine: Engine, config: EngineConfig, prompts: Prompts, seeds: random.Random) -> None:
        self._engine, self._config, self._prompts = engine, config, prompts
        self._compiling, self._seeing = threading.Lock(), threading.Lock()  # one grammar at a time, and one image
        self._ids = itertools.count()
        self._seeds = seeds  # of requests that ask for none
        self._tower: VisionTower | None = None  # loaded with the first image

    def of_prompt(self, prompt: Prompt, params: SamplingParams, number: int) -> list[Request]:
        """The requests of one prompt (n of them), checked before anything runs."""
        name = f"prompt {number}"
        ids, images = self._take_in(prompt, name)
        self._prompts.check(ids, name)
        return self.of_ids(ids, self._prompts.settled(salted(params, prompt), ids), images)

    def of_ids(self, ids: list[int], params: SamplingParams, images: Images | None = None) -> list[Request]:
        """n requests for a prompt and for options that have been checked, and hold tokens instead of text."""
        self._engine.check(params)
        seed = seed_of(params, self._seeds)
        request_id = f"request-{next(self._ids)}"
        requests = [self._request(f"{request_id}-{index}", ids, params, seed + index) for index in range(params.n)]
        predicted = self._predicted(params)
        for request in requests:
            if predicted is not None:
                request.prediction = Prediction(predicted, len(ids))
            if images is not None:
                request.images = images
                request.unsplit = images.spans if vision_of(self._engine.target).unsplit else ()
        return requests

    def _request(self, request_id: str, ids: list[int], params: SamplingParams, seed: int) -> Request:
        tokenizer = self._engine.tokenizer
        return Request(
            request_id=request_id,
            prompt=ids,
            params=params,
            seed=_wrap(seed),
            end_ids=frozenset() if params.ignore_eos else self._engine.end_ids,
            text=TextStream(tokenizer, ids, params) if tokenizer is not None and params.detokenize else None,
            bad_words=[list(map(int, word)) for word in params.bad_words],
            guide=self._guide(params, ids) if params.guided is not None else None,
        )

    def _guide(self, params: SamplingParams, prompt: Sequence[int]) -> Guide:
        assert params.guided is not None
        with self._compiling:
            guide = self._engine.guide(params.guided, prompt)
        room = self._engine.max_model_len - len(prompt)
        guide.end_within(room if params.max_tokens is None else min(room, params.max_tokens))
        return guide

    def _predicted(self, params: SamplingParams) -> np.ndarray | None:
        if not params.prediction or params.num_speculative_tokens == 0:
            return None
        if self._config.pipeline_parallel_size > 1 and self._engine.drafting.remembers:
            return None  # the drafter is on another rank, and drafts alone
        if self._engine.drafting.predicting is None:
            raise ValueError(
                "a prediction needs room for drafts, and none was reserved: use a drafter (a target with recurrent "
                "states has no other room), or raise num_predicted_tokens"
            )
        return np.array(params.prediction, dtype=np.int64)

    def _take_in(self, prompt: Prompt, name: str) -> tuple[list[int], Images | None]:
        """Token ids, and the images of a prompt {"prompt": ..., "multi_modal_data": {"image": ...}}."""
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if not data:
            return self._prompts.ids(prompt, name), None
        assert isinstance(prompt, Mapping)
        PROMPT.settle(prompt, name)
        unknown = sorted(set(data) - {"image"})
        if unknown:
            raise ValueError(f"{name}: multi_modal_data knows image only, not {', '.join(unknown)}")
        pictures = data["image"] if isinstance(data["image"], list | tuple) else [data["image"]]
        vision_of(self._engine.target)
        tokenizer = self._prompts.tokenizer_for(f"{name} with an image")
        given = prompt.get("prompt_token_ids") or prompt["prompt"]
        special = bool(prompt.get("add_special_tokens", True))
        return prompt_with_images(given, pictures, self._vision_tower(), tokenizer, add_special_tokens=special)

    def _vision_tower(self) -> VisionTower:
        with self._seeing:
            if self._tower is None:
                checkpoint = open_checkpoint(self._config.model)
                try:
                    self._tower = VisionTower(checkpoint, self._engine.target)
                finally:
                    checkpoint.close()
            return self._tower


def seed_of(params: SamplingParams, seeds: random.Random) -> int:
    """The seed that was asked for, or the next of `seeds`."""
    return params.seed if params.seed is not None else seeds.getrandbits(62)


def _wrap(seed: int) -> int:
    """A seed brought into the range of int64."""
    return (seed + 2**63) % 2**64 - 2**63
