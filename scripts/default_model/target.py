"""The target stage: train the tiny Llama on the cleaned text and save it in the Hugging Face layout."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from default_model.corpus import read_examples
from default_model.llama import Llama, LlamaShape, initialise, save_llama
from default_model.packing import Encoded, batches, encode, rows
from default_model.small_talk import small_talk

SMALL_TALK_COPIES = 12
ROW_LEN = 1024


@dataclass(frozen=True)
class TrainOptions:
    """How to train; the step count shrinks to what fits the time limit, measured after warm-up."""

    device: str
    seed: int
    num_steps: int
    limit_s: float
    tokens_per_batch: int
    peak_lr: float
    weight_decay: float
    num_warmup_steps: int


class Batches(IterableDataset):
    """Batches made in a worker process."""

    def __init__(self, encoded: Encoded, options: TrainOptions):
        self.encoded, self.options = encoded, options

    def __iter__(self) -> Iterator[np.ndarray]:
        num_rows = max(1, self.options.tokens_per_batch // ROW_LEN)
        return batches(self.encoded, num_rows, ROW_LEN, self.options.seed)


class Schedule:
    """Learning rate by step: linear warm-up, then cosine to 2 %; shortens itself to fit the time limit."""

    MEASURED_FROM, MEASURED_TO = 40, 80

    def __init__(self, options: TrainOptions):
        self.options, self.num_steps = options, options.num_steps
        self.started = self.mark = time.monotonic()

    def rate(self, step: int) -> float:
        """The learning rate of a step; call once per step, in order."""
        now = time.monotonic()
        if step == self.MEASURED_FROM:
            self.mark = now
        if step == self.MEASURED_TO:
            step_s = (now - self.mark) / (self.MEASURED_TO - self.MEASURED_FROM)
            affordable = step + int((self.options.limit_s - (now - self.started)) / step_s)
            self.num_steps = max(step + 1, min(self.num_steps, affordable))
            print(f"  {step_s * 1e3:.1f} ms a step: {self.num_steps} steps", flush=True)
        warmup = min(1.0, (step + 1) / self.options.num_warmup_steps)
        progress = min(1.0, step / self.num_steps)
        return self.options.peak_lr * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_of(network: nn.Module, options: TrainOptions) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.peak_lr, betas=(0.9, 0.95), fused=options.device == "cuda")


def target_loss(network: Llama, tokens: Tensor) -> Tensor:
    """Next-token cross entropy of tokens [B, S + 1]."""
    state, _ = network(tokens[:, :-1])
    return F.cross_entropy(network.logits(state).float().flatten(0, 1), tokens[:, 1:].flatten())


def _train(network: Llama, encoded: Encoded, options: TrainOptions) -> None:
    loss_of = torch.compile(target_loss, dynamic=False) if options.device == "cuda" else target_loss
    optimizer, schedule = optimizer_of(network, options), Schedule(options)
    on_gpu = options.device == "cuda"
    loader = DataLoader(Batches(encoded, options), batch_size=None, num_workers=int(on_gpu), pin_memory=on_gpu)
    source = iter(loader)
    recent: list[Tensor] = []
    for step in itertools.count():
        if step >= schedule.num_steps:
            return
        rate = schedule.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = next(source).to(options.device, non_blocking=True)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = loss_of(network, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        if step % 200 == 0 or step == schedule.num_steps - 1:
            seconds = time.monotonic() - schedule.started
            print(f"  step {step}: loss {torch.stack(recent).mean():.3f}, {seconds:.0f} s", flush=True)
            recent.clear()


@torch.inference_mode()
def _held_out_loss(network: Llama, encoded: Encoded, options: TrainOptions) -> float:
    source = itertools.islice(rows(encoded, ROW_LEN, seed=1), 100)
    losses = [target_loss(network, torch.from_numpy(row)[None].to(options.device)) for row in source]
    return float(torch.stack(losses).mean())


def make_target(data: Path, out: Path, options: TrainOptions) -> None:
    """Train and save. The tokenizer must already be in `out`."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    examples = read_examples(data)
    num_held_out = max(1, len(examples) // 100)
    held_out, examples = examples[:num_held_out], examples[num_held_out:] + small_talk(SMALL_TALK_COPIES)
    encoded = encode(tokenizer, examples)
    num_tokens = sum(map(len, encoded.answers)) + sum(map(len, encoded.prompts))
    torch.manual_seed(options.seed)
    network = Llama(LlamaShape())
    initialise(network, network.shape.num_hidden_layers)
    network.to(options.device)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    print(
        f"{len(examples)} examples, {num_tokens / 1e6:.1f}M tokens; {num_parameters / 1e6:.2f}M parameters", flush=True
    )
    _train(network, encoded, options)
    save_llama(network, out, encoded.specials.end)
    print(f"held-out loss {_held_out_loss(network, encode(tokenizer, held_out), options):.3f} nats per token")
