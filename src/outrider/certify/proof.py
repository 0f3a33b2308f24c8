"""The proof: plain answers once, then the same questions to speculative engines in every company, under every strain.
One engine is open at a time, so that the proof needs no more memory than serving does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outrider.bench.prompts import PromptChoice, PromptText, PromptVocabulary
from outrider.certify.certificate import Case, Certificate, CertifiedPair
from outrider.certify.company import Asker, OnStep, ask_alone, ask_joining, ask_shuffled, ask_together
from outrider.certify.comparison import (
    LOGPROB_TOLERANCE,
    corrupted,
    describe,
    differences,
    explain,
    largest_logprob_difference,
)
from outrider.certify.distribution import DrawPlan, draw, evaluate_draws, plan_draws, second_token_drafts
from outrider.certify.questions import FULL, OPTIONS, TEMPERATURES, ProofEffort, ProofRequest, ask, built_in_prompts
from outrider.certify.random_depth import RandomDepth
from outrider.config import EngineConfig, SpeculativeConfig, batch_limits
from outrider.engine.policy import FixedDepth
from outrider.llm import LLM
from outrider.measure import method_of
from outrider.outputs import RequestOutput
from outrider.pair import AUTO, DEFAULT_DIRECTORY, Speculative, shown_name, target_of
from outrider.threads import threads

Progress = Callable[[str, int, int], None]  # what, done, total
PAGE_SIZE = 8
SMALL_MODEL = 50_000_000  # parameters
NUM_TRIALS = 16  # draws that show whether a drafter has something to say
SPARE_PAGES = 4  # of a tight cache, beyond those of the longest request


@dataclass
class Watch:
    """Tells whoever listens how far the proof is."""

    listener: Progress | None
    total: int = 0
    done: int = 0

    def stage(self, what: str) -> OnStep:
        begin = self.done

        def on_step(finished: int, total: int) -> None:
            self.done = begin + finished
            if self.listener is not None:
                self.listener(what, self.done, max(self.total, self.done))

        return on_step


@dataclass(frozen=True)
class Subject:
    """What is certified. Every engine of the proof is opened here."""

    config: EngineConfig
    speculative: SpeculativeConfig

    def open(self, *, plain: bool = False, **settings: Any) -> LLM:
        speculative = None if plain else replace(self.speculative, force=True)  # how good it is, is not the question
        usual = {"page_size": PAGE_SIZE, "enable_prefix_caching": False, "speculative": speculative}
        return LLM.from_config(replace(self.config, **{**usual, **settings}))


@dataclass(frozen=True)
class Composition:
    """One way to ask all questions: in which company, of an engine with which settings."""

    name: str
    ask: Asker
    settings: Mapping[str, Any] = field(default_factory=dict)
    every: Callable[[ProofEffort], int] = lambda effort: 1  # of how many questions one is asked
    is_tight: bool = False  # with a cache that holds little more than one request
    random_depth: bool = False  # the drafter drafts more, less, or rests, by turns


def _others_every(effort: ProofEffort) -> int:
    return effort.others_every


COMPOSITIONS = (
    Composition("alone", ask_alone, every=lambda effort: effort.alone_every),
    Composition("together", ask_together),
    Composition("shuffled", ask_shuffled, every=_others_every),
    Composition("joining", ask_joining, every=_others_every),
    Composition("resting by turns", ask_together, every=_others_every, random_depth=True),
    # An engine lets every running request move in every step, so a small step also needs few requests.
    Composition("chunked prefill", ask_together, {"max_num_seqs": 4, "max_num_batched_tokens": 8}, _others_every),
    Composition("preempted", ask_together, {"max_num_seqs": 8}, _others_every, is_tight=True),
    # Prompts that start in the same step cannot reuse each other's pages: let few start at once.
    Composition(
        "prefix hits",
        ask_shuffled,
        {"page_size": 4, "enable_prefix_caching": True, "max_num_seqs": 4, "snapshot_interval": 16},
        every=_others_every,
    ),
)


class Proof:
    def __init__(self, subject: Subject, questions: Sequence[ProofRequest], effort: ProofEffort, watch: Watch) -> None:
        self.subject, self.questions, self.effort, self.watch = subject, questions, effort, watch
        self.sample = self._places(COMPOSITIONS[0])
        asked = [range(len(questions)), self.sample, *map(self._places, COMPOSITIONS)]
        watch.total = sum(questions[place].params.n for places in asked for place in places) + effort.max_draws

    def run(self) -> Certificate:
        reference, plans, control_mismatches = self._ask_plain()
        certificate: Certificate | None = None
        page_bytes = 0
        for settings, group in self._engines():
            with self._open(settings, group, page_bytes) as llm:
                page_bytes = llm.budget.page_bytes
                certificate = certificate or Certificate(self._identity(llm), control_mismatches=control_mismatches)
                for composition in group:
                    self._certify(certificate, composition, llm, reference)
                certificate.recorded_rounds += llm.engine.num_recorded_rounds
        assert certificate is not None
        plan, draws = self._draw(plans)
        with self.subject.open(plain=True, enable_prefix_caching=True) as plain:
            certificate.draws = evaluate_draws(plan, draws, plain)
            if certificate.first_divergence is not None:
                certificate.first_divergence = explain(certificate.first_divergence, plain)
        return certificate

    # the plain side

    def _ask_plain(self) -> tuple[list[RequestOutput], list[DrawPlan], int]:
        """The answers that count as the truth; the draws to make; and whether company changes a plain answer."""
        with self.subject.open(plain=True) as plain:
            reference = ask_together(plain, self.questions, self.watch.stage("plain"))
            sampled = [self.questions[place] for place in self.sample]
            alone = ask_alone(plain, sampled, self.watch.stage("plain, alone"))
            tolerance = tolerance_of(plain)
            pairs = zip((reference[place] for place in self.sample), alone, strict=True)
            mismatches = sum(len(list(differences(left, right, tolerance))) for left, right in pairs)
            answers = {
                question.prompt_token_ids: output.outputs[0].token_ids
                for question, output in zip(self.questions, reference, strict=True)
                if question.option == "plain" and question.temperature == max(TEMPERATURES)
            }
            return reference, plan_draws(plain, answers), mismatches

    # the speculative side

    def _engines(self) -> list[tuple[Mapping[str, Any], list[Composition]]]:
        """Compositions that can share an engine, together."""
        groups: list[tuple[Mapping[str, Any], list[Composition]]] = []
        for composition in COMPOSITIONS:
            if groups and groups[-1][0] == composition.settings:
                groups[-1][1].append(composition)
            else:
                groups.append((composition.settings, [composition]))
        return groups

    def _open(self, settings: Mapping[str, Any], group: Sequence[Composition], page_bytes: int) -> LLM:
        """`page_bytes` is what a page takes in the engine before, whose pages are of the same size."""
        if not any(composition.is_tight for composition in group):
            return self.subject.open(**settings)
        longest = max(question.final_len for question in self.questions)
        num_pages = -(-(longest + 1 + self.subject.speculative.num_speculative_tokens) // PAGE_SIZE) + SPARE_PAGES
        memory = (num_pages + 1) * page_bytes  # one page belongs to nobody
        return self.subject.open(**settings, max_model_len=longest, kv_cache_memory=memory)

    def _certify(
        self, certificate: Certificate, composition: Composition, llm: LLM, reference: Sequence[RequestOutput]
    ) -> None:
        places = self._places(composition)
        questions = [self.questions[place] for place in places]
        before = llm.engine.scheduler.num_preemptions
        lookahead = llm.engine.lookahead
        with llm.engine.drafting_with(RandomDepth(lookahead) if composition.random_depth else FixedDepth(lookahead)):
            outputs = composition.ask(llm, questions, self.watch.stage(composition.name))
        certificate.preemptions[composition.name] = llm.engine.scheduler.num_preemptions - before
        cases: dict[tuple[str, float], Case] = {}
        tolerance = tolerance_of(llm)
        for place, question, output in zip(places, questions, outputs, strict=True):
            key = question.option, question.temperature
            case = cases.setdefault(key, Case(composition.name, *key))
            case.counts.add(output)
            for difference in differences(reference[place], output, tolerance):
                case.counts.mismatches += 1
                if certificate.first_divergence is None:
                    found = describe(question, reference[place], difference, composition.name)
                    certificate.first_divergence = found
            largest = largest_logprob_difference(reference[place], output)
            certificate.largest_logprob_difference = max(certificate.largest_logprob_difference, largest)
        certificate.cases += sorted(cases.values(), key=_table_order)
        if not certificate.self_check:
            certificate.self_check = notices_corruption(outputs, tolerance, llm.target.vocab_size)

    def _draw(self, plans: Sequence[DrawPlan]) -> tuple[DrawPlan, list[RequestOutput]]:
        """Of the sharpest plans, the first that the drafter has something to say about."""
        with self.subject.open(max_num_seqs=32, enable_prefix_caching=True) as llm:
            drafted = (plan for plan in plans if second_token_drafts(draw(llm, plan.prompt_token_ids, NUM_TRIALS))[0])
            plan = next(drafted, plans[0])
            count = plan.num_draws(self.effort.max_draws)
            self.watch.total += count - self.effort.max_draws
            return plan, draw(llm, plan.prompt_token_ids, count, self.watch.stage("distribution"))

    # helpers

    def _places(self, composition: Composition) -> list[int]:
        """Which questions are asked: all, or some at random."""
        number = len(self.questions)
        return sorted(random.Random(1).sample(range(number), -(-number // composition.every(self.effort))))

    def _identity(self, llm: LLM) -> CertifiedPair:
        settings = self.subject.speculative
        method = method_of(llm) or "none"
        return CertifiedPair(
            model=shown_name(self.subject.config.model),
            architecture=str((llm.target.config.get("architectures") or ["unnamed"])[0]),
            num_parameters=llm.target.num_parameters,
            drafter=method if settings.model is None else f"{method} ({settings.model})",
            num_speculative_tokens=settings.num_speculative_tokens,
            dtype=str(llm.target.embed.weight.dtype).removeprefix("torch."),
            device=_where(llm),
            exact=self.subject.config.exact,
        )


def _where(llm: LLM) -> str:
    """The device, or how many ranks share the target."""
    config = llm.config
    stages = f" in {config.pipeline_parallel_size} stages" if config.pipeline_parallel_size > 1 else ""
    return f"{config.torch_device}{f', {config.num_ranks} ranks{stages}' if config.num_ranks > 1 else ''}"


def _table_order(case: Case) -> tuple[int, float]:
    return list(OPTIONS).index(case.option), case.temperature


def tolerance_of(llm: LLM) -> float:
    """By how much log-probabilities may differ: where bits do not depend on company, not at all."""
    return 0.0 if llm.config.exact else LOGPROB_TOLERANCE[llm.target.embed.weight.dtype]


def notices_corruption(outputs: Sequence[RequestOutput], tolerance: float, vocab_size: int) -> bool:
    """Whether the comparison sees one wrong token, at the beginning, in the middle and at the end of an answer."""
    output = max(outputs, key=lambda each: len(each.outputs[0].token_ids))
    length = len(output.outputs[0].token_ids)
    for position in {0, length // 2, length - 1}:
        found = list(differences(output, corrupted(output, position, vocab_size), tolerance))
        if [(each.kind, each.position) for each in found] != [("token", position)]:
            return False
    return not list(differences(output, output, tolerance))


def certify(
    model: str | Path | None = None,
    speculative_config: Speculative = AUTO,
    *,
    prompts: Sequence[PromptText] | None = None,
    effort: ProofEffort = FULL,
    progress: Progress | None = None,
) -> Certificate:
    """Plain against speculative decoding of one target. Without a drafter, the embedded target's own or n-grams."""
    config = EngineConfig(target_of(model), speculative_for(model, speculative_config), **vars(batch_limits("auto")))
    return certify_config(config, PromptChoice(prompts), effort, progress)


