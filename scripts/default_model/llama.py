"""A plain Llama network whose tensor names are those of a Hugging Face checkpoint.

It serves the teacher, the tiny target and their decoding alike; `taps` are the residual stream after i layers.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    """The numbers that define a Llama network, under the names of config.json."""

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048

    @classmethod
    def from_config(cls, config: dict) -> "LlamaShape":
        """Read the shape from a parsed config.json."""
        return cls(**{name: config[name] for name in asdict(cls())})


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).type_as(self.weight) * self.weight


def rope_tables(head_dim: int, theta: float, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [num_positions, head_dim], both halves alike."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply the rotary embedding to x [..., head_dim]; the tables broadcast against x."""
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    return (x.float() * cosine + turned.float() * sine).type_as(x)


class Attention(nn.Module):
    """The projections of grouped-query attention; `input_size` is 2H in an EAGLE-3 first layer."""

    def __init__(self, shape: LlamaShape, input_size: int):
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, input] to rotated q [B, heads, S, D] and k, v [B, kv_heads, S, D]."""
        batch, rows, _ = x.shape
        q = self.q_proj(x).view(batch, rows, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, rows, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, rows, self.num_kv_heads, self.head_dim).transpose(1, 2)
        return rotate(q, cosine, sine), rotate(k, cosine, sine), v

    def merge(self, mixed: Tensor) -> Tensor:
        """Attention output [B, heads, S, D] to the residual's size [B, S, H]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer after its attention: residual, then feed-forward."""
        x = x + self.self_attn.merge(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        q, k, v = self.self_attn.project(self.input_layernorm(x), *tables)
        if mask is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:  # the fast kernels take a mask or grouped heads, not both
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.finish(x, mixed)


class Decoder(nn.Module):
    """Embedding, layers and final norm (the `model.` part of a checkpoint)."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """A Llama with a tied head."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cosine, sine = rope_tables(shape.head_dim, shape.rope_theta, shape.max_position_embeddings)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(
        self, tokens: Tensor, taps: tuple[int, ...] = (), mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, S] to the normed last state [B, S, H] and the asked taps, each [B, S, H].

        Causal, unless a mask (True: may be seen) [B, 1, S, S] says otherwise.
        """
        x = self.model.embed_tokens(tokens)
        tables = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        captured = [x] if 0 in taps else []
        for index, layer in enumerate(self.model.layers, start=1):
            x = layer(x, tables, mask)
            if index in taps:
                captured.append(x)
        return self.model.norm(x), captured

    def logits(self, state: Tensor) -> Tensor:
        """Vocabulary scores of normed states."""
        return F.linear(state, self.model.embed_tokens.weight)


def initialise(network: nn.Module, num_layers: int) -> None:
    """GPT-2 style initialisation: normal 0.02, projections into the residual scaled down with the depth."""
    for name, parameter in network.named_parameters():
        if parameter.dim() < 2:
            continue
        scale = (2 * num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        nn.init.normal_(parameter, std=0.02 * scale)


def load_llama(folder: Path) -> Llama:
    """Read config.json and model.safetensors into a float32 network."""
    config = json.loads((folder / "config.json").read_text())
    network = Llama(LlamaShape.from_config(config))
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    network.load_state_dict(weights, strict=True)
    return network


def save_llama(network: Llama, folder: Path, end_of_text: int) -> None:
    """Write the network in the Hugging Face layout, bfloat16, head tied."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(network.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": end_of_text, "do_sample": False, "max_new_tokens": 256}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
