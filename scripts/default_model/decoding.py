"""Batched decoding with a static cache: many slots, each refilled with a new prompt as soon as it ends.

A prompt enters one token per step through the same path as the generated tokens, so that one captured
CUDA graph does everything. A prefix shared by all prompts is computed once and stays in the cache.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from default_model.llama import Llama

STEPS_BETWEEN_REFILLS = 16


@dataclass(frozen=True)
class Prompt:
    """One sequence to be continued."""

    tokens: list[int]
    temperature: float
    label: int = 0


@dataclass(frozen=True)
class Continuation:
    """A finished sequence: the prompt's tokens, then the generated ones (the end token included, if it came)."""

    tokens: list[int]
    prompt_len: int
    label: int


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode; a length includes prefix and prompt."""

    end_token: int
    num_slots: int
    max_len: int
    prefix: tuple[int, ...] = ()
    min_p: float = 0.05
    limit_s: float = float("inf")


def choose(logits: Tensor, temperature: Tensor, min_p: float) -> Tensor:
    """The next token of each slot: logits [B, V], temperature [B] (0: greedy), by the Gumbel-max rule."""
    scores = logits.float()
    best = scores.amax(-1, keepdim=True)
    warm = temperature.clamp(min=1e-3).unsqueeze(-1)
    scores = (scores - best) / warm
    noise = -torch.empty_like(scores).exponential_().log()
    noise = noise * (temperature > 0).unsqueeze(-1)
    floor = math.log(max(min_p, 1e-20))
    return torch.where(scores < floor, -torch.inf, scores + noise).argmax(-1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """query [B, kv_heads, group, D] over cache [B, kv_heads, max_len, D], up to and with position [B]."""
    visible = torch.arange(key.shape[2], device=key.device) <= position[:, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None, None])


class SlotDecoder:
    """Decodes prompts from an iterator; the network's dtype is the dtype of the cache."""

    def __init__(self, network: Llama, options: DecodingOptions):
        self.network, self.options = network, options
        self.device = network.model.embed_tokens.weight.device
        shape, slots = network.shape, options.num_slots
        cache_shape = (shape.num_hidden_layers, slots, shape.num_key_value_heads, options.max_len, shape.head_dim)
        dtype = network.model.embed_tokens.weight.dtype
        self.keys = torch.zeros(cache_shape, dtype=dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        self.tokens = torch.zeros(slots, options.max_len, dtype=torch.long, device=self.device)
        self.tokens[:, : len(options.prefix)] = torch.tensor(options.prefix, dtype=torch.long, device=self.device)
        self.position = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.prompt_len = torch.full((slots,), options.max_len, device=self.device)
        self.temperature = torch.zeros(slots, device=self.device)
        self.finished = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.slot = torch.arange(slots, device=self.device)
        self.choose: Callable[..., Tensor] = choose
        self.attend = masked_attention
        if self.device.type == "cuda":
            from default_model.slot_attention import slot_attention  # Triton comes with the GPU builds only

            self.attend = slot_attention
            self.choose = torch.compile(choose, dynamic=False)

    def _logits(self) -> Tensor:
        """The network at each slot's current token: [B, V]."""
        network, rows = self.network, self.tokens[self.slot, self.position]
        x = network.model.embed_tokens(rows).unsqueeze(1)  # [B, 1, H]
        cosine = network.cosine[self.position].to(x.dtype)[:, None, None]
        sine = network.sine[self.position].to(x.dtype)[:, None, None]
        for index, layer in enumerate(network.model.layers):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cosine, sine)
            self.keys[index][self.slot, :, self.position] = k[:, :, 0]
            self.values[index][self.slot, :, self.position] = v[:, :, 0]
            # The query heads of a group become query rows of their key head: no key is copied.
            grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[-1])
            mixed = self.attend(grouped, self.keys[index], self.values[index], self.position)
            x = layer.finish(x, mixed.reshape(q.shape))
        return network.logits(network.model.norm(x[:, 0]))

    def _step(self) -> None:
        choice = self.choose(self._logits(), self.temperature, self.options.min_p)
        following = (self.position + 1).clamp(max=self.options.max_len - 1)
        in_prompt = following < self.prompt_len
        token = torch.where(in_prompt | self.finished, self.tokens[self.slot, following], choice)
        self.tokens[self.slot, following] = token
        ended = ~in_prompt & (token == self.options.end_token)
        self.position.copy_(torch.where(self.finished, self.position, following))
        self.finished |= ended | (following == self.options.max_len - 1)

    def _capture(self) -> Callable[[], None]:
        """The step as a CUDA graph, or as it is on a CPU. Leaves the state as if nothing had run."""
        if self.device.type != "cuda":
            return self._step
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def _fill(self, slots: list[int], prompts: list[Prompt]) -> None:
        start = len(self.options.prefix)
        rows = torch.zeros(len(slots), self.options.max_len - start, dtype=torch.long)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt.tokens)] = torch.tensor(prompt.tokens)
        index = torch.tensor(slots, device=self.device)
        self.tokens[index, start:] = rows.to(self.device)
        self.prompt_len[index] = torch.tensor([start + len(prompt.tokens) for prompt in prompts], device=self.device)
        self.temperature[index] = torch.tensor([prompt.temperature for prompt in prompts], device=self.device)
        self.position[index] = start
        self.finished[index] = False

    def _load_prefix(self, step: Callable[[], None]) -> None:
        self.position.zero_()
        self.finished.zero_()
        for _ in self.options.prefix:
            step()
        self.finished.fill_(True)

    @torch.inference_mode()
    def run(self, prompts: Iterable[Prompt]) -> Iterator[Continuation]:
        """Continue every prompt, in whatever order they end; stops early at the time limit."""
        step, source, running = self._capture(), iter(prompts), Running()
        self._load_prefix(step)
        while running.seconds() < self.options.limit_s:
            done = self.finished.nonzero().flatten().tolist()
            yield from self._collect(done, running)
            fresh = [prompt for _, prompt in zip(done, source, strict=False)]
            if fresh:
                self._fill(done[: len(fresh)], fresh)
                running.prompts.update(zip(done, fresh, strict=False))
            if not running.prompts:
                return
            for _ in range(STEPS_BETWEEN_REFILLS):
                step()
            running.report(STEPS_BETWEEN_REFILLS * self.options.num_slots)

    def _collect(self, done: list[int], running: "Running") -> Iterator[Continuation]:
        done = [slot for slot in done if slot in running.prompts]
        if not done:
            return
        index = torch.tensor(done, device=self.device)
        rows, lengths = self.tokens[index].tolist(), (self.position[index] + 1).tolist()
        start = len(self.options.prefix)
        for slot, row, length in zip(done, rows, lengths, strict=True):
            prompt = running.prompts.pop(slot)
            running.num_generated += length - start - len(prompt.tokens)
            yield Continuation(row[start:length], len(prompt.tokens), prompt.label)


@dataclass
class Running:
    """What a run has under way, and its progress line."""

    prompts: dict[int, Prompt] = field(default_factory=dict)
    num_generated: int = 0
    num_rows: int = 0
    started: float = field(default_factory=time.monotonic)
    reported: float = 0.0

    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started

    def report(self, num_rows: int) -> None:
        """Count rows, and print a line every ten seconds."""
        self.num_rows += num_rows
        elapsed = self.seconds()
        if elapsed - self.reported < 10:
            return
        self.reported = elapsed
        print(
            f"  {elapsed:5.0f} s: {self.num_generated / 1e6:.2f}M tokens finished, "
            f"{self.num_generated / elapsed:,.0f} tokens/s, {self.num_rows / elapsed:,.0f} rows/s",
            flush=True,
        )
