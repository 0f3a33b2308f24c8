"""A whole run: texts of the target's own, a new drafter, then the course that teaches it."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from outrider.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from outrider.checkpoints.loader import build_drafter, build_target, building, load_weights
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter
from outrider.drafters.fresh import Fresh, Plan
from outrider.layers.linear import deferred
from outrider.llm import LLM
from outrider.models.base import Target
from outrider.preflight import WithoutMemory, draft_values
from outrider.tokenizer import Tokenizer
from outrider.training.checkpoint import load_state, read_fresh, write_drafter
from outrider.training.conversations import Conversation, check_template, read_all
from outrider.training.course import Course, OnProgress, Progress, Result
from outrider.training.dialects import in_speculators_format
from outrider.training.options import LOSSES, TrainOptions, parts_of, trainable_method
from outrider.training.regenerate import as_they_are, regenerate
from outrider.training.teacher import Teacher
from outrider.training.texts import Text, counted, coverage, frequent, load_texts, pack, read_texts, save_texts, usable
from outrider.training.trainer import ALONE, Lessons, Trainer, World
from outrider.types import Checkpoint

BATCH = 128  # conversations that are answered together, turn by turn
NUM_STREAMS = {"cpu": 1, "cuda": 4}  # such batches side by side, so that a GPU has enough to do when one of them ends
CACHE_BYTES = 4 * 2**30  # of the engine that validates, on a GPU: the rest is for training


def train(options: TrainOptions, world: World = ALONE, on_progress: OnProgress | None = None) -> Result:
    """Everything that can be refused is refused before anything is loaded."""
    return Run(options, world, on_progress or (lambda progress: None)).go()


def write_texts(options: TrainOptions, on_progress: OnProgress | None = None) -> tuple[Path, int]:
    """The target's answers alone, for runs that will be told of the file (`texts`). Returns it, and how many."""
    run = Run(options, ALONE, on_progress or (lambda progress: None))
    run.folder.mkdir(parents=True, exist_ok=True)
    with run._writing() as llm:
        return run.texts_path, len(run._texts(llm))


