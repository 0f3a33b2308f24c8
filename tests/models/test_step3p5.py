"""Step-3.5 beyond its golden tests: spellings of its config and tensors, refusals, and its multi-token-prediction
modules against a slow computation straight from their equations."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from harness import Harness, load_target, prompt_work
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.checkpoints.loader import load_weights
from outrider.engine.cache import Cache, CacheShape
from outrider.engine.request import Request
from outrider.engine.runner import Runner, exact_shape
from outrider.models.base import Target, targets
from outrider.models.step3p5 import GatedAttention, Step3p5
from outrider.sampling_params import SamplingParams
from outrider.types import Weight

PROMPT = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(3)).tolist()
NUM_LAYERS, NUM_MODULES = 4, 2
FULL, SLIDING = "full_attention", "sliding_attention"
# lists that go on for the modules, as published ones do; every entry for a module is its own
WITH_MODULES: dict[str, Any] = {
    "num_nextn_predict_layers": NUM_MODULES,
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING],
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4, 3e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 0.5],
    "swiglu_limits": [0.0, 0.0, None, 0.3, 0.1, 0.1],
    "swiglu_limits_shared": [0.4, 0.0, 0.3, 0.2, 0.0, 0.25],
}
HIDDEN, HEADS, GROUPS, DIM, INNER = 64, 6, 2, 16, 128
MODULE_SHAPES = {
    "enorm": (HIDDEN,),
    "hnorm": (HIDDEN,),
    "eh_proj": (HIDDEN, 2 * HIDDEN),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (GROUPS * DIM, HIDDEN),
    "self_attn.v_proj": (GROUPS * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "self_attn.g_proj": (HEADS, HIDDEN),
    "self_attn.q_norm": (DIM,),
    "self_attn.k_norm": (DIM,),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "transformer.shared_head.norm": (HIDDEN,),
    "transformer.shared_head.output": (tiny.VOCAB, HIDDEN),
}


class Tensors:
    """A checkpoint that lies in memory."""

    path, generation_config = Path("memory"), {}

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors

    @classmethod
    def read(cls, path: Path) -> "Tensors":
        return cls(json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors"))

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self) -> None:
        pass

    def target(self) -> Target:
        target = targets[self.config["architectures"][0]].from_config(self.config)
        load_weights(target, self)
        return target


def logits(target: Target) -> Tensor:
    ((found, _),) = Harness(target).run([PROMPT], 100)
    return found


def published(config: dict[str, Any]) -> dict[str, Any]:
    """Without what only transformers says."""
    return {key: value for key, value in config.items() if key not in ("num_key_value_heads", "pad_token_id")}


# ---- config and names ----


def test_spellings_of_the_config(target_path: Callable[..., Path]) -> None:
    flat, nested = (Tensors.read(target_path(family)) for family in ("step3p5", "step3p7"))
    expected = logits(flat.target())
    more = {
        "use_moe": True,
        "use_rope_layers": [],
        "zero_centered": True,
        "sink": False,
        "use_head_wise_attn_gate": True,
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "att_impl_type": "GQA",
        "moe_layers_enum": [1, 2, 3],
        "attention_other_setting": {**flat.config["attention_other_setting"], "true_head_dim": 16},
        "rms_norm_eps": 1e-5,
    }
    around = {"architectures": ["Step3p7ForConditionalGeneration"], "vision_config": {}}
    without_eps = {key: value for key, value in flat.config.items() if key != "rms_norm_eps"}
    for config in (
        nested.config,
        {**published(flat.config), **more},
        published(without_eps),
        {**around, "text_config": published(flat.config)},
    ):
        assert torch.equal(logits(Tensors(config, flat.tensors).target()), expected)


def test_names_inside_a_language_model(target_path: Callable[..., Path]) -> None:
    flat = Tensors.read(target_path("step3p5"))
    inner = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in flat.tensors.items()}
    assert torch.equal(logits(Tensors(flat.config, inner).target()), logits(flat.target()))


@pytest.mark.parametrize("settings", [{"attention_bias": True, "mlp_bias": True}, {"query_pre_attn_scalar": 30}])
@pytest.mark.parametrize("family", ["step3p5", "step3p7"])
def test_other_settings(family: str, settings: dict[str, Any], target_path: Callable[..., Path]) -> None:
    with torch.no_grad():
        expected = tiny.reference(family, **settings)(input_ids=torch.tensor([PROMPT])).logits[0]
    found = logits(load_target(target_path(family, **settings)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_tied_head(target_path: Callable[..., Path]) -> None:
    flat = Tensors.read(target_path("step3p5"))
    tied = {**flat.tensors, "lm_head.weight": flat.tensors["model.embed_tokens.weight"]}
    expected = logits(Tensors(flat.config, tied).target())
    assert torch.equal(logits(Tensors({**flat.config, "tie_word_embeddings": True}, tied).target()), expected)


def test_experts_by_number(target_path: Callable[..., Path]) -> None:
    """As LLM Compressor writes them. Whether they were quantised is no matter of the target's."""
    flat = Tensors.read(target_path("step3p5"))
    apart: dict[str, Tensor] = {}
    for name, tensor in flat.tensors.items():
        stacked = re.fullmatch(r"(.*\.moe)\.((?:gate|up|down)_proj\.weight)", name)
        if stacked is None:
            apart[name] = tensor
        else:
            apart |= {f"{stacked[1]}.experts.{number}.{stacked[2]}": each for number, each in enumerate(tensor)}
    config = {**flat.config, "quantization_config": {"quant_method": "compressed-tensors"}}
    assert torch.equal(logits(Tensors(config, apart).target()), logits(flat.target()))
    with pytest.raises(ValueError, match=r"moe\.experts\.0.*stacked"):
        Tensors(flat.config, apart).target()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"att_impl_type": "MFA"}, "att_impl_type"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
        ({"gating": "per-channel"}, "gating"),
        ({"use_qk_norm": False}, "use_qk_norm"),
        ({"zero_centered": False}, "zero_centered"),
        ({"sink": True}, "sink"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"use_rope_layers": [True, False, True, True]}, "use_rope_layers"),
        ({"use_moe": False}, "use_moe"),
        ({"use_moe_router_bias": False}, "use_moe_router_bias"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": [FULL] * 3}, "layer_types has 3 entries, none of them for layer 3"),
        ({"layer_types": None}, "layer_types"),
        ({"moe_layers_enum": None}, "moe_layers_enum"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4 contradicts num_attention_groups = 2"),
        ({"per_layer_config": {"1": {"num_attention_heads": 5}}}, "per_layer_config of layer 1"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config of layer 1"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}, FULL),
        ({"attention_other_setting": {"num_attention_heads": 6, "head_dim": 16, "true_head_dim": 8}}, "true_head_dim"),
    ],
)
def test_refused(changes: dict[str, Any], named: str) -> None:
    config = {**tiny.COMMON, **tiny.STEP, **changes}
    with pytest.raises(ValueError, match=named):
        Step3p5(config)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.moe.gate_proj.weight", (8, 31, 64)),
        ("model.layers.1.moe.up_proj.weight", (7, 32, 64)),
        ("model.layers.2.moe.up_proj.weight", (8,)),
        ("model.layers.2.moe.down_proj.weight", (8, 32, 64)),
        ("model.layers.3.moe.router_bias", None),
        ("model.layers.1.share_expert.up_proj.weight", None),
        ("model.layers.0.self_attn.g_proj.weight", (6, 64)),
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(
    name: str, shape: tuple[int, ...] | None, target_path: Callable[..., Path]
) -> None:
    flat = Tensors.read(target_path("step3p5"))
    del flat.tensors[name]
    if shape is not None:
        flat.tensors[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=re.escape(name)):
        flat.target()


# ---- multi-token prediction ----


class Modules(nn.Module):
    """Loads the modules as a drafter would: strictly, and nothing but them."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        assert target.mtp is not None
        self.mtp = target.mtp
        self.prefixes = tuple(f"model.layers.{NUM_LAYERS + index}." for index in range(self.mtp.num_modules))
        self.each = nn.ModuleList(self.mtp.build(index) for index in range(self.mtp.num_modules))

    def weights(self) -> dict[str, Weight]:
        return {
            f"each.{index}.{name}": weight
            for index, module in enumerate(self.each)
            for name, weight in self.mtp.weights(index, module).items()
        }

    def canonical(self, name: str) -> str:
        return name

    def ignores(self, name: str) -> bool:
        return not name.startswith(self.prefixes)


@pytest.fixture
def checkpoint(target_path: Callable[..., Path]) -> Tensors:
    """A tiny target with the tensors of two modules after its own."""
    flat = Tensors.read(target_path("step3p5", **WITH_MODULES))
    generator = torch.Generator().manual_seed(9)
    for index in range(NUM_MODULES):
        for name, shape in MODULE_SHAPES.items():
            scale = 0.3 if "norm" in name else 0.15
            noise = scale * torch.randn(shape, generator=generator)
            flat.tensors[f"model.layers.{NUM_LAYERS + index}.{name}.weight"] = noise
    return flat


def test_the_target_is_the_same_with_modules_beside_it(checkpoint: Tensors, target_path: Callable[..., Path]) -> None:
    assert torch.equal(logits(checkpoint.target()), logits(load_target(target_path("step3p5"))))


def test_modules_that_the_config_does_not_mention_are_surplus(checkpoint: Tensors) -> None:
    checkpoint.config["num_nextn_predict_layers"] = 1
    with pytest.raises(ValueError, match=r"nothing uses.*model\.layers\.5\."):
        checkpoint.target()


def test_no_modules(target_path: Callable[..., Path]) -> None:
    assert load_target(target_path("step3p5")).mtp is None


def test_modules_have_seventeen_tensors_each(checkpoint: Tensors) -> None:
    modules = Modules(checkpoint.target())
    for index, module in enumerate(modules.each):
        weights = modules.mtp.weights(index, module)
        names = [name for weight in weights.values() for name in weight.names]
        assert sorted(names) == sorted(f"model.layers.{4 + index}.{part}.weight" for part in MODULE_SHAPES)
        assert len(names) == len(set(names)) == 17


def test_modules_of_a_config_that_transformers_wrote(target_path: Callable[..., Path]) -> None:
    # transformers keeps one rope of each type of layer, so what the list says of modules must agree with the others
    same = {"rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0]}
    target = load_target(target_path("step3p7", **{**WITH_MODULES, **same}))
    for module in Modules(target).each:
        attention = module.blocks[0].attention
        assert isinstance(attention, GatedAttention)
        assert (attention.shape.num_heads, attention.shape.window) == (HEADS, 8)
        assert attention.rotary is target.layers[1].attention.rotary


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.4.eh_proj.weight", None),
        ("model.layers.5.transformer.shared_head.output.weight", None),
        ("model.layers.5.self_attn.g_proj.weight", (4, 64)),
        ("model.layers.4.transformer.shared_head.norm.weight", (63,)),
        ("model.layers.4.self_attn.q_proj.weight", (64, 64)),
        ("model.layers.5.mlp.extra_proj.weight", (64, 64)),
    ],
)
def test_a_tensor_of_a_module_is_named(name: str, shape: tuple[int, ...] | None, checkpoint: Tensors) -> None:
    modules = Modules(checkpoint.target())
    checkpoint.tensors.pop(name, None)
    if shape is not None:
        checkpoint.tensors[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=re.escape(name)):
        load_weights(modules, checkpoint)


@torch.inference_mode()
def run_modules(target: Target, modules: Modules, chunk: int) -> list[tuple[Tensor, Tensor]]:
    """Every module's output and logits over the prompt, through a small cache, in chunks."""
    pages = -(-len(PROMPT) // 4)
    shape = CacheShape(pages + 1, 4, 1, 4 * pages, 0, HIDDEN)
    cache = Cache(shape, [target, modules], torch.device("cpu"), torch.float32)
    runner = Runner(cache, tiny.VOCAB, torch.device("cpu"))
    cache.admit(0, PROMPT, [])
    cache.set_pages(0, 0, list(range(pages, 0, -1)))
    request = Request("0", list(PROMPT), SamplingParams(), seed=0, slot=0)

    def steps() -> Iterator[tuple[slice, Any]]:
        cache.state.computed.zero_()
        for start in range(0, len(PROMPT), chunk):
            count = min(chunk, len(PROMPT) - start)
            plan = [prompt_work(request, start, count, emits=True)]
            step = runner.pack(plan, exact_shape(plan, 0))
            yield slice(start, start + count), step.batch
            cache.state.computed[step.batch.slots] += step.num_rows

    hidden = torch.cat([target(batch).last for _, batch in steps()])
    mtp = modules.mtp
    assert (mtp.reads_normed, mtp.feeds_normed, mtp.chained, mtp.zero_first_embedding) == (False, False, True, None)
    found = []
    for index, module in enumerate(modules.each):
        tokens = torch.tensor(PROMPT).roll(-1 - index)  # the last rows, whose token is not known, are left out below
        embedding = target.embed(tokens)
        hidden = torch.cat([module(embedding[rows], hidden[rows], batch) for rows, batch in steps()])
        head = module.head(module.norm(hidden))
        found.append((hidden[: -1 - index], head[: -1 - index]))
    return found


def slow_module(checkpoint: Tensors, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Module `index` over hidden states [n, H], row after row and head after head."""
    number, config = NUM_LAYERS + index, checkpoint.config

    def weight(name: str) -> Tensor:
        return checkpoint.tensors[f"model.layers.{number}.{name}.weight"].double()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight(name))

    def turn(x: Tensor, position: int) -> Tensor:
        size = int(DIM * config["partial_rotary_factors"][number])
        turned = x.clone()
        for pair in range(size // 2):
            angle = position * config["rope_theta"][number] ** (-2 * pair / size)
            a, b = x[pair], x[pair + size // 2]
            turned[pair] = a * math.cos(angle) - b * math.sin(angle)
            turned[pair + size // 2] = a * math.sin(angle) + b * math.cos(angle)
        return turned

    tokens = PROMPT[1 + index :]
    rows = [
        weight("eh_proj")
        @ torch.cat(
            [
                norm(checkpoint.tensors["model.embed_tokens.weight"].double()[token], "enorm"),
                norm(before, "hnorm"),
            ]
        )
        for token, before in zip(tokens, hidden, strict=False)
    ]
    inputs = [norm(row, "input_layernorm") for row in rows]
    queries, keys, values = (
        [(weight(f"self_attn.{part}_proj") @ x).view(-1, DIM) for x in inputs] for part in ("q", "k", "v")
    )
    outputs = []
    for here, row in enumerate(rows):
        seen = range(max(0, here - config["sliding_window"] + 1), here + 1)
        gates = 1 / (1 + torch.exp(-(weight("self_attn.g_proj") @ inputs[here])))
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            query = turn(norm(queries[here][head], "self_attn.q_norm"), here)
            turned = [turn(norm(keys[there][group], "self_attn.k_norm"), there) for there in seen]
            shares = torch.stack([query @ key / math.sqrt(DIM) for key in turned]).softmax(0)
            attended = sum(share * values[there][group] for share, there in zip(shares, seen, strict=True))
            heads.append(gates[head] * attended)
        x = row + weight("self_attn.o_proj") @ torch.cat(heads)
        normed = norm(x, "post_attention_layernorm")
        gate, up = weight("mlp.gate_proj") @ normed, weight("mlp.up_proj") @ normed
        limit = config["swiglu_limits_shared"][number] or math.inf
        inner = (gate / (1 + torch.exp(-gate))).clamp(max=limit) * up.clamp(-limit, limit)
        outputs.append(x + weight("mlp.down_proj") @ inner)
    output = torch.stack(outputs)
    return output, norm(output, "transformer.shared_head.norm") @ weight("transformer.shared_head.output").T


@pytest.mark.parametrize("chunk", [100, 7, 1])
def test_modules_against_their_equations(chunk: int, checkpoint: Tensors, kernels: str) -> None:
    target = checkpoint.target()
    modules = Modules(target)
    load_weights(modules, checkpoint)
    ((_, taps),) = Harness(target).run([PROMPT], 100)
    hidden = taps[:, -1].double()  # after the last layer, before the final norm
    for index, (found, found_logits) in enumerate(run_modules(target, modules, chunk)):
        hidden, expected = slow_module(checkpoint, index, hidden)
        assert expected.std() > 0.3
        torch.testing.assert_close(found.double(), hidden, atol=1e-4, rtol=0)
        torch.testing.assert_close(found_logits.double(), expected, atol=1e-4, rtol=0)
