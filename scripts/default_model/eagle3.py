"""The EAGLE-3 drafter as it is trained: one fused layer over three taps, and the training-time-test loss.

Slot p joins the embedding of token p+1 with the target's taps at row p and predicts token p+2; from the second step
on, the layer's own output takes the place of the taps. Tensor names are those of published checkpoints.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from default_model.llama import MLP, Attention, Llama, LlamaShape, RMSNorm, rope_tables


@dataclass(frozen=True)
class DrafterShape:
    """The drafter's layer, its taps, its vocabulary and what it feeds back."""

    layer: LlamaShape
    taps: tuple[int, ...] = (2, 6, 9)
    draft_vocab_size: int = 4096
    norm_output: bool = False


class FusedLayer(nn.Module):
    """The first layer of an EAGLE-3 drafter: attention over [embedding, hidden], residual from hidden."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def project(self, embedded: Tensor, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of rows: embedded and hidden [B, S, H], rotary tables [S, D]."""
        joined = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        return self.self_attn.project(joined, *tables)

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer after its attention."""
        x = hidden + self.self_attn.merge(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """fc over the taps, the fused layer, norm and head. The embedding is the target's."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: DrafterShape):
        super().__init__()
        size = shape.layer.hidden_size
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * size, size, bias=False)
        self.midlayer = FusedLayer(shape.layer)
        self.norm = RMSNorm(size, shape.layer.rms_norm_eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        layer = shape.layer
        cosine, sine = rope_tables(layer.head_dim, layer.rope_theta, layer.max_position_embeddings)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def tables(self, first: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of the positions first .. first + num_rows - 1."""
        return self.cosine[first : first + num_rows], self.sine[first : first + num_rows]

    def feed_back(self, hidden: Tensor) -> Tensor:
        """What the next step takes as its hidden state."""
        return self.norm(hidden) if self.shape.norm_output else hidden


def start_from(drafter: Drafter, target: Llama) -> None:
    """Start as a reading of the last tap with the target's own norm and head, which is already a fair guess."""
    size = target.shape.hidden_size
    last, layer = target.model.layers[-1], drafter.midlayer
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -size:] = torch.eye(size, device=drafter.fc.weight.device)
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            nn.init.normal_(linear.weight, std=(2 * size) ** -0.5)
        nn.init.normal_(layer.self_attn.o_proj.weight, std=0.01)
        nn.init.normal_(layer.mlp.gate_proj.weight, std=size**-0.5)
        nn.init.normal_(layer.mlp.up_proj.weight, std=size**-0.5)
        nn.init.normal_(layer.mlp.down_proj.weight, std=0.01)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        drafter.norm.weight.copy_(target.model.norm.weight)
        drafter.lm_head.weight.copy_(target.model.embed_tokens.weight)


@dataclass(frozen=True)
class TrainingRows:
    """Packed rows with what the target said of them. B rows of S tokens, H hidden, V vocabulary."""

    tokens: Tensor  # [B, S] token ids
    documents: Tensor  # [B, S] index of the document that a token belongs to; -1 where nothing is to be learnt
    embedded: Tensor  # [B, S, H] the target's embedding of the tokens
    taps: Tensor  # [B, S, num_taps * H] the target's taps at every row
    logits: Tensor  # [B, S, V] the target's logits at every row (over the draft vocabulary)
    learnt: Tensor  # [B, S] bool: rows whose next token the target itself generated


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor) -> Tensor:
    """Attention of one unrolled step.

    query [B, heads, S, D]; keys and values: one [B, kv_heads, S, D] per step so far. A slot sees the first step's keys
    where `visible` [B, 1, S, S] says so (those come from real taps), and of every later step only its own column:
    those are the drafts it made itself. Returns [B, heads, S, D].
    """
    group = query.shape[1] // keys[0].shape[1]
    keys = [key.repeat_interleave(group, dim=1) for key in keys]
    values = [value.repeat_interleave(group, dim=1) for value in values]
    query = query * query.shape[-1] ** -0.5
    past = (query @ keys[0].transpose(-1, -2)).float().masked_fill(~visible, -torch.inf)  # [B, heads, S, S]
    own = [(query * key).float().sum(-1, keepdim=True) for key in keys[1:]]  # each [B, heads, S, 1]
    weights = torch.cat([past, *own], dim=-1).softmax(-1).to(query.dtype)
    num_columns = past.shape[-1]
    mixed = weights[..., :num_columns] @ values[0]
    for index, value in enumerate(values[1:]):
        mixed = mixed + weights[..., num_columns + index, None] * value
    return mixed


