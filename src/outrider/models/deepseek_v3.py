"""DeepSeek V3 and R1, Kimi K2, Moonlight: V2 with experts scored one by one, and modules for multi-token prediction."""

import re
from typing import Any

from torch import nn

from outrider.layers.mla import LatentBlock
from outrider.layers.moe import MixtureMLP, SigmoidRouter, SigmoidRouting
from outrider.layers.mtp import MtpModule
from outrider.layers.norm import RMSNorm
from outrider.models.base import Mtp, refuse, require, targets
from outrider.models.deepseek_v2 import DeepseekV2, expert_groups, refuse_unbuilt
from outrider.types import Weight


@targets.register("DeepseekV3ForCausalLM")
class DeepseekV3(DeepseekV2):
    def check(self, config: dict[str, Any]) -> None:
        refuse_unbuilt(config)
        refuse(config, "topk_method", "noaux_tc")
        refuse(config, "scoring_func", "sigmoid")
        refuse(config, "mlp_bias", False)

    def router(self) -> nn.Module:
        num_experts, num_chosen, scale = require(
            self.config, "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor"
        )
        num_groups, num_kept = expert_groups(self.config)
        if num_kept < num_groups and num_experts < 2 * num_groups:
            raise ValueError("config.json: a group is judged by its two best experts, but n_group leaves it one")
        renormalise = bool(self.config.get("norm_topk_prob", True))
        routing = SigmoidRouting(num_experts, num_chosen, num_groups, num_kept, renormalise, scale)
        return SigmoidRouter(self.shape.hidden_size, routing)

    def mixture_weights(self, mlp: MixtureMLP, source: str, name: str) -> dict[str, Weight]:
        bias = {f"{name}router.bias": Weight((f"{source}gate.e_score_correction_bias",))}
        return super().mixture_weights(mlp, source, name) | bias

    @property
    def mtp(self) -> Mtp | None:
        if not self.num_modules:
            return None
        return Mtp(
            num_modules=self.num_modules,
            build=self.mtp_module,
            weights=self.mtp_weights,
            reads_normed=True,
            feeds_normed=True,
            zero_first_embedding=bool(self.config.get("mtp_zero_first_embedding", True)),
            copies=(r"\.embed_tokens\.weight$", r"\.shared_head\.head\.weight$"),
        )

    @property
    def num_modules(self) -> int:
        return self.config.get("num_nextn_predict_layers", self.config.get("num_mtp_layers")) or 0

    def mtp_module(self, number: int) -> MtpModule:
        # The embedding and the head in its tensors are the target's own, stored again.
        norms = [RMSNorm(self.shape.hidden_size, self.eps) for _ in range(3)]
        return MtpModule(norms, [self.block(self.mixture())], head=None, embed=None)

    def mtp_weights(self, number: int, module: MtpModule) -> dict[str, Weight]:
        source = f"model.layers.{self.num_layers + number}."
        (block,) = module.blocks
        assert isinstance(block, LatentBlock)
        return {
            "embedding_norm.weight": Weight((f"{source}enorm.weight",)),
            "hidden_norm.weight": Weight((f"{source}hnorm.weight",)),
            "projection.weight": Weight((f"{source}eh_proj.weight",)),
            "norm.weight": Weight((f"{source}shared_head.norm.weight",)),
            **self.block_weights(block, source, "blocks.0."),
        }

    def ignores(self, name: str) -> bool:
        """The modules' tensors are numbered like layers, after the last one."""
        found = re.match(r"model\.layers\.(\d+)\.", name)
        extra = int(found.group(1)) - self.num_layers if found else -1
        return super().ignores(name) or 0 <= extra < self.num_modules