class Run:
    def __init__(self, options: TrainOptions, world: World, on_progress: OnProgress) -> None:
        self.options, self.world, self.on_progress = options, world, on_progress
        if world.size > 1 and options.num_ranks > 1:
            raise ValueError("--tensor-parallel-size starts its ranks itself: leave out torchrun, or the option")
        self.folder = options.out / "training"
        self.texts_path, self.start = self.folder / "texts.safetensors", self.folder / "start"
        self.settings = SpeculativeConfig(
            model=str(self.start), num_speculative_tokens=options.depth, force=True, draft_tensor_parallel_size=1
        )
        self.helping = helping_drafter(options)
        self.seconds: dict[str, float] = {}
        conversations = read_all(options.data, options.limit)
        checkpoint = open_checkpoint(options.target)
        try:
            self.tokenizer = load_tokenizer(checkpoint)
            outline = outline_of(checkpoint)
            self.target_len = outline.max_len
        finally:
            checkpoint.close()
        check_template(conversations, self.tokenizer, str(options.target), chat=options.answers.chat)
        if not options.regenerate and not options.texts and not any(each.has_answers for each in conversations):
            raise ValueError(
                f"{_named(options.data)} holds no answers: leave out --regenerate no, so that the target answers"
            )
        self.parts = parts_of(options, outline, world.size)
        if world.size > 1 and options.max_steps is None:
            raise ValueError("several processes must take the same steps: give --max-steps instead of --minutes")
        self.saved = load_state(self.folder)
        if self.saved is not None and not options.resume:
            raise ValueError(f"{options.out} holds a run: --resume goes on with it, or choose another --out")
        self.learnt_from, self.held_out = split(conversations, options.num_held_out, options.seed)
        if options.texts:  # all that is asked is whether they have helped
            self.held_out = conversations[: options.num_held_out]

    def go(self) -> Result:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.world.rank == 0:
            self._prepare()
        gc.collect()  # the engine that wrote them is gone, and with it the most of the memory
        if self.options.torch_device.type == "cuda":
            torch.cuda.empty_cache()
        if self.world.size > 1:
            torch.distributed.barrier()  # the others find what the first has written
        texts = load_texts(self.texts_path, self.options.source())
        assert texts is not None
        texts = usable(texts, self.options.row_length)
        with self._timed("load"):
            llm = self._serving()
        with llm:
            return self._course(llm, texts).go(self.saved)

    # texts

    def _prepare(self) -> None:
        """The target's own texts, kept in a file so that whoever resumes does not wait for them again; and the drafter
        that training begins with."""
        texts = load_texts(self.texts_path, self.options.source())
        if texts is not None and self.saved is not None:
            return
        with self._writing() as llm:
            if texts is None:
                texts = self._texts(llm)
            if self.saved is None:
                fresh = self._fresh(self._whole(llm), usable(texts, self.options.row_length))
                write_drafter(self.start, fresh.config, fresh.tensors)

    def _texts(self, llm: LLM) -> list[Text]:
        with self._timed("generate"):
            if self.options.texts:
                texts = [text for path in self.options.texts for text in read_texts(path, llm.target.embed.vocab_size)]
            else:
                texts = self._regenerated(llm) if self.options.regenerate else self._given()
        if not texts:
            raise ValueError(
                f"nothing is left of {_named(self.options.data)}: every prompt is longer than the "
                f"{self.options.answers.max_len} tokens of a text: raise --row-len, or give shorter prompts"
            )
        save_texts(self.texts_path, texts, self.options.source())
        return texts

    def _given(self) -> list[Text]:
        assert self.tokenizer is not None
        return as_they_are(self.learnt_from, self.tokenizer, chat=self.options.answers.chat)

    def _regenerated(self, llm: LLM) -> list[Text]:
        options, minutes = self.options, self.options.generate_minutes
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        asked = list(self.learnt_from) * options.samples
        done: dict[int, int] = {}

        def answered(first: int) -> list[Text]:
            if deadline is not None and time.monotonic() > deadline:
                return []

            def shown(count: int, total: int) -> None:
                done[first] = count
                self.on_progress(Progress("the target answers", sum(done.copy().values()), len(asked)))

            how = replace(options.answers, seed=options.seed * 7919 + first)
            return regenerate(llm, asked[first : first + BATCH], how, shown, deadline)

        batches, num_streams = range(0, len(asked), BATCH), NUM_STREAMS[options.torch_device.type]
        if num_streams == 1:
            return [text for first in batches for text in answered(first)]
        with ThreadPoolExecutor(num_streams) as pool:
            try:
                return [text for texts in pool.map(answered, batches) for text in texts]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C: no further batch begins

    def _writing(self) -> LLM:
        """The target, and what helps it, with room for texts as long as they become: others may be at work on the same
        device."""
        return self._llm(self.helping, max_model_len=min(self.options.answers.max_len + 1, self.target_len))

    # the drafter

    def _serving(self) -> LLM:
        """An engine that serves the drafter beside the target, in little memory: the rest is for training."""
        settings: dict[str, Any] = {"max_num_seqs": 16}
        if self.options.torch_device.type == "cuda":
            settings = {"max_num_seqs": 64, "kv_cache_memory": CACHE_BYTES}
        return self._llm(self.settings, max_model_len=min(4096, self.target_len), **settings)

    def _course(self, llm: LLM, texts: Sequence[Text]) -> Course:
        options, rows, target = self.options, pack(texts, self.options.row_length), self._whole(llm)
        drafter = training_copy(target, self.settings)
        lessons = Lessons(options.num_rows, options.depth, LOSSES[options.loss], self.parts, options.seed)
        teacher = Teacher(llm.engine, target, drafter.taps, rows)
        trainer = Trainer(
            drafter, teacher, rows, lessons, options.rates, self.world, options.train_vocabulary, records=True
        )
        course = Course(options, llm, trainer, read_fresh(self.start), self._prompts(llm), self.on_progress)
        ids = drafter.target_ids()
        course.facts = {"texts": len(texts), "coverage": coverage(texts, None if ids is None else ids.cpu())}
        course.seconds |= self.seconds
        return course

    def _llm(self, speculative: SpeculativeConfig | None, **settings: Any) -> LLM:
        options = self.options
        return LLM(
            options.target,
            speculative,
            device=options.device,
            dtype=options.dtype,
            seed=options.seed,
            threads=options.threads,
            tensor_parallel_size=options.num_ranks,
            cpu_activations="float32",  # its matrices must be there as numbers
            **settings,
        )

    def _whole(self, llm: LLM) -> Target:
        """The target, or as much of it as a drafter learns beside, where no rank has all of it."""
        return llm.target if self.options.num_ranks == 1 else frame_of(self.options.target, llm.target)

    def _fresh(self, target: Target, texts: Sequence[Text]) -> Fresh:
        options = self.options
        if options.init is not None:
            return read_fresh(options.init)
        plan = Plan(
            method=options.method,
            depth=options.depth,
            num_layers=options.num_layers,
            intermediate_size=options.intermediate_size,
            taps=options.taps,
            draft_ids=frequent(texts, options.draft_vocabulary, target.vocab_size),
            post_norm=options.post_norm,
            warm=options.warm,
            mask_token=mask_token(self.tokenizer, counted(texts, target.embed.vocab_size)),
            window=options.window,
            seed=options.seed,
        )
        method = trainable_method(options.method)
        checkpoint = open_checkpoint(options.target)
        try:
            fresh = method.found_in(target, checkpoint, plan) or method.fresh(target, plan)
        finally:
            checkpoint.close()
        if options.dialect == "speculators":
            return in_speculators_format(fresh, options.method, str(options.target), options.depth)
        return fresh

    def _prompts(self, llm: LLM) -> list[list[int]]:
        """Held out: nothing was learnt from them."""
        chat, found = self.options.answers.chat, []
        for conversation in self.held_out:
            if conversation.is_chat and chat:
                first = conversation.asked()[: 2 if conversation.messages[0][0] == "system" else 1]
                messages = [{"role": role, "content": content} for role, content in first]
                ids = llm.chat_prompt(messages)["prompt_token_ids"]
            else:
                ids = llm.get_tokenizer().encode(conversation.text or conversation.asked()[0][1])
                ids = ids[:16] if conversation.text else ids
            if 0 < len(ids) < llm.max_model_len - self.options.validation_tokens:
                found.append(ids)
        if not found:
            raise ValueError("no held-out prompt leaves room for an answer: give shorter prompts")
        return found

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - begin


