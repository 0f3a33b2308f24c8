"""NemotronH beyond the golden tests: recurrent states go back exactly as far as a verdict says, drafters with such
states follow the text, its config dialects, and its multi-token-prediction module."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from harness import Harness, load_target, prompt_work
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import Oracle
from torch import Tensor
from torch.nn import functional

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.loader import build_target, load_weights
from outrider.drafters.base import Drafter
from outrider.engine.cache import Cache, CacheShape
from outrider.engine.request import Request, Work
from outrider.engine.runner import Runner, exact_shape
from outrider.kernels import native_library
from outrider.kernels.round import judge, write_outcome
from outrider.layers.mtp import MtpModule
from outrider.llm import total_speculation
from outrider.models.base import Mtp, Target, targets
from outrider.types import Draft, Weight

FAMILIES = ["nemotron_h", "nemotron_h_latent"]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=11, ignore_eos=True)
SMALL: dict[str, Any] = {"max_model_len": 96, "page_size": 4}
LOOKAHEAD = 3


def random_texts(count: int, length: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCAB, (count, length), generator=generator).tolist()


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


# ---- a state after any history is that of a fresh pass over the same tokens ----


class Pilot:
    """Rounds by hand, through the real cache, runner and verify: the texts are given, so that a draft is accepted
    exactly as far as the test wants. Four slots for three requests: whoever starts over moves to a used slot."""

    def __init__(self, target: Target, texts: list[list[int]], prompt_len: int) -> None:
        self.target, self.texts, self.prompt_len = target, texts, prompt_len
        max_len, page_size, num_slots = len(texts[0]) + LOOKAHEAD + 1, 4, 4
        pages = -(-max_len // page_size)
        shape = CacheShape(num_slots * pages + 1, page_size, num_slots, max_len, 0, target.hidden_size, LOOKAHEAD)
        self.cache = Cache(shape, [target], torch.device("cpu"), torch.float32)
        for layer in self.cache.recurrent:
            for states in layer.states or ():
                states.fill_(torch.nan)  # nothing that was not written may be read
        self.runner = Runner(self.cache, target.vocab_size, torch.device("cpu"))
        self.pages = [list(range(1 + slot * pages, 1 + (slot + 1) * pages)) for slot in range(num_slots)]
        self.free = list(range(num_slots))
        self.requests: list[Request] = []
        for number in range(3):
            self.requests.append(self.enter(number, prompt_len))

    def enter(self, number: int, length: int) -> Request:
        """A request over the first tokens of a text, nothing of it computed yet."""
        tokens, slot = self.texts[number][:length], self.free.pop(0)
        self.cache.admit(slot, tokens, [])
        self.cache.set_pages(slot, 0, self.pages[slot])
        return Request(f"{number}", tokens, SamplingParams(), seed=0, slot=slot)

    def start_over(self, number: int, *, keep: bool) -> None:
        """Preempted, it comes back with all it has said; finished, another one takes the same prompt."""
        request = self.requests[number]
        self.free.append(request.slot)
        self.requests[number] = self.enter(number, len(request.tokens) if keep else self.prompt_len)

    def work(self, number: int, num_rows: int, num_drafts: int) -> Work | None:
        request, text = self.requests[number], self.texts[number]
        pending = len(request.tokens) - request.num_computed
        if pending > 1:  # a chunk of the prompt
            num_rows = min(num_rows, pending)
            return prompt_work(request, request.num_computed, num_rows, emits=num_rows == pending)
        if len(request.tokens) >= len(text):
            return None
        num_drafts = min(num_drafts, request.num_drafts, len(text) - len(request.tokens) - 1)
        return Work(request, 1, num_drafts, True, request.num_computed + 1 + num_drafts)

    @torch.inference_mode()
    def step(self, plan: list[Work], next_drafts: list[int], next_right: list[int], expected: list[Tensor]) -> None:
        step = self.runner.pack(plan, exact_shape(plan, 0))
        hidden = self.target(step.batch)
        choice: list[int] = []
        for work in plan:
            text, length = self.texts[int(work.request.request_id)], len(work.request.tokens)
            choice += text[length : length + 1 + work.allowed] if work.emits else []
        verdict = judge(step, torch.tensor(choice, dtype=torch.long))
        logits = self.target.logits(hidden.last)
        tokens, counts = torch.zeros(len(plan), LOOKAHEAD, dtype=torch.long), torch.zeros(len(plan), dtype=torch.long)
        for row, work in enumerate(plan):
            request, number = work.request, int(work.request.request_id)
            begin, kept, start = int(step.batch.query_start[row]), int(verdict.kept[row]), request.num_computed
            self.compare(logits[begin : begin + kept], expected[number][start : start + kept])
            request.num_computed = start + kept
            request.tokens = self.texts[number][: len(request.tokens) + int(verdict.count[row])]
            if work.emits:  # a new draft, right as far as `next_right`
                length, count = len(request.tokens), next_drafts[number]
                draft = (self.texts[number][length:] + [0] * LOOKAHEAD)[:LOOKAHEAD]
                right = next_right[number]
                tokens[row] = torch.tensor([t if i < right else (t + 1) % tiny.VOCAB for i, t in enumerate(draft)])
                counts[row] = request.num_drafts = count
        write_outcome(step, verdict, Draft(tokens, counts))

    def compare(self, actual: Tensor, expected: Tensor) -> None:
        if native_library.library() is not None:
            assert torch.equal(actual, expected), f"differs by {(actual - expected).abs().max()}"
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


TEXT_LEN = 40
moves = st.tuples(
    st.sampled_from(["run"] * 12 + ["idle", "preempted", "finished"]),
    st.integers(1, 6),  # rows of a prompt chunk
    st.integers(0, LOOKAHEAD),  # how much of the draft is verified
    st.integers(0, LOOKAHEAD),  # tokens of the next draft
    st.integers(0, LOOKAHEAD),  # how many of them are right
)
histories = st.lists(st.tuples(moves, moves, moves), min_size=4, max_size=16)


@pytest.fixture(scope="module", params=FAMILIES)
def known(request: pytest.FixtureRequest, target_path: Callable[..., Path]) -> tuple[Target, list[list[int]]]:
    return load_target(target_path(request.param)), random_texts(3, TEXT_LEN)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(history=histories, prompt_len=st.integers(1, 9))
def test_no_history_shows_in_the_state(
    history: list[Any], prompt_len: int, known: tuple[Target, list[list[int]]], kernels: str
) -> None:
    """Any accepted lengths, rounds without a draft, chunks, preemption, new requests in used slots."""
    target, texts = known
    expected = fresh_logits(target, texts, kernels)
    pilot = Pilot(target, texts, prompt_len)
    for actions in history:
        plan = []
        for number, (kind, num_rows, num_drafts, _, _) in enumerate(actions):
            if kind in ("preempted", "finished"):
                pilot.start_over(number, keep=kind == "preempted")
            work = pilot.work(number, num_rows, num_drafts) if kind != "idle" else None
            if work is not None:
                plan.append(work)
        if plan:
            pilot.step(plan, [each[3] for each in actions], [each[4] for each in actions], expected)
    pilot.cache.free()


_fresh: dict[tuple[Target, str], list[Tensor]] = {}


def fresh_logits(target: Target, texts: list[list[int]], kernels: str) -> list[Tensor]:
    """Each text in one pass of its own."""
    if (target, kernels) not in _fresh:
        _fresh[target, kernels] = [Harness(target).run([text], len(text))[0][0] for text in texts]
    return _fresh[target, kernels]


# ---- plain = speculative ----

WAYS: dict[str, dict[str, Any]] = {
    "batch 3": {"max_num_seqs": 3},
    "batch 16": {"max_num_seqs": 16},
    "chunked prefill": {"max_num_seqs": 2, "max_num_batched_tokens": 7},
    "preemption": {"max_num_seqs": 8},  # with a small cache, below
}


def prompts_of_mixed_length(count: int) -> list[list[int]]:
    return [text[: 2 + 3 * number % 17] for number, text in enumerate(random_texts(count, 20))]


def plain(path: Path, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    with LLM(path, None, **SMALL) as llm:
        return ids(llm.generate(prompts, params))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_is_speculative(
    family: str, way: str, params: SamplingParams, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = target_path(family), prompts_of_mixed_length(10)
    expected = plain(path, prompts, params)
    truth = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    monkeypatch.setattr(Oracle, "truth", truth)
    options = {**SMALL, **WAYS[way]}
    if way == "preemption":
        with LLM(path, {"method": "oracle"}, **options) as llm:
            options["kv_cache_memory"] = llm.budget.page_bytes * 26
        options["max_model_len"] = 64
    with LLM(path, {"method": "oracle"}, **options) as llm:
        outputs = llm.generate(prompts, params)
        assert (llm.engine.scheduler.num_preemptions > 0) == (way == "preemption")
    assert ids(outputs) == expected
    total = total_speculation(outputs)
    assert 0 < total.accepted < total.drafted


# ---- a draft model with recurrent states ----


def few_words(path: Path, directory: Path) -> Path:
    """The same model, but only a few tokens ever win: models that know nothing of each other agree now and then."""
    directory.mkdir()
    tensors = load_file(path / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[torch.tensor([token not in (7, 8, 9) for token in range(len(head))])] = 0
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text((path / "config.json").read_text())
    return directory


def greedy_drafts(model: Target, text: list[int], count: int) -> list[int]:
    """What a model would draft, computed from nothing for every token."""
    drafted: list[int] = []
    for _ in range(count):
        ((logits, _),) = Harness(model).run([text + drafted], len(text) + count)
        drafted.append(int(logits[-1].argmax()))
    return drafted


@pytest.mark.parametrize("batched", [{}, {"max_num_seqs": 2, "max_num_batched_tokens": 9}], ids=["whole", "chunks"])
@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
def test_a_recurrent_draft_model_follows_the_text(
    family: str, batched: dict[str, int], target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Round by round, its drafts are those of a fresh pass over the text."""
    path = few_words(target_path(family), tmp_path / "target")
    drafter = few_words(target_path("nemotron_h", 1), tmp_path / "drafter")
    prompts = prompts_of_mixed_length(4)
    # one of them now and then goes without
    params = [replace(GREEDY, trace=True, num_speculative_tokens=0 if number == 2 else None) for number in range(4)]
    config = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}
    with LLM(path, config, **SMALL, **batched) as llm:
        outputs = llm.generate(prompts, params)
    assert ids(outputs) == plain(path, prompts, GREEDY)
    total = total_speculation(outputs)
    assert 0 < total.accepted < total.drafted
    model = load_target(drafter)
    for prompt, output in zip(prompts, outputs, strict=True):
        text = prompt + output.outputs[0].token_ids
        length = len(prompt) + 1
        for entry in output.outputs[0].trace or []:
            assert entry["draft"] == greedy_drafts(model, text[:length], len(entry["draft"]))
            length += entry["accepted"] + 1
        assert length == len(text)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_that_is_the_target_is_always_right(
    family: str, params: SamplingParams, target_path: Callable[..., Path]
) -> None:
    path = target_path(family)
    for options in ({}, {"max_num_seqs": 2, "max_num_batched_tokens": 9}):
        with LLM(path, {"method": "draft_model", "model": str(path)}, **SMALL, **options) as llm:
            total = total_speculation(llm.generate(prompts_of_mixed_length(5), params))
        assert total.accepted == total.drafted > 0


