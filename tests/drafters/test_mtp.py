"""MTP drafts against a slow reference that recomputes everything, and the modules' pages against those of a fresh run,
whatever was accepted, however the text came in."""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mtp_reference as slow
import pytest
import tiny
import torch
from harness import Harness, load_target
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mtp_checkpoints import with_modules
from safetensors.torch import load_file, save_file
from samples import told
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.drafters.mtp import MultiTokenPrediction
from outrider.engine.pages import PagePool
from outrider.engine.policy import FixedDepth
from outrider.layers.cached import cached_layers
from outrider.matrix import support_matrix
from outrider.types import Draft, Hidden, Step, Verdict

GREEDY = SamplingParams(max_tokens=44, temperature=0, ignore_eos=True)
MAX_LEN = 128
Text = tuple[int, ...]
Override = Callable[[Step, Draft], Draft]


class Sample:
    """A tiny target with modules, what it says by itself, and the slow reference of its drafts."""

    def __init__(self, family: str, path: Path, num_modules: int) -> None:
        self.path, self.num_modules = path, num_modules
        self.plain = LLM(path, None, max_model_len=MAX_LEN)
        self.target = load_target(path)
        self.modules = slow.FAMILIES[family](path)
        self.states, self.draft = cache(self._states), cache(self._draft)

    @torch.no_grad()
    def _states(self, text: Text) -> Tensor:
        """What module 0 takes of the target, [n, H]."""
        ((_, taps),) = Harness(self.target).run([list(text)], 200)
        return self.target.norm(taps[:, -1]) if self.modules.reads_normed else taps[:, -1]

    def say(self, prompts: list[list[int]], num_tokens: int = 44) -> list[list[int]]:
        """The prompts, and what the target alone goes on to say."""
        outputs = self.plain.generate(prompts, replace(GREEDY, max_tokens=num_tokens))
        return [prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]

    def _draft(self, text: Text, whole: Text, count: int, lookahead: int, chained: bool) -> slow.Drafted:
        num_modules = min(self.num_modules, lookahead)
        hidden = self.states(whole)[: len(text) - 1]
        return slow.draft(self.modules, num_modules, text, hidden, count, chained=chained)


@pytest.fixture(scope="module")
def sample(target_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Sample]:
    @cache
    def make(family: str, num_modules: int) -> Sample:
        directory = tmp_path_factory.mktemp("mtp") / "target"
        return Sample(family, with_modules(target_path(family), directory, num_modules), num_modules)

    return make


