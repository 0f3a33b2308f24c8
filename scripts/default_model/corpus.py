"""The text and clean stages: the teacher answers many requests, the answers are cleaned; both as JSON lines."""

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

from default_model.cleaning import clean, common_words, plain
from default_model.decoding import Continuation, DecodingOptions, Prompt, SlotDecoder
from default_model.endings import with_ending
from default_model.prompts import Request, requests
from default_model.teacher import Teacher, load_teacher

SYSTEM = "You write short texts in simple words."
TEMPERATURES = (0.7, 0.8, 0.9, 1.0)
NUM_SHARDS = 7


@dataclass(frozen=True)
class Answer:
    """One request with the teacher's raw answer; `complete`: it ended by itself."""

    kind: str
    prompt: str
    text: str
    complete: bool


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


def _continuations(teacher: Teacher, asked: list[Request], options: TextOptions) -> list[Continuation]:
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
    return list(SlotDecoder(network, decoding).run(_prompts(teacher, asked, options)))


def generate(options: TextOptions) -> list[Answer]:
    """The teacher's answers to the stream of requests."""
    teacher = load_teacher(options.teacher)
    asked: list[Request] = []
    done = _continuations(teacher, asked, options)
    print(f"{len(done)} answers, {sum(len(item.tokens) - item.prompt_len for item in done) / 1e6:.1f}M teacher tokens")
    texts = teacher.tokenizer.decode_batch([item.tokens[item.prompt_len :] for item in done])
    answers = []
    for item, text in zip(done, texts, strict=True):
        request = asked[item.label]
        complete = item.tokens[-1] == teacher.end_of_turn
        answers.append(Answer(request.kind, request.text, request.opening + text, complete))
    return answers


def _write_shard(path: Path, records: list[Answer] | list[Example]) -> None:
    with lzma.open(path, "wt", preset=6) as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")


def _write(folder: Path, name: str, records: list[Answer] | list[Example]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{index}.jsonl.xz" for index in range(NUM_SHARDS)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(_write_shard, paths, [records[index::NUM_SHARDS] for index in range(NUM_SHARDS)]))


def _read_shard(path: Path) -> list[dict]:
    with lzma.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def _read(folder: Path, name: str) -> list[dict]:
    paths = sorted(folder.glob(f"{name}-*.jsonl.xz"))
    if not paths:
        raise ValueError(f"no {name}-*.jsonl.xz in {folder}: run the stage before this one first")
    with ProcessPoolExecutor() as pool:
        return list(itertools.chain.from_iterable(pool.map(_read_shard, paths)))


def make_text(options: TextOptions) -> None:
    """Generate, and write all answers as they came."""
    _write(options.data, "raw", generate(options))


def _cleaned(answer: dict, common: frozenset[str]) -> Example | None:
    cut = clean(answer["kind"], answer["text"], answer["complete"], common)
    if cut is None:
        return None
    text: str | None = cut.text
    if not cut.is_whole:
        text = with_ending(answer["kind"], answer["prompt"], cut.text, random.Random(cut.text))
    return Example(answer["kind"], answer["prompt"], text) if text else None


def clean_text(data: Path) -> None:
    """Clean the raw answers, drop duplicates, write the text that the later stages learn from."""
    answers = [{**answer, "text": plain(answer["text"])} for answer in _read(data, "raw")]
    common = common_words([answer["text"] for answer in answers])
    cleaned = [_cleaned(answer, common) for answer in answers]
    kept = list({example.answer: example for example in cleaned if example}.values())
    num_characters = sum(len(example.answer) for example in kept)
    print(f"kept {len(kept)} of {len(answers)} answers, {num_characters / 1e6:.1f}M characters, {len(common)} words")
    counts, kinds = Counter(answer["kind"] for answer in answers), Counter(example.kind for example in kept)
    print("kept by kind: " + ", ".join(f"{kind} {kinds[kind]}/{count}" for kind, count in counts.most_common()))
    _write(data, "text", kept)


def read_examples(data: Path) -> list[Example]:
    """All cleaned examples of a data folder, in a fixed order."""
    return [Example(**record) for record in _read(data, "text")]