def helping_drafter(options: TrainOptions) -> SpeculativeConfig | None:
    """What drafts while the target answers prompts, however little it agrees with it."""
    if options.draft is None:
        return None
    values = {**draft_values(options.draft), "num_speculative_tokens": options.depth, "force": True}
    return SpeculativeConfig.from_dict(values)


def split(
    conversations: Sequence[Conversation], num_held_out: int, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """What is learnt from, and what the engine is asked to see whether anything was. Of few, a fifth is held out."""
    order = list(conversations)
    random.Random(seed).shuffle(order)
    count = min(num_held_out, max(len(order) // 5, 1))
    if len(order) == 1:
        return order, order
    return order[count:], order[:count]


def _named(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def outline_of(checkpoint: Checkpoint) -> Target:
    """A target without weights."""
    with building(torch.device("cpu"), torch.float32), WithoutMemory():
        return build_target(checkpoint)


def frame_of(source: str | Path, like: Target) -> Target:
    """A target without its layers but for the last one: what drafters begin as and learn beside. `like`: the same, of
    which this rank has a part only."""
    parameter, checkpoint = next(like.parameters()), open_checkpoint(source)
    try:
        with building(parameter.device, parameter.dtype), deferred():
            frame = build_target(checkpoint)
        frame.keep_layers(frame.num_layers - 1, frame.num_layers)
        load_weights(frame, checkpoint)
    finally:
        checkpoint.close()
    return frame


def training_copy(target: Target, settings: SpeculativeConfig) -> Drafter:
    """The network that serves, once more, in float32: this one learns."""
    checkpoint = open_checkpoint(str(settings.model))
    try:
        with building(next(target.parameters()).device, torch.float32):
            drafter = build_drafter(settings, target, checkpoint)
        load_weights(drafter, checkpoint)
    finally:
        checkpoint.close()
    drafter.check()
    return drafter


def mask_token(tokenizer: Tokenizer | None, counts: np.ndarray) -> int:
    """A token that stands for what is not known yet: one that no text holds, a special one if there is such."""
    named = tokenizer.special_tokens if tokenizer is not None else {}
    for name in ("mask_token", "unk_token", "pad_token"):
        found = tokenizer.special_id(named[name]) if tokenizer is not None and name in named else None
        if found is not None and not counts[found]:
            return found
    return int(counts.argmin())  # the first of those that are not used
