"""The examination: load the pair, look at it, let it draft, and let every other reading of the drafter draft too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.agreement import QUESTIONS, Agreement, fits, measure_agreement
from outrider.bench.prompts import CHAT, REPETITION, PromptChoice, PromptText, PromptVocabulary, random_prompts
from outrider.certify.proof import speculative_for, threads_for
from outrider.config import EngineConfig, batch_limits
from outrider.doctor.checks import DrafterFiles, static_findings, text_findings
from outrider.doctor.diagnosis import DiagnosedPair, Diagnosis
from outrider.doctor.readings import Search, trials
from outrider.drafters.base import Drafter
from outrider.llm import LLM
from outrider.measure import method_of
from outrider.pair import AUTO, Speculative, target_of

Progress = Callable[[str, int, int], None]  # what, done, total
MAX_NUM_SEQS = 32
PATIENCE = 8  # steps after which a reading that is worse beyond doubt is given up

MORE_QUESTIONS = (
    "Tell a story about a girl who finds a key.",
    "What should I wear when it rains?",
    "Write a short letter to a friend about a day at the lake.",
    "Why do we sleep?",
    "Tell me about the moon.",
    "Give me three tips for learning a new language.",
    "Tell a story about two brothers and an old boat.",
    "What can I cook with eggs and tomatoes?",
    "Explain what a map is for.",
    "Write a few sentences about winter.",
    "Tell a story about a teacher and a lost book.",
    "How can I be kind to my neighbours?",
    "What is the difference between a cat and a dog?",
    "Describe a walk through a forest.",
    "Why should we drink water?",
    "Tell a story about a bird that could not fly.",
)


@dataclass(frozen=True)
class DoctorEffort:
    """How much is asked."""

    num_prompts: int
    max_tokens: int
    num_long: int = 1  # prompts that are made of many

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, not {self.max_tokens}: a draft must be judged")


FULL = DoctorEffort(num_prompts=24, max_tokens=80)


def default_prompts(vocabulary: PromptVocabulary, effort: DoctorEffort) -> list[PromptText]:
    if vocabulary.tokenizer is None:
        return random_prompts(vocabulary.size, effort.num_prompts)
    long = PromptText("\n\n".join((*REPETITION, *CHAT)), is_chat=True)
    short = [PromptText(text, is_chat=True) for text in (*QUESTIONS, *MORE_QUESTIONS)]
    return [*short[: effort.num_prompts], *[long] * effort.num_long]


def examine(
    model: str | Path | None = None,
    speculative_config: Speculative = AUTO,
    *,
    prompts: Sequence[PromptText] | None = None,
    effort: DoctorEffort = FULL,
    progress: Progress | None = None,
) -> Diagnosis:
    """Opens a target with a drafter and says how they get on. Without names, the embedded pair."""
    config = EngineConfig(target_of(model), speculative_for(model, speculative_config), **vars(batch_limits("auto")))
    return examine_config(config, PromptChoice(prompts), effort, progress)


def examine_config(
    config: EngineConfig, choice: PromptChoice, effort: DoctorEffort = FULL, progress: Progress | None = None
) -> Diagnosis:
    """examine() for an engine of which everything was chosen."""
    begin = time.perf_counter()
    assert config.speculative is not None, "an examination needs a drafter"
    vocabulary = PromptVocabulary.of(config.model)
    texts = choice.texts if choice.texts is not None else default_prompts(vocabulary, effort)
    asked = vocabulary.encode_all(texts, choice.chat)
    config = replace(
        config,
        speculative=replace(config.speculative, force=True),
        max_num_seqs=min(len(asked), MAX_NUM_SEQS),
        enable_prefix_caching=False,
    )
    with threads_for(vocabulary.num_parameters, config.threads), LLM.from_config(config) as llm:
        diagnosis = Examination(llm, asked, effort.max_tokens, progress).run()
    diagnosis.is_text = choice.texts is not None or vocabulary.tokenizer is not None
    diagnosis.seconds = time.perf_counter() - begin
    return diagnosis


class Examination:
    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, progress: Progress | None) -> None:
        self.llm, self.max_tokens, self.progress = llm, max_tokens, progress
        self.prompts = [ids for ids in prompts if fits(llm.engine, ids, max_tokens)]
        if not self.prompts:
            raise ValueError(f"no prompt fits a context of {llm.max_model_len}: shorten them, or raise --max-model-len")
        self.done, self.num_runs = 0, 1

    def run(self) -> Diagnosis:
        llm, drafter = self.llm, self.llm.drafter
        assert drafter is not None, "an examination needs a drafter"
        assert llm.config.speculative is not None
        self.num_runs += len(trials(drafter, llm.target))
        agreement = self.measure(drafter, "as it was read")
        diagnosis = Diagnosis(self._identity(), drafter.provenance(), agreement)
        papers = DrafterFiles.of(llm.config.speculative.model)
        diagnosis.findings = static_findings(drafter, llm.target, llm.tokenizer, papers)
        diagnosis.findings += text_findings(drafter, llm.target, agreement, diagnosis.buckets)
        diagnosis.tried, diagnosis.remedy = Search(llm.target, self.measure).run(drafter, agreement)
        return diagnosis

    def measure(
        self, drafter: Drafter, name: str, hopeless: Callable[[Agreement], bool] = lambda agreement: False
    ) -> Agreement:
        """Told to whoever listens in steps of all runs together; more may follow from what is found."""
        begin = self.done

        def on_step(number: int, most: int) -> None:
            self.done = begin + number
            if self.progress is not None:
                self.progress(name, self.done, max(self.num_runs * most, self.done))

        def enough(agreement: Agreement) -> bool:
            return (self.done - begin) % PATIENCE == 0 and hopeless(agreement)

        found = measure_agreement(
            self.llm.engine, drafter, self.prompts, self.max_tokens, enough=enough, on_step=on_step
        )
        self.done = begin + self.max_tokens
        return found

    def _identity(self) -> DiagnosedPair:
        llm = self.llm
        settings = llm.config.speculative
        assert settings is not None
        assert llm.drafter is not None
        method = method_of(llm)
        return DiagnosedPair(
            target=str(llm.config.model),
            architecture=str((llm.target.config.get("architectures") or ["unnamed"])[0]),
            drafter=settings.model or settings.method or "",
            method=method or "",
            num_speculative_tokens=llm.drafter.lookahead,
            dtype=str(next(llm.target.parameters()).dtype).removeprefix("torch."),
            device=str(llm.config.torch_device),
        )
