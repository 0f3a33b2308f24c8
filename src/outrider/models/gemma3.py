"""Gemma 3, by itself or as the text part of a multimodal checkpoint: sandwich norms, most layers with a window, and
different rotary frequencies for layers with and without one."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from outrider.kernels.activation import GATED, Activation
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.embedding import Embedding, Head
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.layers.sandwich import SandwichBlock, sandwich_weights
from outrider.models.base import Target, Vision, nested_text, refuse, require, targets
from outrider.types import Weight

FULL, SLIDING = "full_attention", "sliding_attention"
# Published configs leave out what equals these.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
IMAGE_TOKENS = {"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000}


def gated_activation(config: Mapping[str, Any]) -> Activation:
    name = config["hidden_activation"]
    if name not in GATED:
        raise ValueError(f"config.json: hidden_activation {name!r} is not supported; known: {', '.join(GATED)}")
    return GATED[name]


def rope_parameters(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rotary settings as the config gives them, for each kind of layer."""
    given = config.get("rope_parameters") or {}
    unknown = given.keys() - {FULL, SLIDING}
    if unknown:
        raise ValueError(f"config.json: rope_parameters must hold {FULL!r} and {SLIDING!r}, not {sorted(unknown)}")
    return {kind: settings for kind, settings in given.items() if settings}


@targets.register("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
class Gemma3(Target):
    defaults = DEFAULTS
    ignored = (*Target.ignored, r"^(model\.)?(vision_tower|multi_modal_projector)\.")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(self.settings(config))
        self._vision = self.find_vision(config) if "vision_config" in config else None
        config = self.config
        # set to null is not left out
        require(config, *(key for key in self.defaults if key != "sliding_window"))
        self.check()
        self.embed = self.embedding()
        self.kinds = self.layer_kinds()
        self.layers = self.build_layers()
        self.norm = self.norm_of(config["hidden_size"])
        self.head = Head(
            config["vocab_size"],
            config["hidden_size"],
            tied=self.embed if config["tie_word_embeddings"] else None,
            softcap=config.get("final_logit_softcapping") or 0.0,
        )

    def settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """The language model's config, with what it leaves out."""
        return {**self.defaults, **nested_text(config)}

    def check(self) -> None:
        """Refuses what is not built."""
        refuse(self.config, "attn_logit_softcapping")
        refuse(self.config, "use_bidirectional_attention", False)
        refuse(self.config, "partial_rotary_factor", 1.0)

    def embedding(self) -> Embedding:
        hidden_size = self.config["hidden_size"]
        return Embedding(self.config["vocab_size"], hidden_size, scale=hidden_size**0.5)

    def norm_of(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config["rms_norm_eps"], offset=1.0)

    def layer_kinds(self) -> list[str]:
        """FULL or SLIDING for every layer: `layer_types`, or one full layer in every `sliding_window_pattern`."""
        num_layers, pattern = self.config["num_hidden_layers"], self.config.get("sliding_window_pattern") or 6
        kinds = self.config.get("layer_types") or [
            FULL if number % pattern == 0 else SLIDING for number in range(1, num_layers + 1)
        ]
        if set(kinds) - {FULL, SLIDING} or len(kinds) != num_layers:
            raise ValueError(
                f"config.json: layer_types must hold {FULL!r} or {SLIDING!r} for each of the {num_layers} layers "
                f"(num_hidden_layers), not {len(kinds)} entries of {sorted(set(kinds))}"
            )
        return list(kinds)

    def build_layers(self) -> nn.ModuleList:
        rotaries = {kind: self.rotary(kind, self.config["head_dim"]) for kind in (FULL, SLIDING)}
        return nn.ModuleList(self.block(kind, rotaries[kind]) for kind in self.kinds)

    def rotary(self, kind: str, head_dim: int) -> Rotary:
        settings = self.rotary_settings()[kind]
        if settings.get("rope_type") != "proportional":  # which knows how to turn a part of the head
            refuse(settings, "partial_rotary_factor", 1.0)
        lengths = {"max_position_embeddings": self.config["max_position_embeddings"]}
        return Rotary.from_config({**lengths, "rope_parameters": settings}, head_dim)

    def rotary_settings(self) -> dict[str, dict[str, Any]]:
        """rope_parameters of both kinds of layers. Older configs have `rope_theta` and `rope_scaling`, which are those
        of full attention, and `rope_local_base_freq`."""
        config = self.config
        given = rope_parameters(config)
        full = {"rope_theta": config.get("rope_theta") or 1e6, **given.get(FULL, {})}
        sliding = {"rope_theta": config.get("rope_local_base_freq") or 1e4, **given.get(SLIDING, {})}
        return {FULL: {**full, **(config.get("rope_scaling") or {})}, SLIDING: sliding}

    def block(self, kind: str, rotary: Rotary) -> SandwichBlock:
        config, hidden_size = self.config, self.config["hidden_size"]
        shape = AttentionShape(
            hidden_size=hidden_size,
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            window=self.window(kind),
            scale=config["query_pre_attn_scalar"] ** -0.5,
            bidirectional=self.vision is not None,
            qkv_bias=bool(config.get("attention_bias", False)),
            output_bias=bool(config.get("attention_bias", False)),
            head_norm_eps=config["rms_norm_eps"],
            head_norm_offset=1.0,
        )
        norms = [self.norm_of(hidden_size) for _ in range(4)]
        return SandwichBlock(SelfAttention(shape, rotary), self.mlp(config["intermediate_size"]), norms)

    def window(self, kind: str) -> int:
        return require(self.config, "sliding_window")[0] if kind == SLIDING else 0

    def mlp(self, width: int) -> GatedMLP:
        return GatedMLP(self.config["hidden_size"], width, activation=gated_activation(self.config))

    @property
    def vision(self) -> Vision | None:
        return self._vision

    def find_vision(self, config: dict[str, Any]) -> Vision:
        """config.json as a whole: the ids that stand around and for an image are not the language model's."""
        image, begin, end = (config.get(key, usual) for key, usual in IMAGE_TOKENS.items())
        return Vision(
            image_token=image,
            marker=begin,
            expand=lambda count, text_of: f"\n\n{text_of(begin)}{text_of(image) * count}{text_of(end)}\n\n",
            unsplit=True,
        )

    def weights(self) -> dict[str, Weight]:
        weights = self.frame_weights()
        for number, block in enumerate(self.layers):
            for name, weight in self.block_weights(block, f"model.layers.{number}.").items():
                weights[f"layers.{number}.{name}"] = weight
        return weights

    def block_weights(self, block: nn.Module, source: str) -> dict[str, Weight]:
        assert isinstance(block, SandwichBlock)
        return sandwich_weights(block, source)

    def canonical(self, name: str) -> str:
        """A multimodal checkpoint has the language model under a name of its own, older ones put it first."""
        return re.sub(r"^model\.language_model\.", "model.", name.removeprefix("language_model."))
