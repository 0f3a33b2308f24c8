"""The drafter stage: the target writes its own training text, then the EAGLE-3 drafter learns to foresee it."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from default_model.corpus import read_examples
from default_model.decoding import Continuation, DecodingOptions, Prompt, SlotDecoder
from default_model.eagle3 import Drafter, DrafterShape, TrainingRows, load_drafter, save_drafter, start_from, ttt_loss
from default_model.llama import Llama, load_llama
from default_model.packing import Encoded, encode
from default_model.prompts import requests
from default_model.small_talk import small_talk
from default_model.target import Schedule, TrainOptions, optimizer_of
from default_model.vocabulary import ASSISTANT, END, USER

ROW_LEN = 512
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


@dataclass(frozen=True)
class DrafterOptions:
    """What the drafter stage is asked for."""

    data: Path
    target: Path
    out: Path
    train: TrainOptions
    num_sequences: int
    generation_limit_s: float
    num_slots: int
    num_ttt_steps: int = 6
    decay: float = 0.8
    draft_vocab_size: int = 4096
    feed_forward_size: int = 768
    norm_output: bool = False
    resume: bool = False


def _chat_prompts(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    for request in requests(seed):
        yield tokenizer.encode(f"{USER}{request.text}{END}{ASSISTANT}").ids


def _raw_prompts(encoded: Encoded, seed: int) -> Iterator[list[int]]:
    """The first few tokens of the corpus' texts."""
    pick = random.Random(seed)
    while True:
        answer = encoded.answers[pick.randrange(len(encoded.answers))]
        yield answer[: pick.randint(2, 24)].tolist()