def certify_config(
    config: EngineConfig, choice: PromptChoice, effort: ProofEffort = FULL, progress: Progress | None = None
) -> Certificate:
    """certify() for an engine of which everything was chosen."""
    begin = time.perf_counter()
    assert config.speculative is not None, "a proof needs a drafter"
    vocabulary = PromptVocabulary.of(config.model)
    texts = choice.texts if choice.texts is not None else built_in_prompts(vocabulary, effort)
    ids = vocabulary.encode_all(texts, choice.chat)
    questions = ask(ids, effort, has_tokenizer=vocabulary.tokenizer is not None)
    if not questions:
        raise ValueError("there is no prompt to ask: give at least one")
    longest = max(question.final_len for question in questions)
    subject = Subject(replace(config, max_model_len=config.max_model_len or longest), config.speculative)
    with threads_for(vocabulary.num_parameters, config.threads):
        certificate = Proof(subject, questions, effort, Watch(progress)).run()
    certificate.seconds = time.perf_counter() - begin
    return certificate


@contextmanager
def threads_for(num_parameters: int, chosen: int | None = None) -> Iterator[None]:
    """One thread for a small model: its operations are too short to share, and on a busy machine threads would spend
    most of their time waiting for each other. Unless the user has said how many."""
    before = torch.get_num_threads()
    if num_parameters < SMALL_MODEL and chosen is None and not threads.is_fixed:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def speculative_for(model: str | Path | None, given: Speculative) -> SpeculativeConfig:
    if isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, Mapping):
        return SpeculativeConfig.from_dict(dict(given))
    if given is None or given == AUTO:
        own = model is None
        return SpeculativeConfig(model=str(DEFAULT_DIRECTORY / "drafter")) if own else SpeculativeConfig(method="ngram")
    raise ValueError(f'speculative_config must be a mapping, None or "auto", not {given!r}')
