"""Latency and throughput: every side answers the same prompts in one run, with a clock beside it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from outrider.bench import peer_llama_cpp, peer_transformers  # noqa: F401  (they register themselves)
from outrider.bench.interleave import Progress, Record, interleave, memory_bandwidth
from outrider.bench.peers import PeerOptions, open_peers, peers
from outrider.bench.prompts import PromptText, PromptVocabulary
from outrider.bench.report import PLAIN, SPECULATIVE, RaceSetting
from outrider.bench.sides import OutriderSide, Prompts, Side
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.console import checkpoint_name
from outrider.llm import LLM
from outrider.measure import forget_requests, method_of
from outrider.pair import shown_name
from outrider.threads import threads as cpu_threads


@dataclass(frozen=True)
class RacePlan:
    """Everything that was chosen on the command line."""

    command: str
    config: EngineConfig
    against: Sequence[str]
    prompts: Sequence[PromptText]
    chat: bool | None  # as of PromptChoice
    batch_size: int
    num_prompts: int
    max_tokens: int
    num_runs: int

    def batches(self) -> list[Prompts]:
        """The prompts as ids, in batches; where there are too few, they come again."""
        ids = PromptVocabulary.of(self.config.model).encode_all(self.prompts, self.chat)
        asked = [ids[number % len(ids)] for number in range(self.num_prompts)]
        return [asked[start : start + self.batch_size] for start in range(0, len(asked), self.batch_size)]


def run(plan: RacePlan, progress: Progress | None = None) -> tuple[RaceSetting, list[Record], list[str]]:
    """Opens all sides, lets them run in turn, and closes them again."""
    for name in plan.against:
        peers[name]  # an unknown one is refused before anything is loaded
    cpu_threads.fix(plan.config.threads or torch.get_num_threads())  # the same for all sides, to the end
    batches = plan.batches()
    with ExitStack() as opened:
        sides, setting, notes = _open(plan, batches, opened)
        records = interleave(sides, batches, plan.max_tokens, plan.num_runs, progress)
    bandwidth = max(setting.bandwidth, memory_bandwidth(torch.device(setting.device)))
    return replace(setting, bandwidth=bandwidth), records, notes


def _open(plan: RacePlan, batches: Sequence[Prompts], opened: ExitStack) -> tuple[list[Side], RaceSetting, list[str]]:
    longest = max(len(ids) for batch in batches for ids in batch) + plan.max_tokens
    longest = max(longest, plan.config.max_model_len or 0)
    config = replace(plan.config, max_model_len=longest, max_num_seqs=plan.batch_size, enable_prefix_caching=False)

    def ours(speculative: SpeculativeConfig | None) -> LLM:
        return opened.enter_context(LLM.from_config(replace(config, speculative=speculative)))

    plain = ours(None)
    sides: list[Side] = [OutriderSide(PLAIN, plain)]
    drafter = None
    own_notes: list[str] = []
    if config.speculative is not None:
        speculative = ours(config.speculative)
        sides.append(OutriderSide(SPECULATIVE, speculative))
        drafter = method_of(speculative)
        own_notes = _notes_on_memory(speculative, plan)
    device, dtype = plain.config.torch_device, plain.target.embed.weight.dtype
    threads = torch.get_num_threads()
    others, notes = open_peers(plan.against, PeerOptions(config.model, dtype, device, longest, threads))
    for other in others:
        opened.callback(other.close)
    setting = RaceSetting(
        command=f"bench {plan.command}",
        model=checkpoint_name(shown_name(config.model)),
        drafter=drafter,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        threads=threads,
        num_prompts=plan.num_prompts,
        batch_size=plan.batch_size,
        max_tokens=plan.max_tokens,
        num_runs=plan.num_runs,
        bandwidth=memory_bandwidth(device),
    )
    return sides + others, setting, own_notes + notes


def _notes_on_memory(llm: LLM, plan: RacePlan) -> list[str]:
    """What a reader must know of a drafter that learns from the answers of earlier requests."""
    if not forget_requests(llm):
        return []
    notes = [f"{method_of(llm)} forgets all earlier requests before every run: none is drafted from its own answer"]
    if plan.num_prompts > len(plan.prompts):
        again = plan.num_prompts - len(plan.prompts)
        notes.append(f"but {again} of {plan.num_prompts} prompts come again within a run: answers it may know already")
    return notes