class Watch:
    """Notes what a drafter proposes after every text, and the modules' entries after every step."""

    def __init__(self, llm: LLM, override: Override | None = None) -> None:
        assert isinstance(llm.drafter, MultiTokenPrediction)
        self.llm, self.drafter, self.override = llm, llm.drafter, override
        self.drafts: dict[Text, list[tuple[list[int], Tensor]]] = defaultdict(list)
        self.entries: list[tuple[Text, list[Tensor]]] = []
        self._logits: list[Tensor] = []
        self._propose, self._own_logits = llm.drafter.propose, llm.drafter.logits
        llm.drafter.propose = self.propose  # type: ignore[method-assign]
        llm.drafter.logits = self.logits  # type: ignore[method-assign]

    def logits(self, place: int, fed: Tensor) -> Tensor:
        self._logits.append(self._own_logits(place, fed))
        return self._logits[-1]

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        self._logits = []
        draft = self._propose(step, hidden, verdict)
        assert len(self._logits) == step.depth
        for row, slot in enumerate(step.batch.slots.tolist()):
            if step.emits[row] and step.depth:
                text = tuple(step.state.tokens[slot, : step.state.lengths[slot]].tolist())
                logits = torch.stack([each[row] for each in self._logits])
                self.drafts[text].append((draft.tokens[row, : step.depth].tolist(), logits))
        return draft if self.override is None or not step.depth else self.override(step, draft)

    def look(self, *_: int) -> None:
        """Copies of all modules' entries of the running requests."""
        for request in self.llm.engine.scheduler.running:
            parts = []
            for place in range(self.drafter.num_modules):
                end = min(len(request.tokens), request.num_computed + 1 + place)
                if request.num_followed < request.num_computed:  # what comes later, it has yet to see
                    end = request.num_followed
                for layer in cached_layers(self.drafter.module(place)):
                    assert layer.pages is not None
                    both = [part[request.pages].flatten(0, 1)[1 + place : end].flatten(1) for part in layer.pages]
                    parts.append(torch.cat(both, dim=1))
            self.entries.append((tuple(request.tokens), parts))

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Text]:
        outputs = self.llm.generate(prompts, params, on_step=self.look)
        return [(*prompt, *output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]

    def check(self, sample: Sample, texts: list[Text], chained: bool = True, tolerance: float = 0.0) -> None:
        """Entries are the same to the last bit where kernels do not care how many rows are computed together."""
        fresh = entries_of(sample, texts, self.drafter.lookahead, chained)
        for text, found in self.drafts.items():
            whole = next(each for each in texts if each[: len(text)] == text)
            for tokens, logits in found:
                expected = sample.draft(text, whole, len(tokens), self.drafter.lookahead, chained)
                assert tokens == expected.tokens, f"after {len(text)} tokens"
                torch.testing.assert_close(logits, torch.stack(expected.logits), atol=1e-4, rtol=0)
        for text, parts in self.entries:
            whole = next(each for each in texts if each[: len(text)] == text)
            for number, (part, expected) in enumerate(zip(parts, fresh[whole], strict=True)):
                same = torch.allclose(part, expected[: len(part)], atol=tolerance, rtol=0)
                assert same, f"entries {number} after {len(text)} tokens"


def entries_of(sample: Sample, texts: list[Text], lookahead: int, chained: bool) -> dict[Text, list[Tensor]]:
    """The modules' entries of texts that came in alone, each as one prompt."""
    with open_llm(sample, lookahead, chained, enable_prefix_caching=False) as llm:
        watch = Watch(llm)
        for text in texts:
            watch.generate([list(text)], replace(GREEDY, max_tokens=2))
    return {text[:-1]: parts for text, parts in watch.entries}


def open_llm(sample: Sample, lookahead: int, chained: bool = True, **options: Any) -> LLM:
    config = {"method": "mtp", "num_speculative_tokens": lookahead, "adaptive": False}
    llm = LLM(sample.path, config, **{"max_model_len": MAX_LEN, **options})
    assert isinstance(llm.drafter, MultiTokenPrediction)
    llm.drafter.mtp = replace(llm.drafter.mtp, chained=chained)
    return llm


def accepting(mode: str, truth: list[list[int]], lookahead: int) -> Override | None:
    """Random modules are always wrong; so that drafts are accepted, others are put in their place."""
    if mode == "own":
        return None

    def override(step: Step, own: Draft) -> Draft:
        skill = 1.0 if mode == "true" else 0.7
        other = told(step, truth, lookahead, skill, tiny.VOCAB)
        return Draft(other.tokens, own.count if mode == "true" else other.count)

    return override


PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [50, 60, 70], [99]]


@pytest.mark.parametrize(
    ("family", "num_modules", "lookahead", "mode"),
    [
        ("deepseek_v3", 1, 4, "mixed"),
        ("deepseek_v3", 2, 5, "mixed"),  # the modules take turns
        ("nemotron_h", 1, 3, "mixed"),
        ("step3p5", 3, 3, "own"),
        ("step3p5", 3, 3, "true"),
        ("step3p5", 3, 7, "mixed"),
        ("step3p5", 3, 2, "mixed"),  # the third has no use
    ],
)
def test_drafts_and_pages(
    family: str, num_modules: int, lookahead: int, mode: str, sample: Callable[..., Sample]
) -> None:
    check_drafts_and_pages(sample(family, num_modules), lookahead, mode, tolerance=0.0)


