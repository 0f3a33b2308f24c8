"""Multi-token prediction as the papers write it: no cache, no batch, every module over the whole text for every token.
Slow on purpose. The three families' modules are computed from their tensors, DeepSeek's by transformers."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_layers import MtpModel


class Modules(ABC):
    """The modules of one checkpoint, and its family's facts."""

    reads_normed = True  # module 0 takes the target's state after its final norm
    feeds_normed = True  # so is what the next module takes
    zero_first = False

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.tensors = load_file(path / "model.safetensors")

    @abstractmethod
    def output(self, number: int, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Rows 0..n-1 at positions 0..n-1, before the module's norm [n, H]."""

    @abstractmethod
    def norm(self, number: int, output: Tensor) -> Tensor: ...

    def head(self, number: int) -> Tensor:
        return self.tensors["lm_head.weight"]

    @property
    def embedding(self) -> Tensor:
        return self.tensors["model.embed_tokens.weight"]


@dataclass
class Drafted:
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def draft(
    modules: Modules, num_modules: int, tokens: Sequence[int], hidden: Tensor, count: int, *, chained: bool = True
) -> Drafted:
    """`count` greedy draft tokens after `tokens`; hidden [len(tokens) - 1, H]: the target's states.

    Row p of module k: state p (of the target, or what module k - 1 made of it) beside token p + 1 + k -> token
    p + 2 + k. When every module has drafted, the drafts are taken for text: module k's newest state for the target's
    of the k-th of them."""
    found = Drafted()
    while True:
        state, newest = hidden, []
        for number in range(num_modules):
            ids = [*tokens, *found.tokens][1 + number :]
            assert len(ids) == len(hidden)
            embedding = F.embedding(torch.tensor(ids), modules.embedding)
            if modules.zero_first:
                embedding = torch.cat([torch.zeros_like(embedding[:1]), embedding[1:]])
            output = modules.output(number, embedding, state)
            normed = modules.norm(number, output)
            fed = normed if modules.feeds_normed else output
            found.logits.append(F.linear(normed[-1], modules.head(number)))
            found.tokens.append(int(found.logits[-1].argmax()))
            if len(found.tokens) == count:
                return found
            newest.append(fed[-1:])
            state = fed if chained else hidden
        hidden = torch.cat([hidden, *newest])


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attend(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """q [n, heads, D], k and v [n, groups, D] -> [n, heads, D], causal."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (distance >= 0) & (distance < (window or len(q)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


class Step(Modules):
    """Step-3.5: gated heads, a window, norms that multiply by 1 + weight, heads of their own."""

    reads_normed = feeds_normed = False

    def weight(self, number: int, name: str) -> Tensor:
        return self.tensors[f"model.layers.{self.config['num_hidden_layers'] + number}.{name}.weight"]

    def rms(self, number: int, x: Tensor, name: str) -> Tensor:
        return rms(x, 1 + self.weight(number, name), self.config["rms_norm_eps"])

    def turned(self, number: int, x: Tensor) -> Tensor:
        layer = self.config["num_hidden_layers"] + number
        size = int(x.shape[-1] * self.config["partial_rotary_factors"][layer])
        frequency = self.config["rope_theta"][layer] ** (-torch.arange(0, size, 2) / size)
        angle = torch.arange(len(x))[:, None, None] * frequency
        a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), rest], dim=-1)

    def output(self, number: int, embedding: Tensor, hidden: Tensor) -> Tensor:
        def project(x: Tensor, name: str) -> Tensor:
            return F.linear(x, self.weight(number, name))

        both = [self.rms(number, embedding, "enorm"), self.rms(number, hidden, "hnorm")]
        x = project(torch.cat(both, dim=-1), "eh_proj")
        normed = self.rms(number, x, "input_layernorm")
        q, k, v = (project(normed, f"self_attn.{part}_proj").unflatten(-1, (-1, 16)) for part in "qkv")
        q, k = (self.turned(number, self.rms(number, y, f"self_attn.{n}_norm")) for y, n in ((q, "q"), (k, "k")))
        gates = project(normed, "self_attn.g_proj").sigmoid()
        mixed = attend(q, k, v, self.config["sliding_window"]) * gates[..., None]
        x = x + project(mixed.flatten(1), "self_attn.o_proj")
        normed = self.rms(number, x, "post_attention_layernorm")
        gate, up = F.silu(project(normed, "mlp.gate_proj")), project(normed, "mlp.up_proj")
        limit = self.config["swiglu_limits_shared"][self.config["num_hidden_layers"] + number] or math.inf
        return x + project(gate.clamp(max=limit) * up.clamp(-limit, limit), "mlp.down_proj")

    def norm(self, number: int, output: Tensor) -> Tensor:
        return self.rms(number, output, "transformer.shared_head.norm")

    def head(self, number: int) -> Tensor:
        return self.weight(number, "transformer.shared_head.output")


class Nemotron(Modules):
    """NemotronH: attention without positions, then experts beside a shared one; one group of them."""

    @property
    def embedding(self) -> Tensor:
        return self.tensors["backbone.embeddings.weight"]

    def rms(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.tensors[f"mtp.layers.{name}.weight"], self.config["layer_norm_epsilon"])

    def output(self, number: int, embedding: Tensor, hidden: Tensor) -> Tensor:
        def project(x: Tensor, name: str) -> Tensor:
            return F.linear(x, self.tensors[f"mtp.layers.{name}.weight"])

        def squared(x: Tensor, name: str) -> Tensor:
            return project(project(x, f"{name}.up_proj").relu().square(), f"{name}.down_proj")

        both = [self.rms(embedding, "0.enorm"), self.rms(hidden, "0.hnorm")]
        x = project(torch.cat(both, dim=-1), "0.eh_proj")
        normed, dim = self.rms(x, "0.norm"), self.config["head_dim"]
        q, k, v = (project(normed, f"0.mixer.{part}_proj").unflatten(-1, (-1, dim)) for part in "qkv")
        x = x + project(attend(q, k, v).flatten(1), "0.mixer.o_proj")
        normed = self.rms(x, "1.norm")
        scores = project(normed, "1.mixer.gate").sigmoid()
        choice = scores + self.tensors["mtp.layers.1.mixer.gate.e_score_correction_bias"]
        chosen = torch.zeros_like(scores).scatter(-1, choice.topk(self.config["num_experts_per_tok"]).indices, 1.0)
        shares = scores * chosen / (scores * chosen).sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        experts = [squared(normed, f"1.mixer.experts.{each}") for each in range(scores.shape[-1])]
        return x + (torch.stack(experts, 1) * shares[..., None]).sum(1) + squared(normed, "1.mixer.shared_experts")

    def norm(self, number: int, output: Tensor) -> Tensor:
        return self.rms(output, "1.final_layernorm")


class Deepseek(Modules):
    """DeepSeek V3, by transformers' own layers, which apply the module's norm themselves."""

    zero_first = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        model = transformers.DeepseekV3ForCausalLM.from_pretrained(path)
        first, count = self.config["num_hidden_layers"], self.config["num_nextn_predict_layers"]
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first + k}\..*" for k in range(count)]
        self.model = MtpModel.from_pretrained(model, device_map={"": "cpu"})

    def output(self, number: int, embedding: Tensor, hidden: Tensor) -> Tensor:
        positions = torch.arange(len(hidden))[None]
        mask = torch.full((len(hidden), len(hidden)), -math.inf).triu(1)[None, None]
        turn = self.model.rotary_emb(hidden[None], positions)
        return self.model.layers[number](embedding[None], hidden[None], turn, mask, positions, None)[0]

    def norm(self, number: int, output: Tensor) -> Tensor:
        return output


FAMILIES: dict[str, type[Modules]] = {"deepseek_v3": Deepseek, "nemotron_h": Nemotron, "step3p5": Step}
