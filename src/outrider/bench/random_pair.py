"""Targets and drafters with random weights, made where they run: enough to time a round, and good for nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.bench.shapes import SHAPES
from outrider.checkpoints.loader import building, is_for_gpu
from outrider.config import EngineConfig, SpeculativeConfig, batch_limits
from outrider.drafters.base import Drafter, drafters
from outrider.engine.cache_dtype import choose_pages
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.memory import parameter_bytes, plan_memory
from outrider.kernels.quantised import ROUNDED_TO, Kind
from outrider.layers.block import DecoderBlock
from outrider.layers.exact import make_exact
from outrider.layers.moe import route_in_one_launch
from outrider.layers.mtp import MtpModule
from outrider.layers.norm import RMSNorm, norm_on_the_way
from outrider.layers.packing import round_experts, round_matrices
from outrider.models.base import Mtp, Target, targets
from outrider.models.llama import Llama
from outrider.options import EngineOptions
from outrider.pair import demand_of
from outrider.startup import StartupTimes
from outrider.types import Weight

METHODS = ("eagle3", "p_eagle", "dflash", "mtp", "ngram")
DRAFT_VOCABULARY = 32000
NUM_MODULES = 3
NUM_BLOCK_LAYERS = 5
NUM_PARALLEL_LAYERS = 4
NO_BIAS = {"attention_bias": False, "mlp_bias": False}  # whatever the target's layers have


def shape_of(name: str) -> dict[str, Any]:
    """A config by name, or that of a directory or a file."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{name} is no config.json and none of the known shapes: {', '.join(SHAPES)}")
    return json.loads(path.read_text())


@dataclass
class Outline:
    """A checkpoint of names and shapes, without a single number."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    path: Path = Path("random")
    generation_config: dict[str, Any] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def tensor(self, name: str) -> Tensor:
        raise AssertionError("an outline has no numbers")

    def close(self) -> None:
        pass


class LlamaWithModules(Llama):
    """Llama's network with multi-token-prediction modules as other families have them."""

    @property
    def mtp(self) -> Mtp | None:
        return Mtp(NUM_MODULES, self._module, self._names, reads_normed=False, feeds_normed=False)

    def _module(self, number: int) -> MtpModule:
        norms = [RMSNorm(self.hidden_size, self.eps) for _ in range(3)]
        first = self.layers[0]
        assert isinstance(first, DecoderBlock)
        block = self.block(number, first.attention.shape, first.attention.rotary)
        return MtpModule(norms, [block], head=None, embed=None)

    def _names(self, number: int, module: MtpModule) -> dict[str, Weight]:
        return {name: Weight((f"mtp.{number}.{name}",)) for name, _ in module.named_parameters()}


def random_config(
    options: EngineOptions, shape: str, accept_length: float | None, settings: Mapping[str, Any]
) -> EngineConfig:
    """What the options of a command mean where a shape stands in for the checkpoint, and a method for the drafter.
    `settings` are those that the command decides itself."""
    if options.model is not None or options.speculative_config is not None:
        raise ValueError("--shape has random weights: leave out --model, and name the drafter's method with --draft")
    shape_of(shape)
    speculative = None
    if not options.no_draft:
        method = options.draft or METHODS[0]
        check_method(method)
        speculative = SpeculativeConfig(
            method=method,
            num_speculative_tokens=options.num_speculative_tokens or SpeculativeConfig.num_speculative_tokens,
            force=options.force,
            adaptive=not options.no_adaptive,
            synthetic_acceptance_length=accept_length,
            quantization=options.quantization,
        )
    chosen = {
        **vars(batch_limits(options.device)),
        "max_model_len": options.max_model_len,
        "enforce_eager": options.enforce_eager,
        "exact": options.exact,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "threads": options.threads,
        **settings,
    }
    return EngineConfig(shape, speculative, options.dtype, options.device, **chosen)


