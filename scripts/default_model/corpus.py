"""The text stage: the teacher answers many requests; cleaned answers are written as compressed JSON lines."""

import itertools
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from default_model.cleaning import clean
from default_model.decoding import Continuation, DecodingOptions, Prompt, SlotDecoder
from default_model.prompts import Request, requests
from default_model.teacher import Teacher, load_teacher

SYSTEM = "You write short texts in simple words."
TEMPERATURES = (0.7, 0.8, 0.9, 1.0)
NUM_SHARDS = 6


@dataclass(frozen=True)
class Example:
    """One request and its cleaned answer."""

    kind: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class TextOptions:
    """What the text stage is asked for."""

    teacher: Path
    data: Path
    num_sequences: int
    limit_s: float
    num_slots: int
    device: str
    seed: int
    max_len: int = 288


def _prompts(teacher: Teacher, asked: list[Request], options: TextOptions) -> Iterator[Prompt]:
    """Endless prompts; each request is remembered in `asked` at the index its prompt is labelled with."""
    pick = random.Random(options.seed + 1)
    for index, request in enumerate(itertools.islice(requests(options.seed), options.num_sequences)):
        asked.append(request)
        text = f"{request.text}<|im_end|>\n<|im_start|>assistant\n{request.opening}"
        yield Prompt(teacher.tokenizer.encode(text).ids, pick.choice(TEMPERATURES), index)


def generate(options: TextOptions) -> Iterator[tuple[Request, str, bool]]:
    """Requests with the teacher's raw answers, and whether each answer ended by itself."""
    teacher = load_teacher(options.teacher)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    network = teacher.network.to(options.device, dtype)
    prefix = teacher.tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n").ids
    decoding = DecodingOptions(
        end_token=teacher.end_of_turn,
        num_slots=options.num_slots,
        max_len=options.max_len,
        prefix=tuple(prefix),
        min_p=0.08,
        limit_s=options.limit_s,
    )
    torch.manual_seed(options.seed)
    asked: list[Request] = []
    done = list(SlotDecoder(network, decoding).run(_prompts(teacher, asked, options)))
    print(f"{len(done)} answers, {sum(len(item.tokens) - item.prompt_len for item in done) / 1e6:.1f}M teacher tokens")
    yield from _texts(teacher, asked, done)


def _texts(teacher: Teacher, asked: list[Request], done: list[Continuation]) -> Iterator[tuple[Request, str, bool]]:
    answers = teacher.tokenizer.decode_batch([item.tokens[item.prompt_len :] for item in done])
    for item, answer in zip(done, answers, strict=True):
        request = asked[item.label]
        yield request, request.opening + answer, item.tokens[-1] == teacher.end_of_turn


def _example(raw: tuple[Request, str, bool]) -> Example | None:
    request, text, complete = raw
    answer = clean(text, complete)
    return Example(request.kind, request.text, answer) if answer else None


def _write_shard(path: Path, examples: list[Example]) -> None:
    with lzma.open(path, "wt", preset=4) as file:
        for example in examples:
            file.write(json.dumps(asdict(example)) + "\n")


def make_text(options: TextOptions) -> None:
    """Generate, clean, drop duplicates, write shards."""
    raw = list(generate(options))
    with ProcessPoolExecutor() as pool:
        cleaned = list(pool.map(_example, raw, chunksize=2000))
    kept = list({example.answer: example for example in cleaned if example}.values())
    print(
        f"kept {len(kept)} of {len(raw)} answers, {sum(len(example.answer) for example in kept) / 1e6:.1f}M characters"
    )
    counts, kinds = Counter(request.kind for request, _, _ in raw), Counter(example.kind for example in kept)
    print("kept by kind: " + ", ".join(f"{kind} {kinds[kind]}/{count}" for kind, count in counts.most_common()))
    options.data.mkdir(parents=True, exist_ok=True)
    paths = [options.data / f"text-{index}.jsonl.xz" for index in range(NUM_SHARDS)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(_write_shard, paths, [kept[index::NUM_SHARDS] for index in range(NUM_SHARDS)]))


def _read_shard(path: Path) -> list[Example]:
    with lzma.open(path, "rt") as file:
        return [Example(**json.loads(line)) for line in file]


def read_examples(data: Path) -> list[Example]:
    """All examples of a data folder, in a fixed order."""
    paths = sorted(data.glob("text-*.jsonl.xz"))
    if not paths:
        raise ValueError(f"no text-*.jsonl.xz in {data}: run the text stage first")
    with ProcessPoolExecutor() as pool:
        return list(itertools.chain.from_iterable(pool.map(_read_shard, paths)))