def shift(x: Tensor, amount: int) -> Tensor:
    """x [B, S, ...] moved left by `amount` columns; the last columns repeat (they are masked out of the loss)."""
    if amount == 0:
        return x
    return torch.cat([x[:, amount:], x[:, -1:].expand(-1, amount, *x.shape[2:])], dim=1)


def ttt_loss(drafter: Drafter, rows: TrainingRows, num_steps: int, decay: float) -> tuple[Tensor, Tensor]:
    """The training-time-test loss: the drafter is unrolled over its own output, as it runs when it drafts.

    Step i of column p stands for draft i + 1 after a round that ended with token p + 1: it takes the embedding of token
    p + 1 + i at position p + i, and is compared with the target's distribution at row p + 1 + i (which predicts token
    p + 2 + i) by soft cross entropy. Steps weigh decay ** i.

    Returns the loss (a scalar) and, per step, the share of columns whose drafts 1 .. i + 1 all equal the target's
    argmax [num_steps]: their sum plus one estimates the greedy accept length.
    """
    num_columns = rows.tokens.shape[1]
    same_document = rows.documents[:, :, None] == rows.documents[:, None, :]  # [B, S, S]
    visible = (same_document.tril())[:, None]
    hidden = drafter.fc(rows.taps).float()  # the residual stays float32 under autocast
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = hidden.new_zeros((), dtype=torch.float32)
    still_right = torch.ones_like(rows.learnt)
    shares = []
    for step in range(num_steps):
        embedded = shift(rows.embedded, 1 + step)
        query, key, value = drafter.midlayer.project(embedded, hidden, drafter.tables(step, num_columns))
        keys.append(key)
        values.append(value)
        output = drafter.midlayer.finish(hidden, attend(query, keys, values, visible))
        scores = drafter.lm_head(drafter.norm(output)).float()  # [B, S, V]
        counted = _counted(rows, 1 + step)
        wanted = shift(rows.logits, 1 + step)
        total = total + decay**step * _soft_cross_entropy(scores, wanted, counted)
        still_right = still_right & (scores.argmax(-1) == wanted.argmax(-1))
        shares.append((still_right & counted).sum() / counted.sum().clamp(min=1))
        hidden = drafter.feed_back(output)
    return total / sum(decay**step for step in range(num_steps)), torch.stack(shares)


def _counted(rows: TrainingRows, amount: int) -> Tensor:
    """Columns [B, S] whose row p + amount belongs to the same document and is to be learnt."""
    num_columns = rows.tokens.shape[1]
    inside = torch.arange(num_columns, device=rows.tokens.device) < num_columns - amount
    return inside & (shift(rows.documents, amount) == rows.documents) & shift(rows.learnt, amount)


def _soft_cross_entropy(scores: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
    """Mean over counted columns of the cross entropy of softmax(scores) against softmax(wanted), both [B, S, V]."""
    per_column = -(wanted.float().softmax(-1) * scores.log_softmax(-1)).sum(-1)
    return (per_column * counted).sum() / counted.sum().clamp(min=1)


def save_drafter(drafter: Drafter, kept: Tensor, target: Llama, folder: Path) -> None:
    """Write the checkpoint with the draft vocabulary reduced to the target ids `kept` (sorted, [draft_vocab])."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    kept = kept.cpu()
    weights["lm_head.weight"] = weights["lm_head.weight"][kept].contiguous()
    if len(kept) < target.shape.vocab_size:  # vLLM refuses a map of the whole vocabulary
        weights["d2t"] = kept - torch.arange(len(kept))
        weights["t2d"] = torch.zeros(target.shape.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **asdict(replace(drafter.shape.layer, num_hidden_layers=1)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "draft_vocab_size": len(kept),
        "target_hidden_size": target.shape.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(drafter.shape.taps),
        "norm_output": drafter.shape.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_drafter(folder: Path) -> tuple[Drafter, Tensor]:
    """Read a checkpoint: the float32 network, and the target id of each draft id."""
    config = json.loads((folder / "config.json").read_text())
    shape = DrafterShape(
        layer=LlamaShape.from_config(config),
        taps=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        draft_vocab_size=config["draft_vocab_size"],
        norm_output=config["norm_output"],
    )
    drafter = Drafter(shape)
    weights = load_file(folder / "model.safetensors")
    offsets = weights.pop("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.long))
    weights.pop("t2d", None)
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return drafter, torch.arange(len(offsets)) + offsets
