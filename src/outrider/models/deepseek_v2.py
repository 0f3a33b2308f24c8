"""DeepSeek V2 and V2-Lite: latent attention, then experts chosen by softmax, perhaps from the best groups only."""

from typing import Any

from torch import Tensor, nn

from outrider.kernels.moe import best_groups
from outrider.kernels.norm import Normed
from outrider.layers.block import mlp_weights
from outrider.layers.embedding import Embedding, Head
from outrider.layers.mla import LatentAttention, LatentBlock, LatentShape, latent_weights, rope_settings
from outrider.layers.mlp import GatedMLP
from outrider.layers.moe import Experts, ExpertShape, MixtureMLP, SoftmaxRouter, experts_by_number, router_logits
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import Target, refuse, require, targets
from outrider.types import Weight


class GroupRouter(SoftmaxRouter):
    """Probabilities over all experts. The chosen keep theirs, times a factor: they do not add up to one."""

    def __init__(self, hidden_size: int, config: dict[str, Any]) -> None:
        num_experts, num_chosen = require(config, "n_routed_experts", "num_experts_per_tok")
        super().__init__(hidden_size, num_experts, num_chosen, renormalise=False, wide=True)
        self.scale = config.get("routed_scaling_factor", 1.0)
        grouped = config.get("topk_method", "greedy") == "group_limited_greedy"
        self.num_groups, self.num_kept = expert_groups(config) if grouped else (1, 1)

    def forward(self, x: Tensor | Normed) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts of each row [T, k], and their shares [T, k]."""
        if self.num_kept < self.num_groups:
            scores = router_logits(self.gate, x).softmax(-1)
            scores = scores.masked_fill(~best_groups(scores, self.num_groups, self.num_kept, 1), 0.0)
            shares, ids = scores.topk(self.num_chosen, dim=-1)
        else:
            ids, shares = super().forward(x)
        return ids, shares if self.scale == 1 else shares * self.scale


@targets.register("DeepseekV2ForCausalLM")
class DeepseekV2(Target):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.check(config)
        vocab_size, num_layers, num_dense = require(config, "vocab_size", "num_hidden_layers", "first_k_dense_replace")
        self.shape = LatentShape.from_config(config)
        self.rotary = Rotary.from_config(config, self.shape.rotary_dim)
        self.embed = Embedding(vocab_size, self.shape.hidden_size)
        self.layers = nn.ModuleList(
            self.block(self.dense() if number < num_dense else self.mixture()) for number in range(num_layers)
        )
        self.norm = RMSNorm(self.shape.hidden_size, self.eps)
        tied = config.get("tie_word_embeddings", False)
        self.head = Head(vocab_size, self.shape.hidden_size, tied=self.embed if tied else None)

    def check(self, config: dict[str, Any]) -> None:
        """Refuses what is not built."""
        refuse_unbuilt(config)
        refuse(config, "topk_method", "greedy", "group_limited_greedy")
        refuse(config, "scoring_func", "softmax")
        refuse(config, "norm_topk_prob", False)

    @property
    def eps(self) -> float:
        return self.config.get("rms_norm_eps", 1e-6)

    @property
    def mlp_bias(self) -> bool:
        return bool(self.config.get("mlp_bias", False))

    def router(self) -> nn.Module:
        return GroupRouter(self.shape.hidden_size, self.config)

    def block(self, mlp: nn.Module) -> LatentBlock:
        return LatentBlock(LatentAttention(self.shape, self.rotary), mlp, self.eps)

    def dense(self) -> GatedMLP:
        (intermediate_size,) = require(self.config, "intermediate_size")
        return GatedMLP(self.shape.hidden_size, intermediate_size, bias=self.mlp_bias)

    def mixture(self) -> MixtureMLP:
        num_experts, intermediate_size = require(self.config, "n_routed_experts", "moe_intermediate_size")
        hidden_size, num_shared = self.shape.hidden_size, self.config.get("n_shared_experts") or 0
        # those that every row goes through are one MLP, as wide as all of them
        shared = GatedMLP(hidden_size, intermediate_size * num_shared, bias=self.mlp_bias) if num_shared else None
        return MixtureMLP(self.router(), Experts(ExpertShape(num_experts, hidden_size, intermediate_size)), shared)

    def weights(self) -> dict[str, Weight]:
        weights = self.frame_weights()
        for number, block in enumerate(self.layers):
            assert isinstance(block, LatentBlock)
            weights |= self.block_weights(block, f"model.layers.{number}.", f"layers.{number}.")
        return weights

    def block_weights(self, block: LatentBlock, source: str, name: str) -> dict[str, Weight]:
        weights = {
            f"{name}attention_norm.weight": Weight((f"{source}input_layernorm.weight",)),
            f"{name}mlp_norm.weight": Weight((f"{source}post_attention_layernorm.weight",)),
        }
        weights |= latent_weights(block.attention.whole_shape, f"{source}self_attn.", f"{name}attention.")
        if isinstance(block.mlp, GatedMLP):
            return weights | mlp_weights(block.mlp, f"{source}mlp.", f"{name}mlp.")
        assert isinstance(block.mlp, MixtureMLP)
        return weights | self.mixture_weights(block.mlp, f"{source}mlp.", f"{name}mlp.")

    def mixture_weights(self, mlp: MixtureMLP, source: str, name: str) -> dict[str, Weight]:
        weights = {f"{name}router.gate.weight": Weight((f"{source}gate.weight",))}
        weights |= experts_by_number(mlp.experts.shape, f"{source}experts.", f"{name}experts.")
        if mlp.shared is not None:
            assert isinstance(mlp.shared, GatedMLP)
            weights |= mlp_weights(mlp.shared, f"{source}shared_experts.", f"{name}shared.")
        return weights


def refuse_unbuilt(config: dict[str, Any]) -> None:
    """What neither V2 nor V3 has here."""
    refuse(config, "hidden_act", "silu")
    refuse(config, "moe_layer_freq", 1)
    refuse(config, "num_key_value_heads", config.get("num_attention_heads"))
    refuse({**config, **rope_settings(config)}, "partial_rotary_factor", 1.0)


def expert_groups(config: dict[str, Any]) -> tuple[int, int]:
    """How many groups the experts form, and how many of them a row may choose from."""
    num_groups, num_kept = require(config, "n_group", "topk_group")
    num_experts, num_chosen = require(config, "n_routed_experts", "num_experts_per_tok")
    if num_experts % num_groups or not 0 < num_kept <= num_groups or num_chosen > num_experts // num_groups * num_kept:
        raise ValueError(
            f"config.json: {num_chosen} of {num_experts} experts (num_experts_per_tok, n_routed_experts) cannot be "
            f"chosen from {num_kept} of {num_groups} groups (topk_group, n_group)"
        )
    return num_groups, num_kept
