"""What is claimed of traffic, measured with as few engines as possible: see traffic.sh.

    PYTHONPATH=src python scripts/h200/traffic.py PART...

never      a drafter that is never right, adaptive, beside plain decoding, in the engine, by number of clients
depth      acceptance that differs from request to request: adaptive beside every fixed K (as `outrider bench depth`);
           DEPTHS="2 3": beside these alone; LOADS="32:512:128 64:128:512": with so many clients, tokens in and out;
           LONG=4: so many requests of each client in a run (6)
guided     32 requests, 8 of them with a JSON schema, beside 32 without
equal      the same asked of the embedded pair in exact mode: the answers must be plain decoding's
round      a round of EAGLE-3 over a plain one, at batch 8 and 32 (as `outrider bench round`)
http       a drafter that is never right, through two servers (as `outrider bench traffic --http`)
startup    from starting a process to its first token, cold and warm (as `outrider bench startup`)

The first three share two engines with random weights: how often a draft is right is a table on the device, which is
changed between them; recorded rounds read it anew."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from common import SMOKE, attempt, free_memory, roomy_folder, say, smoke_shape, verdict
from random_model import write_pair
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from guided_rounds import MadeUpTokenizer

from outrider import LLM, SamplingParams
from outrider.bench.depth import PolicySide
from outrider.bench.load.serve_load import LoadOutcome
from outrider.bench.load.server_process import server_process
from outrider.bench.load.traffic import Level, LevelRuns, TrafficPlan, measure_levels, output_rate
from outrider.bench.load.traffic_opening import server_arguments
from outrider.bench.load.traffic_prompts import traffic_prompts
from outrider.bench.load.traffic_sides import EngineSide, ServerSide, TrafficSide
from outrider.bench.prompts import PromptText, PromptVocabulary
from outrider.bench.random_pair import random_engine, shape_of
from outrider.bench.round import RoundPlan, measure
from outrider.bench.startup import start
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.engine.governor import Governor
from outrider.engine.policy import DepthPolicy, FixedDepth
from outrider.engine.request import Request
from outrider.engine.warm_up import warm_up
from outrider.kernels.sampling import gumbel
from outrider.options import EngineOptions
from outrider.sampling_params import Guided
from outrider.types import Step

SHAPE = smoke_shape() if SMOKE else "llama-3.1-8b"
PROMPT_LEN, ANSWER_LEN, K = (16, 8, 5) if SMOKE else (512, 128, 5)
CLIENTS = (1, 4) if SMOKE else (1, 8, 32, 128)
REQUESTS = {1: 2, 4: 4} if SMOKE else {1: 2, 8: 16, 32: 64, 128: 256}  # of a run: a few waves, a second or two
CROWD, GUIDED, ROUNDS = (4, 1, 3) if SMOKE else (32, 8, 40)
NUM_RUNS = int(os.environ.get("RUNS", "1" if SMOKE else "3"))
RATES = (0.9, 0.1)
LONG = int(os.environ.get("LONG", "2" if SMOKE else "6"))  # requests of a client, where their end must not count
LOADS = os.environ.get("LOADS", f"{CROWD}:{PROMPT_LEN}:{ANSWER_LEN}").split()  # clients, tokens in and out
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "words": {"type": "array", "items": {"type": "string"}, "minItems": 3}},
    "required": ["name", "words"],
}


# acceptance that can be changed


class Acceptance:
    """How often a draft token is right, of requests with even and with odd seeds. None: as the target says. What
    `synthetic_acceptance_rates` does, but that the rates are read from the device in every round."""

    def __init__(self, device: torch.device) -> None:
        self._rates, self._is_off = torch.zeros(2, device=device), torch.ones(1, dtype=torch.bool, device=device)
        self._zero = torch.zeros(1, dtype=torch.long, device=device)

    def set(self, rates: Sequence[float] | None) -> None:
        self._is_off.fill_(rates is None)
        self._rates.copy_(torch.tensor(rates or (0.0, 0.0)))

    def __call__(self, choice: Tensor, step: Step) -> Tensor:
        if not len(choice):
            return choice
        batch, state, row = step.batch, step.state, step.judged
        request, slots = batch.request[row], batch.row_slots[row]
        place = torch.arange(len(choice), device=choice.device) - step.judged_start[request]
        draft = state.tokens[slots, batch.indices[row] + 1]
        seeds = step.sampling.seed[batch.slots[request]]
        chance = (-(-gumbel(seeds, batch.indices[row] + 1, self._zero)[:, 0]).exp()).exp()
        agreed = torch.where(chance < self._rates[seeds % 2], draft, (draft - 1).abs())
        return torch.where((place < state.draft_count[slots]) & ~self._is_off, agreed, choice)


@dataclass
class Pair:
    """A plain engine and one with a drafter, ready; made when first asked for."""

    num_seqs: int
    config: EngineConfig = field(init=False)
    plain: Engine = field(init=False)
    drafting: Engine = field(init=False)
    acceptance: Acceptance = field(init=False)

    def __post_init__(self) -> None:
        speculative = SpeculativeConfig(method="eagle3", num_speculative_tokens=K)
        self.config = EngineConfig(
            SHAPE,
            speculative,
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=PROMPT_LEN + ANSWER_LEN + 16,
            enable_prefix_caching=False,
        )
        self.acceptance = Acceptance(self.config.torch_device)
        self.plain = self._open("plain", replace(self.config, speculative=None))
        self.drafting = self._open("eagle3", self.config)

    def _open(self, name: str, config: EngineConfig) -> Engine:
        begin = time.perf_counter()
        engine = random_engine(config, shape_of(SHAPE))
        engine.tokenizer = MadeUpTokenizer(engine.target.vocab_size)  # type: ignore[assignment]
        engine.end_ids = frozenset([engine.target.vocab_size - 1])
        if config.speculative is not None:
            engine.parts._synthetic_choice = self.acceptance
        warm_up(engine)
        say(f"{name}: ready after {time.perf_counter() - begin:.1f} s, {engine.num_recordings} recordings")
        return engine

    def adaptive(self) -> Governor:
        """One that has learnt nothing yet."""
        return Governor(self.drafting.lookahead, self.config.max_num_seqs + 1)


# by number of clients


@dataclass(frozen=True)
class ShortPlan(TrafficPlan):
    """Few requests where there is one client, so that no level takes long."""

    requests: Mapping[int, int] = field(default_factory=dict)

    def num_requests(self, level: Level) -> int:
        return self.requests[level.clients or 1]


def short_plan(clients: Sequence[int], num_runs: int) -> ShortPlan:
    levels = [Level(number) for number in clients]
    return ShortPlan(levels, PROMPT_LEN, ANSWER_LEN, 0.02, num_runs, requests=REQUESTS)


def prompts_of(plan: ShortPlan) -> list[PromptText]:
    vocabulary = PromptVocabulary(None, shape_of(SHAPE)["vocab_size"])
    return traffic_prompts(vocabulary, plan.most_requests, plan.prompt_len, plan.seed)


def side_of(name: str, engine: Engine, plan: ShortPlan, policy: DepthPolicy | None = None) -> TrafficSide:
    def make(prompt: PromptText, params: SamplingParams) -> Request:
        return Request(f"{name}-{params.seed}", list(prompt.ids), params, seed=params.seed or 0)

    side = EngineSide(name, engine, make, plan.asking())
    return side if policy is None else PolicySide(name, side, policy)


def medians(found: LevelRuns) -> tuple[list[float], list[list[float]]]:
    """Tokens a second of each side, and run by run."""
    rates = [[output_rate(run) for run in runs] for runs in found.runs]
    return [statistics.median(each) for each in rates], rates


def busy_rate(run: LoadOutcome) -> float:
    """Tokens a second until the last request was sent, while all clients were busy. At the end of a run whoever is
    slowest is alone, and a drafter that was right for the others has only made that come sooner."""
    begin, end = min(each.sent for each in run.answers), max(each.sent for each in run.answers)
    tokens = 0.0
    for each in run.answers:
        first, over = each.sent + (each.first or 0.0), each.sent + each.seconds
        tokens += (each.num_tokens or 0) * min(max(end - first, 0.0) / max(over - first, 1e-9), 1.0)
    return tokens / max(end - begin, 1e-9)


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def tell_never(way: str, found: Sequence[LevelRuns]) -> None:
    for level in found:
        (plain, drafting), (plains, draftings) = medians(level)
        pairs = ratios(draftings, plains)
        ratio = statistics.median(pairs)
        drafts = [run.drafting.num_drafts if run.drafting is not None else 0 for run in level.runs[1]]
        say(
            f"never right, {way}, {level.level.name}: plain {plain:.0f}, adaptive {drafting:.0f} tokens/s, "
            f"ratio {ratio:.3f} ({min(pairs):.3f}..{max(pairs):.3f}), drafts {drafts} "
            f"({verdict(ratio, 0.98, at_least=True)})"
        )


def never(pair: Pair) -> None:
    pair.acceptance.set((0.0, 0.0))
    plan = short_plan(CLIENTS, NUM_RUNS)
    sides = [side_of("plain", pair.plain, plan), side_of("adaptive", pair.drafting, plan, pair.adaptive())]
    tell_never("engine", measure_levels(sides, prompts_of(plan), plan, lambda line: None))


def depth(pair: Pair) -> None:
    pair.acceptance.set(RATES)
    watchdog, pair.drafting.watchdog = pair.drafting.watchdog, None  # it would leave requests out, whatever the depth
    for load in LOADS:
        clients, prompt_len, answer_len = (int(part) for part in load.split(":"))
        plan = replace(
            short_plan((clients,), max(NUM_RUNS - 1, 1)),
            prompt_len=prompt_len,
            answer_len=answer_len,
            requests={clients: LONG * clients},
        )
        _depth(pair, plan, f"{clients} clients, {prompt_len} tokens in, {answer_len} out")
    pair.drafting.watchdog = watchdog


def _depth(pair: Pair, plan: ShortPlan, load: str) -> None:
    sides = [side_of("plain", pair.plain, plan)]
    depths = [int(each) for each in os.environ.get("DEPTHS", "").split()] or list(range(1, K + 1))
    sides += [side_of(f"K={depth}", pair.drafting, plan, FixedDepth(depth)) for depth in depths]
    sides += [side_of("adaptive", pair.drafting, plan, pair.adaptive())]
    (found,) = measure_levels(sides, prompts_of(plan), plan, lambda line: None)
    rates = [[busy_rate(run) for run in runs] for runs in found.runs]
    middle, (whole, _) = [statistics.median(each) for each in rates], medians(found)
    drafted = [each.drafting for each in found.runs[len(depths)] if each.drafting]
    brought = max((each.num_accepted / max(each.num_drafts, 1) for each in drafted), default=0.0)
    best = max(range(1, len(depths) + 1), key=lambda number: middle[number])
    pairs = ratios(rates[-1], rates[best])
    said = ", ".join(f"{side.name} {rate:.0f}" for side, rate in zip(sides, middle, strict=True))
    say(f"rates {RATES}, {load}, tokens/s: {said}; a draft of {depths[-1]} brings {brought:.2f}")
    say("to the end of the last answer: " + ", ".join(f"{rate:.0f}" for rate in whole))
    ratio = statistics.median(pairs)
    say(
        f"adaptive over the best fixed (K={depths[best - 1]}): {ratio:.3f} ({min(pairs):.3f}..{max(pairs):.3f}), "
        f"over plain {middle[-1] / middle[0]:.3f} ({verdict(ratio, 1.0, at_least=True)})"
    )


# grammars


def wave(engine: Engine, num_guided: int, policy: DepthPolicy | None, num_tokens: int) -> float:
    """Tokens a second of a crowd that comes at once, some of them with a schema."""
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True)
    size, requests = engine.target.vocab_size, []
    for number in range(CROWD):
        guide = engine.guide(Guided(json_schema=SCHEMA)) if number < num_guided else None
        if guide is not None:
            guide.end_within(num_tokens)
        prompt = [(7 * number + place) % size for place in range(min(64, PROMPT_LEN))]
        requests.append(Request(f"{num_guided}-{number}", prompt, params, seed=number, guide=guide))
    with ExitStack() as opened:
        if policy is not None:
            opened.enter_context(engine.drafting_with(policy))
        begin = time.perf_counter()
        for request in requests:
            engine.add(request)
        while not all(request.finished for request in requests):
            engine.step()
        seconds = time.perf_counter() - begin
    failed = [request.error for request in requests if request.error]
    if failed:
        raise ValueError(f"{len(failed)} requests failed: {failed[0]}")
    return sum(request.num_outputs for request in requests) / seconds


def guided(pair: Pair) -> None:
    pair.acceptance.set(None)
    sides: list[tuple[str, Engine, DepthPolicy | None]] = [
        ("plain", pair.plain, None),
        ("eagle3 adaptive", pair.drafting, pair.adaptive()),
        (f"eagle3 K={K}", pair.drafting, FixedDepth(K)),
    ]
    for name, engine, policy in sides:
        for number in (0, GUIDED):
            wave(engine, number, policy, ANSWER_LEN)  # compiles the grammar, and records what is new
        rates = [[wave(engine, number, policy, ANSWER_LEN) for number in (0, GUIDED)] for _ in range(NUM_RUNS)]
        free, bound = (statistics.median(each) for each in zip(*rates, strict=True))
        ratio = statistics.median(second / first for first, second in rates)
        say(
            f"{GUIDED} of {CROWD} with a JSON schema, {name}: {free:.0f} without, {bound:.0f} with, ratio {ratio:.3f} "
            f"({verdict(ratio, 0.9, at_least=True)})"
        )


def equal() -> None:
    """Real text of the embedded pair: a wave of both engines must say the same, with and without drafts."""
    count, tokens = (8, 24) if SMOKE else (CROWD, 96)
    texts = ["Tell me about a dog.", "Once upon a time", "Name a few animals.", "What is rain?"]
    prompts = [f"{texts[number % len(texts)]} ({number})" for number in range(count)]
    answers: list[list[tuple[int, ...]]] = []
    for config in (None, "auto"):
        with LLM(speculative_config=config, exact=True, dtype="auto" if SMOKE else "bfloat16") as llm:
            said, lengths = [], []
            for temperature in (0.0, 0.8):
                params = [
                    SamplingParams(
                        temperature=temperature,
                        seed=number,
                        max_tokens=tokens,
                        guided=Guided(json_schema=SCHEMA) if number % 4 == 0 else None,
                    )
                    for number in range(count)
                ]
                begin = time.perf_counter()
                outputs = llm.generate(prompts, params)
                lengths.append(sum(len(each.outputs[0].token_ids) for each in outputs))
                said += [tuple(each.outputs[0].token_ids) for each in outputs]
            answers.append(said)
            rounds = sum((each.outputs[0].speculation.rounds for each in outputs), 0)
            say(f"{'plain' if config is None else 'eagle3'}: {sum(lengths)} tokens in {2 * count} answers, the last "
                f"{lengths[-1]} in {rounds} rounds, {time.perf_counter() - begin:.1f} s")  # fmt: skip
    same = sum(one == other for one, other in zip(*answers, strict=True))
    say(f"{count // 4} of {count} with a JSON schema, embedded pair, exact, temperature 0 and 0.8: {same} of "
        f"{len(answers[0])} answers equal plain's ({'reached' if same == len(answers[0]) else 'MISSED'})")  # fmt: skip


# single rounds


def round_cost() -> None:
    wanted = {8: 1.35, 32: 1.40, CROWD: 1.40}
    config = EngineConfig(SHAPE, max_num_seqs=CROWD, max_num_batched_tokens=8192)
    for batch in (2, CROWD) if SMOKE else (8, 32):
        plan = RoundPlan(SHAPE, batch, PROMPT_LEN, ROUNDS, 0.0, config, K, 3.0)
        plan = replace(plan, config=replace(config, max_model_len=PROMPT_LEN + (1 + K) * (7 * ROUNDS + 16)))
        settings = SpeculativeConfig(
            method="eagle3", num_speculative_tokens=K, force=True, synthetic_acceptance_length=3.0
        )
        plain = measure(plan)
        free_memory()
        for kind in (None,) if SMOKE else (None, "fp8", "int4"):
            name = "EAGLE-3" if kind is None else f"EAGLE-3 in {kind}"
            chosen = replace(plan.config, speculative=replace(settings, quantization=kind))
            drafted = measure(replace(plan, config=chosen))
            free_memory()
            ratio = drafted.median / plain.median
            say(
                f"round, batch {batch}: plain {plain.median:.3f} ms (device {plain.device_ms or 0:.3f}), {name} "
                f"{drafted.median:.3f} ms (device {drafted.device_ms or 0:.3f}), {drafted.tokens_per_round:.2f} "
                f"tokens, ratio {ratio:.3f} ({verdict(ratio, wanted.get(batch, 1.4), at_least=False)})"
            )


# servers


def http() -> None:
    folder = roomy_folder(1e8 if SMOKE else 25e9)
    try:
        _http(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _http(folder: Path) -> None:
    target, head = write_pair(folder, SHAPE)
    say(f"http: a checkpoint of {sum(each.stat().st_size for each in folder.rglob('*')) / 1e9:.1f} GB in {folder}")
    made_up = f'{{"model": "{head}", "num_speculative_tokens": {K}, "synthetic_acceptance_length": 1.0}}'
    options = EngineOptions(model=str(target), speculative_config=made_up, device="cpu" if SMOKE else "auto")
    plan = short_plan(CLIENTS, NUM_RUNS)
    length = PROMPT_LEN + ANSWER_LEN + 16
    config = options.config(max_num_seqs=max(CLIENTS), max_model_len=length, enable_prefix_caching=False)
    with ExitStack() as opened:
        begin = time.perf_counter()

        def serve(settings: EngineConfig, name: str) -> TrafficSide:
            arguments = server_arguments(options, settings)
            server = opened.enter_context(server_process(arguments, folder / f"{name}.log"))
            return ServerSide(name, server.url, plan.asking())

        with ThreadPoolExecutor(2) as pool:  # they start at the same time
            started = [
                pool.submit(serve, replace(config, speculative=settings), name)
                for name, settings in (("plain", None), ("adaptive", config.speculative))
            ]
            sides = [each.result() for each in started]
        say(f"http: two servers, started side by side, ready after {time.perf_counter() - begin:.1f} s")
        tell_never("http", measure_levels(sides, prompts_of(plan), plan, lambda line: None))


# starts


def startup() -> None:
    """Kernels go to $CACHE and stay there: whatever comes after finds them."""
    cache = Path(os.environ.get("CACHE") or tempfile.mkdtemp())
    speculative = SpeculativeConfig(method="eagle3", num_speculative_tokens=K)
    config = EngineConfig(SHAPE, speculative, max_num_seqs=max(CLIENTS), max_num_batched_tokens=8192)
    for name in ("cold", "warm"):
        while name == "warm" and (other := os.environ.get("WAIT_FOR")) and not Path(other).exists():
            time.sleep(0.2)  # for whatever runs beside the cold start, and would disturb from here on
        made = start(config, SHAPE, cache)
        spent = {**made.parts, **made.within_warm_up}
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in spent.items())
        said = f" ({verdict(made.ready, 20, at_least=False)})" if name == "warm" else ""
        say(
            f"startup {name}: ready after {made.ready:.1f} s, first token {made.first_token:.1f}{said}; {parts}; "
            f"{made.num_recordings} recordings, kernels compiled {made.num_kernels}, late {made.num_late_kernels}"
        )


def main() -> None:
    chosen, pair = sys.argv[1:], None
    alone = {"equal": equal, "round": round_cost, "http": http, "startup": startup}
    shared = {"never": never, "depth": depth, "guided": guided}
    for name in chosen:
        if name in alone:
            attempt(name, alone[name])
    if any(name in shared for name in chosen):

        def open_pair() -> None:
            nonlocal pair
            pair = Pair(max(CLIENTS))

        attempt("engines", open_pair)
    for name in chosen:
        if name in shared and pair is not None:
            attempt(name, lambda name=name: shared[name](pair))


if __name__ == "__main__":
    main()