def random_engine(config: EngineConfig, shape: dict[str, Any], startup: StartupTimes | None = None) -> Engine:
    """The engine that `config` asks for, with the architecture of `shape` instead of a checkpoint. What its parts take
    is noted in `startup`."""
    settings, startup = config.speculative, startup or StartupTimes()
    with startup.timed("models"), building(config.torch_device, config.torch_dtype("bfloat16")):
        is_llama = targets[shape["architectures"][0]] is Llama
        target = LlamaWithModules(shape) if is_llama else targets[shape["architectures"][0]].from_config(shape)
        drafter = random_drafter(settings, target) if settings is not None else None
    choose_pages(config, target, drafter)
    budget = plan_memory(config, demand_of(target, drafter), parameter_bytes(target, drafter))
    with startup.timed("weights"):
        for module in (target, drafter):
            if module is not None:
                fill(module)
        if _has_mxfp4(shape) and is_for_gpu(next(target.parameters())):
            round_experts(target, Kind.FP4)
        if config.quantization is not None:
            round_matrices(target, rounded(config.quantization))
        if drafter is not None and settings is not None and settings.quantization is not None:
            round_matrices(drafter, rounded(settings.quantization))
    if config.exact:
        make_exact(target)
    else:
        norm_on_the_way(target)
        route_in_one_launch(target)
    with startup.timed("cache"):
        return Engine(config, target, Drafting.of(config, drafter), budget)


def _has_mxfp4(shape: dict[str, Any]) -> bool:
    """Whether its experts are published in 4 bits."""
    settings = shape.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"


def rounded(name: str) -> Kind:
    if name not in ROUNDED_TO:
        raise ValueError(f"random weights can be rounded to {' or '.join(ROUNDED_TO)}, not to {name}")
    return Kind(name)


def check_method(method: str) -> None:
    """Raises ValueError where there is no random drafter of this method."""
    if method not in METHODS:
        raise ValueError(f"no random drafter of method {method!r}; known: {', '.join(METHODS)}")


def random_drafter(settings: SpeculativeConfig, target: Target) -> Drafter:
    outlines = {"eagle3": _eagle3, "p_eagle": _p_eagle, "dflash": _dflash}
    method = settings.method or ""
    check_method(method)
    outline = outlines[method](target) if method in outlines else None
    return drafters[method].build(settings, target, outline)


def fill(module: nn.Module) -> None:
    """Small random numbers; norms are ones, so that nothing explodes."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.dtype.is_floating_point:
                parameter.zero_()  # d2t: offsets
            elif parameter.dim() == 1 and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.02)


def _layer(target: Target, width: int, name: str, *, head_norms: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder layer as wide as the target's, whose attention reads `width` numbers."""
    config = target.config
    size, inner, num_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or size // num_heads
    keys = (config.get("num_key_value_heads") or num_heads) * dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (num_heads * dim, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (size, num_heads * dim),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
    if head_norms:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return {f"{name}{key}": shape for key, shape in shapes.items()}


def _eagle3(target: Target) -> Outline:
    size, vocabulary = target.hidden_size, min(DRAFT_VOCABULARY, target.vocab_size)
    shapes = {
        "fc.weight": (size, 3 * size),
        "norm.weight": (size,),
        "lm_head.weight": (vocabulary, size),
        "d2t": (vocabulary,),
        "midlayer.hidden_norm.weight": (size,),
        **_layer(target, 2 * size, "midlayer.", head_norms=False),
    }
    config = {**target.config, **NO_BIAS, "num_hidden_layers": 1, "draft_vocab_size": vocabulary}
    return Outline({**config, "tie_word_embeddings": False}, shapes)


def _p_eagle(target: Target) -> Outline:
    """The same network with more layers, which drafts all tokens in one pass."""
    size, head = target.hidden_size, _eagle3(target)
    shapes = {name.replace("midlayer.", "layers.0."): shape for name, shape in head.shapes.items()}
    for number in range(1, NUM_PARALLEL_LAYERS):
        shapes |= _layer(target, size, f"layers.{number}.", head_norms=False)
    config = {**head.config, "num_hidden_layers": NUM_PARALLEL_LAYERS, "ptd_token_id": 0}
    return Outline(config, {**shapes, "mask_hidden": (1, 1, 3 * size)})


def _dflash(target: Target) -> Outline:
    size, count = target.hidden_size, NUM_BLOCK_LAYERS
    taps = [1 + number * (target.num_layers - 4) // (count - 1) for number in range(count)]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, count * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for number in range(count):
        shapes |= _layer(target, size, f"layers.{number}.", head_norms=True)
    details = {"mask_token_id": 0, "target_layer_ids": taps}
    config = {**target.config, **NO_BIAS, "num_hidden_layers": count, "block_size": 16, "dflash_config": details}
    return Outline({**config, "tie_word_embeddings": False}, shapes)