def test_in_16_bits(target_path: Callable[..., Path]) -> None:
    """Close to float32: the states are kept in it whatever the weights are."""
    path, texts = target_path("nemotron_h"), random_texts(2, 24)
    scores = []
    for dtype in ("float32", "bfloat16"):
        with LLM(path, {"method": "draft_model", "model": str(path)}, dtype=dtype, **SMALL) as llm:
            assert all(states.dtype is torch.float32 for layer in llm.engine.cache.recurrent for states in layer.states)
            outputs = llm.score(texts)
        scores.append(
            [
                [entry[token].logprob for token, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True)]
                for text, output in zip(texts, outputs, strict=True)
            ]
        )
    torch.testing.assert_close(*(torch.tensor(each) for each in scores), atol=0.2, rtol=0)


# ---- config and checkpoint dialects ----


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "gelu"),
        ("attention_bias", True),
        ("mamba_proj_bias", True),
        ("residual_in_fp32", True),
        ("sliding_window", 8),
        ("n_shared_experts", 2),
        ("time_step_limit", [0.001, float("inf")]),
        ("time_step_limit", [0.0, 0.1]),
        ("layers_block_type", ["mamba", "dense"]),
        ("hybrid_override_pattern", "MX"),
        ("hybrid_override_pattern", "M*"),  # which is not what layers_block_type says
        ("n_groups", 4),
    ],
)
def test_what_is_not_built_is_refused_by_name(key: str, value: Any, target_path: Callable[..., Path]) -> None:
    config = {**config_of(target_path("nemotron_h")), key: value}
    with pytest.raises(ValueError, match=key):
        targets["NemotronHForCausalLM"].from_config(config)


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0, "inf"], [0.0, {"__float__": "Infinity"}], None])
def test_no_limit_in_every_spelling(limit: Any, target_path: Callable[..., Path]) -> None:
    targets["NemotronHForCausalLM"].from_config({**config_of(target_path("nemotron_h")), "time_step_limit": limit})