@pytest.mark.parametrize("kernels", ["reference"], indirect=True)
def test_with_slow_kernels(kernels: str, sample: Callable[..., Sample]) -> None:
    check_drafts_and_pages(sample("step3p5", 3), 4, "mixed", tolerance=1e-5)


def check_drafts_and_pages(made: Sample, lookahead: int, mode: str, tolerance: float) -> None:
    truth = made.say(PROMPTS)
    with open_llm(made, lookahead, page_size=4, snapshot_interval=4) as llm:
        watch = Watch(llm, accepting(mode, truth, lookahead))
        texts = watch.generate(PROMPTS, GREEDY)
        again = watch.generate(PROMPTS, GREEDY)
        scheduler = llm.engine.scheduler
        assert scheduler.prefixes.stats.hit > 0
    assert texts == again == [tuple(each) for each in truth]
    assert len(watch.drafts) > 30
    assert len(watch.entries) > 60
    watch.check(made, texts, tolerance=tolerance)


ways = st.fixed_dictionaries(
    {
        "family": st.sampled_from(["step3p5", "deepseek_v3"]),
        "chained": st.booleans(),
        "lookahead": st.sampled_from([1, 2, 3, 5]),
        "page_size": st.sampled_from([1, 2, 3, 4, 16]),
        "max_num_seqs": st.integers(1, 4),
        "chunk": st.sampled_from([1, 2, 3, 5, 64]),
        "mode": st.sampled_from(["own", "mixed", "true"]),
        "tight": st.booleans(),
        # length, another ending, tokens wanted, limit on drafts
        "prompts": st.lists(
            st.tuples(st.integers(1, 17), st.integers(0, 2), st.integers(1, 9), st.sampled_from([None, 0, 1, 2])),
            min_size=1,
            max_size=4,
        ),
    }
)


# pages smaller than the number of modules, chunks of one or two rows, several requests with much in common
HARD: dict[str, Any] = {
    "family": "step3p5",
    "chained": True,
    "lookahead": 3,
    "page_size": 2,
    "max_num_seqs": 3,
    "chunk": 2,
    "mode": "mixed",
    "tight": False,
    "prompts": [(9, 0, 9, None), (9, 1, 6, 1), (12, 2, 9, None), (3, 1, 5, 0)],
}