def _prompts(tokenizer: Tokenizer, encoded: Encoded, options: DrafterOptions) -> Iterator[Prompt]:
    """Small talk, then chat and raw prompts in turn, at mixed temperatures."""
    seed = options.train.seed + 1000
    chat, raw, pick = _chat_prompts(tokenizer, seed), _raw_prompts(encoded, seed), random.Random(seed)
    for item in small_talk(num_copies=options.num_sequences // 500):
        yield Prompt(tokenizer.encode(f"{USER}{item.prompt}{END}{ASSISTANT}").ids, pick.choice(TEMPERATURES))
    for index in range(options.num_sequences):
        yield Prompt(next(raw if index % 2 else chat), pick.choice(TEMPERATURES))


def generate(target: Llama, tokenizer: Tokenizer, options: DrafterOptions) -> list[Continuation]:
    """The target's own continuations."""
    encoded = encode(tokenizer, read_examples(options.data)[:50000])
    decoding = DecodingOptions(
        end_token=tokenizer.token_to_id(END),
        num_slots=options.num_slots,
        max_len=320,
        min_p=0.0,
        limit_s=options.generation_limit_s,
    )
    torch.manual_seed(options.train.seed)
    done = list(SlotDecoder(target, decoding).run(_prompts(tokenizer, encoded, options)))
    num_tokens = sum(len(item.tokens) - item.prompt_len for item in done)
    print(f"{len(done)} continuations, {num_tokens / 1e6:.1f}M tokens of the target's own", flush=True)
    return done


@dataclass(frozen=True)
class PackedRows:
    """Continuations side by side in rows of ROW_LEN, on the training device."""

    tokens: Tensor  # [num_rows, ROW_LEN] int16
    documents: Tensor  # [num_rows, ROW_LEN] int16, -1 after the last
    learnt: Tensor  # [num_rows, ROW_LEN] bool


def pack(done: list[Continuation], device: str) -> PackedRows:
    """Fill rows with whole continuations."""
    rows: list[list[Continuation]] = [[]]
    for item in done:
        if sum(len(other.tokens) for other in rows[-1]) + len(item.tokens) > ROW_LEN:
            rows.append([])
        rows[-1].append(item)
    tokens = np.zeros((len(rows), ROW_LEN), dtype=np.int16)
    documents = np.full((len(rows), ROW_LEN), -1, dtype=np.int16)
    learnt = np.zeros((len(rows), ROW_LEN), dtype=bool)
    for index, row in enumerate(rows):
        start = 0
        for number, item in enumerate(row):
            end = start + len(item.tokens)
            tokens[index, start:end] = item.tokens
            documents[index, start:end] = number
            learnt[index, start + item.prompt_len - 1 : end - 1] = True
            start = end
    return PackedRows(*(torch.from_numpy(array).to(device) for array in (tokens, documents, learnt)))


@torch.no_grad()
def observe(target: Llama, packed: PackedRows, index: Tensor, taps: tuple[int, ...]) -> TrainingRows:
    """Run the target over some rows and keep what the drafter may see. Documents do not see each other."""
    tokens, documents = packed.tokens[index].long(), packed.documents[index]
    mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    state, captured = target(tokens, taps, mask)
    return TrainingRows(
        tokens=tokens,
        documents=documents,
        embedded=target.model.embed_tokens(tokens),
        taps=torch.cat(captured, dim=-1),
        logits=target.logits(state),
        learnt=packed.learnt[index],
    )


def _order(num_rows: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of row indices, a fresh permutation per epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(num_rows, generator=generator).split(batch):
            if len(index) == batch:
                yield index


def train(drafter: Drafter, target: Llama, packed: PackedRows, options: DrafterOptions) -> None:
    """Minimise the training-time-test loss."""
    device, settings = options.train.device, options.train

    def loss_of(index: Tensor) -> tuple[Tensor, Tensor]:
        rows = observe(target, packed, index, drafter.shape.taps)
        return ttt_loss(drafter, rows, options.num_ttt_steps, options.decay)

    step_loss: Callable[[Tensor], tuple[Tensor, Tensor]] = loss_of
    if device == "cuda":
        step_loss = torch.compile(loss_of, dynamic=False)
    optimizer, schedule = optimizer_of(drafter, settings), Schedule(settings)
    batch = max(1, settings.tokens_per_batch // ROW_LEN)
    order = _order(len(packed.tokens), batch, settings.seed)
    recent: list[Tensor] = []
    for step in itertools.count():
        if step >= schedule.num_steps:
            return
        rate = schedule.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, shares = step_loss(next(order).to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(torch.cat([loss.detach()[None], shares]))
        if step % 200 == 0 or step == schedule.num_steps - 1:
            _report(step, torch.stack(recent).mean(0).tolist(), time.monotonic() - schedule.started)
            recent.clear()


def _report(step: int, means: list[float], seconds: float) -> None:
    loss, *shares = means
    steps = " ".join(f"{share:.3f}" for share in shares)
    print(f"  step {step}: loss {loss:.3f}, right so far {steps}, {seconds:.0f} s", flush=True)


def _frequent_tokens(packed: PackedRows, size: int, vocabulary_size: int) -> Tensor:
    """The target ids that its own text uses most, sorted."""
    counts = torch.bincount(packed.tokens[packed.documents >= 0].long(), minlength=vocabulary_size)
    ranked = counts.sort(descending=True)
    for covered in (1024, 1536, 2048, 3072):
        print(f"the {covered} most frequent tokens are {ranked.values[:covered].sum() / counts.sum():.4f} of the text")
    return ranked.indices[:size].sort().values


def _first_weights(target: Llama, options: DrafterOptions) -> Drafter:
    """A new drafter, or the saved one (with its whole vocabulary) to be trained further."""
    if options.resume:
        return load_drafter(options.out)[0]
    layer = replace(target.shape, num_hidden_layers=1, intermediate_size=options.feed_forward_size)
    drafter = Drafter(DrafterShape(layer, norm_output=options.norm_output))
    start_from(drafter, target)
    return drafter


def make_drafter(options: DrafterOptions) -> None:
    """Generate, train, save."""
    device = options.train.device
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    target = load_llama(options.target).to(device).requires_grad_(False)
    fast = load_llama(options.target).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    packed = pack(generate(fast, tokenizer, options), device)
    torch.manual_seed(options.train.seed)
    drafter = _first_weights(target, options).to(device)
    print(
        f"{sum(parameter.numel() for parameter in drafter.parameters()) / 1e6:.2f}M parameters, "
        f"{len(packed.tokens)} rows of {ROW_LEN}",
        flush=True,
    )
    train(drafter, target, packed, options)
    kept = _frequent_tokens(packed, options.draft_vocab_size, target.shape.vocab_size)
    save_drafter(drafter, kept, target, options.out)