def rewritten(path: Path, directory: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
    """A checkpoint with its config and tensors changed."""
    directory.mkdir()
    config, tensors = config_of(path), load_file(path / "model.safetensors")
    change(config, tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def logits_of(path: Path) -> Tensor:
    return Harness(load_target(path)).run(random_texts(1, 30), 30)[0][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_old_configs_give_the_same_network(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    def age(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
        config["num_hidden_layers"] = 52  # the pattern decides
        names = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
        names |= {"time_step_limit": "mamba_dt_limit", "head_dim": "attention_head_dim"}
        for new, old in names.items():
            config[old] = config.pop(new)

    path = target_path(family)
    assert torch.equal(logits_of(rewritten(path, tmp_path / "old", age)), logits_of(path))


def test_a_tied_head(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = target_path("nemotron_h")

    def untied(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()

    def tied(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]

    expected = logits_of(rewritten(path, tmp_path / "untied", untied))
    assert torch.equal(logits_of(rewritten(path, tmp_path / "tied", tied)), expected)


# ---- its multi-token-prediction module ----


def with_mtp(path: Path, directory: Path) -> Path:
    """A published checkpoint holds the module beside the model: an attention layer, then a mixture."""

    def add(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config["num_nextn_predict_layers"] = 1
        kinds = config["layers_block_type"]
        generator = torch.Generator().manual_seed(4)
        for place, kind in enumerate(["full_attention", "moe"]):
            source = f"backbone.layers.{kinds.index(kind)}."
            for name in [name for name in tensors if name.startswith(source)]:
                noise = torch.randn(tensors[name].shape, generator=generator)
                new = 1 + 0.3 * noise if "norm" in name else 0.15 * noise
                tensors[name.replace(source, f"mtp.layers.{place}.")] = new
        size = config["hidden_size"]
        tensors["mtp.layers.0.eh_proj.weight"] = 0.15 * torch.randn(size, 2 * size, generator=generator)
        for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
            tensors[f"mtp.layers.{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)

    return rewritten(path, directory, add)


class ModuleLoader(Drafter):
    """Just enough of a drafter to load a module strictly."""

    def __init__(self, mtp: Mtp) -> None:
        super().__init__()
        self.mtp = mtp
        self.module = mtp.build(0)

    def weights(self) -> dict[str, Weight]:
        return {f"module.{name}": weight for name, weight in self.mtp.weights(0, self.module).items()}

    def ignores(self, name: str) -> bool:
        return not name.startswith("mtp.")


def load_module(path: Path) -> tuple[Target, MtpModule]:
    checkpoint = open_checkpoint(path)
    target = build_target(checkpoint)
    load_weights(target, checkpoint)
    assert target.mtp is not None
    loader = ModuleLoader(target.mtp)
    load_weights(loader, checkpoint)
    checkpoint.close()
    return target, loader.module


def dense_module(path: Path, embedding: Tensor, hidden: Tensor) -> Tensor:
    """The module over a whole sequence, straight from its equations and its tensors: before the last norm."""
    config = config_of(path)
    tensors = {n.removeprefix("mtp.layers."): t for n, t in load_file(path / "model.safetensors").items()}
    eps, dim = config["layer_norm_epsilon"], config["head_dim"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * tensors[f"{name}.weight"]

    def project(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def squared(x: Tensor, name: str) -> Tensor:
        return project(project(x, f"{name}.up_proj").relu().square(), f"{name}.down_proj")

    x = project(torch.cat([norm(embedding, "0.enorm"), norm(hidden, "0.hnorm")], dim=-1), "0.eh_proj")
    normed = norm(x, "0.norm")
    q, k, v = (project(normed, f"0.mixer.{part}_proj").unflatten(-1, (-1, dim)) for part in "qkv")
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(groups, 1)) * dim**-0.5
    scores = scores.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -torch.inf)
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(groups, 1))
    x = x + project(mixed.flatten(1), "0.mixer.o_proj")

    normed = norm(x, "1.norm")
    scores = project(normed, "1.mixer.gate").sigmoid()
    choice = scores + tensors["1.mixer.gate.e_score_correction_bias"]
    if config["n_group"] > 1:
        by_group = choice.unflatten(-1, (config["n_group"], -1))
        worst = by_group.topk(2, -1).values.sum(-1) < by_group.topk(2, -1).values.sum(-1).amax(-1, keepdim=True)
        choice = by_group.masked_fill(worst[..., None], -torch.inf).flatten(-2)
    answers = []
    for row, best in zip(normed, choice.topk(config["num_experts_per_tok"], -1).indices, strict=True):
        mine = scores[len(answers), best]
        shares = mine / mine.sum() if config["norm_topk_prob"] else mine
        latent = project(row, "1.mixer.fc1_latent_proj") if config["moe_latent_size"] else row
        experts = [squared(latent, f"1.mixer.experts.{expert}") for expert in best.tolist()]
        routed = sum(share * expert for share, expert in zip(shares, experts, strict=True))
        routed = routed * config["routed_scaling_factor"]
        answers.append(project(routed, "1.mixer.fc2_latent_proj") if config["moe_latent_size"] else routed)
    return x + torch.stack(answers) + squared(normed, "1.mixer.shared_experts")


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_mtp_module(family: str, target_path: Callable[..., Path], tmp_path: Path, kernels: str) -> None:
    path = with_mtp(target_path(family), tmp_path / "mtp")
    target, module = load_module(path)
    description = target.mtp
    assert description is not None
    assert (description.num_modules, description.reads_normed, description.feeds_normed) == (1, True, True)
    assert module.head is None
    assert module.embed is None
    (text,) = random_texts(1, 20)
    hidden = torch.randn(len(text), target.hidden_size, generator=torch.Generator().manual_seed(1))
    embedding = target.embed(torch.tensor(text))
    cache = Cache(CacheShape(8, 4, 1, 24, 0, target.hidden_size), [module], torch.device("cpu"), torch.float32)
    cache.admit(0, text, [])
    cache.set_pages(0, 0, [3, 1, 2, 6, 5, 4])
    runner, request, parts = Runner(cache, target.vocab_size, torch.device("cpu")), Request("", text, GREEDY, 0), []
    request.slot = 0
    for begin in range(0, len(text), 7):
        rows = slice(begin, begin + 7)
        plan = [prompt_work(request, begin, len(text[rows]), emits=False)]
        step = runner.pack(plan, exact_shape(plan, 0))
        parts.append(module(embedding[rows], hidden[rows], step.batch))
        cache.state.computed[0] += len(text[rows])
    torch.testing.assert_close(torch.cat(parts), dense_module(path, embedding, hidden), atol=1e-4, rtol=0)
    normed = module.norm(torch.cat(parts))
    assert torch.isfinite(target.head(normed)).all()


def test_mtp_configs(target_path: Callable[..., Path]) -> None:
    config, build = config_of(target_path("nemotron_h")), targets["NemotronHForCausalLM"].from_config
    assert build(config).mtp is None
    target = build({**config, "num_nextn_predict_layers": 2})
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        _ = target.mtp
    del config["mtp_layers_block_type"]
    for pattern, length in (("*E", 2), ("*-E", 3), (None, 2)):
        target = build({**config, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": pattern})
        assert target.mtp is not None
        module = target.mtp.build(0)
        assert len(module.blocks) == length
        assert f"mtp.layers.{length - 1}.final_layernorm.weight" in target.mtp.weights(0, module)["norm.weight"].names
    target = build({**config, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "ME"})
    assert target.mtp is not None
    with pytest.raises(ValueError, match="recurrent"):
        target.mtp.build(0)