@example(way=HARD)
@example(way={**HARD, "page_size": 1, "chunk": 1, "max_num_seqs": 1, "family": "deepseek_v3"})
@example(way={**HARD, "tight": True, "max_num_seqs": 4, "chunk": 64, "lookahead": 5, "mode": "true"})
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(way=ways)
def test_any_way_through_the_cache(way: dict[str, Any], sample: Callable[..., Sample]) -> None:
    """Small chunks, small pages, prefix hits, preemption, requests that come and go."""
    made, lookahead, chained = sample(way["family"], 3), way["lookahead"], way["chained"]
    common = list(range(30, 60))
    prompts = [common[:length] + [number] * number for length, number, *_ in way["prompts"]]
    params = [replace(GREEDY, max_tokens=count, num_speculative_tokens=k) for *_, count, k in way["prompts"]]
    said = made.say(prompts, 9)
    texts = [text[: len(p) + (each.max_tokens or 0)] for text, p, each in zip(said, prompts, params, strict=True)]
    more = [prompts[0], texts[0] + [5, 6, 7], texts[-1]]  # the same again, and what came out goes on
    truth = texts + made.say(more, 9)
    with open_llm(made, lookahead, chained, page_size=way["page_size"], max_num_seqs=way["max_num_seqs"]) as llm:
        scheduler = llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, max_num_batched_tokens=way["chunk"])
        if way["tight"]:
            longest = max(len(text) for text in truth) + 1 + lookahead
            scheduler.pool = scheduler.prefixes.pool = PagePool(1 + -(-longest // way["page_size"]) + 2)
        watch = Watch(llm, accepting(way["mode"], truth, lookahead))
        assert watch.generate(prompts, params) == [tuple(text) for text in texts]
        assert watch.generate(more, replace(GREEDY, max_tokens=9)) == [tuple(text) for text in truth[len(texts) :]]
        if way == HARD:
            assert scheduler.prefixes.stats.hit > 40
        if way["tight"] and len(way["prompts"]) == way["max_num_seqs"] == 4:
            assert scheduler.num_preemptions > 0
    watch.check(made, [tuple(text) for text in truth], chained)


def test_up_to_the_end_of_the_context(sample: Callable[..., Sample]) -> None:
    """Modules look further ahead than the text may grow."""
    made = sample("step3p5", 3)
    for lookahead, mode in ((1, "true"), (3, "true"), (4, "mixed")):
        with open_llm(made, lookahead, page_size=2, max_model_len=30) as llm:
            truth = [text[:30] for text in made.say(PROMPTS)]
            watch = Watch(llm, accepting(mode, truth, lookahead))
            assert watch.generate(PROMPTS, GREEDY) == [tuple(text) for text in truth]
        watch.check(made, [tuple(text) for text in truth])


def test_pages_are_found_again_as_often_as_without_a_drafter(sample: Callable[..., Sample]) -> None:
    made, prompt = sample("step3p5", 3), list(range(20, 61))
    params, cached = replace(GREEDY, trace=True, max_tokens=20), {}
    for method in (None, {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}):
        with LLM(made.path, method, max_model_len=MAX_LEN, page_size=2) as llm:
            first, second = (llm.generate([prompt], params)[0] for _ in range(2))
            third = llm.generate([prompt + first.outputs[0].token_ids], params)[0]
        assert first.outputs[0].trace == second.outputs[0].trace
        cached[str(method)] = [second.num_cached_tokens, third.num_cached_tokens]
    assert len(set(map(str, cached.values()))) == 1, cached
    assert cached["None"] == [40, 60]


# ---- loading ----


def load(path: Path, **settings: Any) -> LLM:
    return LLM(path, {"method": "mtp", **settings}, max_model_len=64)


def test_only_targets_with_modules(sample: Callable[..., Sample], target_path: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no multi-token-prediction modules"):
        load(target_path("llama"))
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        load(target_path("step3p5"))
    with pytest.raises(ValueError, match=r"nothing below model\.layers\.4\., .* left them out"):
        load(target_path("deepseek_v3"))  # transformers saves the config of modules, and none of their tensors
    with pytest.raises(ValueError, match="remove taps"):
        load(sample("step3p5", 3).path, taps=[2])
    suited = {cell.target for cell in support_matrix() if cell.drafter == "mtp" and cell.supported}
    families = ("deepseek_v3", "nemotron_h", "step3p5", "step3p7")
    assert suited == {tiny.FAMILIES[family].registered for family in families}


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("step3p5", "model.layers.4.eh_proj.weight", None),
        ("step3p5", "model.layers.6.transformer.shared_head.output.weight", None),
        ("step3p5", "model.layers.5.self_attn.q_proj.weight", (64, 64)),
        ("step3p5", "model.layers.6.mystery.weight", (3,)),
        ("deepseek_v3", "model.layers.4.shared_head.norm.weight", None),
        ("deepseek_v3", "model.layers.4.shared_head.mystery.weight", (3,)),
        ("nemotron_h", "mtp.layers.1.mixer.gate.weight", (5, 64)),
        ("nemotron_h", "mtp.layers.2.norm.weight", (64,)),
    ],
)
def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(
    family: str, name: str, shape: tuple[int, ...] | None, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = with_modules(target_path(family), tmp_path / "target")
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(name)):
        load(path)
    LLM(path, None, max_model_len=64).close()  # the target alone takes no notice


def test_modules_from_another_checkpoint(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Modules may be published apart, under the same names."""
    one, other = (with_modules(target_path("step3p5"), tmp_path / str(seed), seed=seed) for seed in (8, 9))
    traces = []
    params = replace(GREEDY, trace=True, max_tokens=8)
    for path, model in ((one, None), (other, None), (one, str(other)), (one, str(one))):
        with load(path, num_speculative_tokens=3, model=model) as llm:
            traces.append(llm.generate([[5, 6, 7]], params)[0].outputs[0].trace)
    assert traces[0] == traces[3] != traces[1] == traces[2]


def test_combined_with_a_method_that_drafts_from_text(sample: Callable[..., Sample]) -> None:
    made = sample("step3p5", 3)
    with LLM(made.path, {"method": "ngram+mtp"}, max_model_len=MAX_LEN) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [p + o.outputs[0].token_ids for p, o in zip(PROMPTS, outputs, strict=True)] == made.say(PROMPTS)


def test_provenance(sample: Callable[..., Sample]) -> None:
    with load(sample("step3p5", 3).path, num_speculative_tokens=2) as llm:
        assert llm.drafter is not None
        found = llm.drafter.provenance()
    assert found["modules"].value == 2
    assert "num_speculative_tokens" in found["modules"].source
    assert found["state of the target"].value == found["state fed on"].value.replace("the module's", "its final")
    assert found["head"].value == "each module's own"


def traces(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS[1:], replace(GREEDY, max_tokens=12, trace=True))
    return [output.outputs[0].trace for output in outputs]


def test_the_first_embedding_is_zeroed_or_kept(sample: Callable[..., Sample], tmp_path: Path) -> None:
    """Engines differ: this is a reading, and a key of config.json; both are what the reference does."""
    made = sample("deepseek_v3", 1)
    kept = shutil.copytree(made.path, tmp_path / "kept")
    config = json.loads((kept / "config.json").read_text())
    (kept / "config.json").write_text(json.dumps({**config, "mtp_zero_first_embedding": False}))
    options: dict[str, Any] = {"max_model_len": MAX_LEN, "enable_prefix_caching": False}
    with LLM(made.path, {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}, **options) as llm:
        assert llm.drafter is not None
        assert llm.drafter.provenance()["first embedding"].value == "zeroed"
        (reading,) = llm.drafter.readings()
        assert '"mtp_zero_first_embedding": false' in reading.advice
        found = {"zeroed": traces(llm)}
        other = reading.apply(llm.drafter)
        assert [each.name for each in other.readings()] == ["first embedding zeroed"]
        with llm.engine.drafting_with(FixedDepth(3), other):
            found["kept"] = traces(llm)
        assert traces(llm) == found["zeroed"]
    with LLM(kept, {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}, **options) as llm:
        assert llm.drafter is not None
        assert llm.drafter.provenance()["first embedding"].value == "kept"
        assert traces(llm) == found["kept"]
    assert found["kept"] != found["zeroed"]
    modules = slow.Deepseek(made.path)
    for way, of_prompts in found.items():
        modules.zero_first = way == "zeroed"
        for text, prompt, trace in zip(made.say(PROMPTS[1:], 12), PROMPTS[1:], of_prompts, strict=True):
            length, states = len(prompt) + 1, made.states(tuple(text))
            for entry in trace:
                count = len(entry["draft"])
                if count:
                    expected = slow.draft(modules, 1, text[:length], states[: length - 1], count)
                    assert entry["draft"] == expected.tokens
                length += entry["accepted"] + 1


def test_where_all_engines_agree_there_is_nothing_to_try(sample: Callable[..., Sample]) -> None:
    with load(sample("step3p5", 3).path, num_speculative_tokens=2) as llm:
        assert llm.drafter is not None
        assert llm.drafter.readings() == []
        assert "first embedding" not in llm.drafter.provenance()
