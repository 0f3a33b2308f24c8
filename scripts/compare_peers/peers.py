"""The drafters of other projects, made and asked with their own classes. A peer saves itself as its project does, and
drafts after a text; the target's states are transformers'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from torch import Tensor

DEPTH = 4
MASK = tiny.VOCAB - 1
SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


class Verifier:
    """The target as transformers runs it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @property
    def num_layers(self) -> int:
        return self.model.config.num_hidden_layers

    def states(self, text: list[int], layers: list[int]) -> Tensor:
        """After so many layers each, side by side [1, n, taps * H]. The last layer's would be normed: not asked for."""
        assert max(layers) < self.num_layers
        found = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer] for layer in layers], dim=-1)

    def embed(self, tokens: list[int]) -> Tensor:
        return self.model.get_input_embeddings()(torch.tensor([tokens]))


@dataclass(frozen=True)
class Peer:
    """A drafter, saved, and how its own code drafts after a text whose last token has no state yet."""

    method: str
    draft: Callable[[list[int]], list[int]]
    depth: int = DEPTH


Maker = Callable[[Verifier, Path], Peer]


def best(logits: Tensor) -> list[int]:
    return logits.argmax(-1).flatten().tolist()


def reduced_vocabulary() -> tuple[Tensor, Tensor]:
    """Every second token: t2d [V] bool, d2t [V / 2] offsets."""
    t2d = torch.arange(tiny.VOCAB) % 2 == 0
    ids = t2d.nonzero().flatten()
    return t2d, ids - torch.arange(len(ids))


# z-lab's package dflash, and SpecForge, whose DFlash is of the same form


def block_config(verifier: Verifier, **more: Any) -> transformers.Qwen3Config:
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, 3, 6], **more.pop("dflash_config", {})}
    return transformers.Qwen3Config(
        **SIZES,
        num_hidden_layers=2,
        num_target_layers=verifier.num_layers,
        block_size=DEPTH + 1,
        dflash_config=nested,
        **more,
    )


def block_hidden(model: Any, verifier: Verifier, text: list[int]) -> Tensor:
    """The block after a text, as the projects' own loops call their models, without a cache."""
    start, size = len(text) - 1, model.block_size
    layers = [layer + 1 for layer in model.target_layer_ids]
    return model(
        target_hidden=verifier.states(text[:-1], layers),
        noise_embedding=verifier.embed([text[-1]] + [MASK] * (size - 1)),
        position_ids=torch.arange(start + size)[None],
    )


def z_lab(verifier: Verifier, path: Path, **more: Any) -> Peer:
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    is_second = "conv_kernel_size" in more.get("dflash_config", {})
    model = (DFlash2DraftModel if is_second else DFlashDraftModel)(block_config(verifier, **more)).eval()
    tiny.randomise(model, 3)
    model.save_pretrained(path)

    def draft(text: list[int]) -> list[int]:
        hidden, head = block_hidden(model, verifier, text)[:, 1:], verifier.model.lm_head
        if is_second:
            return model.propose(hidden, torch.tensor(text[-1:]), head, 0.0)[0].flatten().tolist()
        return best(model.compute_logits(hidden, head))

    return Peer("dflash", draft)


def specforge_block(verifier: Verifier, path: Path, *, as_its_loop: bool = False, **more: Any) -> Peer:
    """Its trainer lets the anchor's row predict the first token of a DSpark draft; its own loop (`as_its_loop`) leaves
    that row out, and takes the next row's prediction for it."""
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    is_dspark = "projector_type" in more.get("dflash_config", {})
    config = block_config(verifier, **more)
    config._attn_implementation = "sdpa"
    model = (DSparkDraftModel if is_dspark else DFlashDraftModel)(config).eval()
    tiny.randomise(model, 4)
    model.save_pretrained(path)

    def draft(text: list[int]) -> list[int]:
        block, hidden = torch.tensor([[text[-1]] + [MASK] * DEPTH]), block_hidden(model, verifier, text)
        if is_dspark and not as_its_loop:
            first, logits = torch.tensor(text[-1:]), verifier.model.lm_head(hidden)
            drafts, _ = model.markov_head.sample_block_tokens(logits, first_prev_token_ids=first, hidden_states=hidden)
            return drafts.flatten().tolist()
        return model._sample_draft_tokens(verifier.model, hidden, block).flatten().tolist()

    if not is_dspark:
        return Peer("dflash", draft)
    return Peer("dspark", draft, DEPTH if as_its_loop else DEPTH + 1)


def specforge_eagle3(verifier: Verifier, path: Path, **more: Any) -> Peer:
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    t2d, d2t = reduced_vocabulary()
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=1, draft_vocab_size=len(d2t), pad_token_id=0, **more)
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").eval()
    tiny.randomise(model, 5)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(verifier.model.get_input_embeddings().weight)
        model.t2d.copy_(t2d)
        model.d2t.copy_(d2t)
    model.save_pretrained(path)
    count = verifier.num_layers
    layers = [2, count // 2, count - 3]  # what its trainer captures where nobody says

    def draft(text: list[int]) -> list[int]:
        size = len(text) - 1
        hidden = model.project_hidden_states(verifier.states(text[:-1], layers))
        allowed = model.prepare_decoder_attention_mask(torch.ones(1, size, dtype=torch.bool), hidden, 1, size, 0)
        tokens, cache, drafts = torch.tensor([text[1:]]), [[], []], []
        for _ in range(DEPTH):
            hidden = model.backbone(
                model.embed_input_ids(tokens), hidden, cache, allowed, torch.arange(size)[None], None, True
            )
            chosen = model.compute_logits(hidden).argmax(-1)
            tokens = chosen + model.d2t[chosen]
            drafts.append(int(tokens[0, -1]))
        return drafts

    return Peer("eagle3", draft)


# speculators


def training_arguments(verifier: Verifier, num_layers: int, kind: type, **more: Any) -> dict[str, Any]:
    _, d2t = reduced_vocabulary()
    return {
        "verifier_config": kind(**SIZES, num_hidden_layers=num_layers),
        "verifier_name_or_path": str(verifier.path),
        "draft_vocab_size": len(d2t),
        "draft_attn_impl": "eager",
        **more,
    }


def trained(model_class: Any, arguments: dict[str, Any], path: Path, seed: int) -> Any:
    """As its trainer makes it, but for the numbers, and saved."""
    t2d, d2t = reduced_vocabulary()
    model = model_class.from_training_args(t2d=t2d, d2t=d2t, **copy.deepcopy(arguments)).eval()
    kept = {name: each.clone() for name, each in model.state_dict().items() if name.startswith(("embed", "verifier"))}
    tiny.randomise(model, seed)
    model.load_state_dict(kept, strict=False)
    model.load_vocab_mappings(t2d, d2t)
    model.save_pretrained(path)
    return model


def speculators_eagle3(verifier: Verifier, path: Path, **more: Any) -> Peer:
    from speculators.models.eagle3 import Eagle3DraftModel

    layers = [1, 4, 7]
    settings = {"norm_before_residual": False, "ttt_steps": DEPTH, "target_layer_ids": layers, **more}
    arguments = training_arguments(verifier, 1, transformers.LlamaConfig, **settings)
    model = trained(Eagle3DraftModel, arguments, path, 6)

    def draft(text: list[int]) -> list[int]:
        """Its forward pass teaches: a step's tokens are the text's. So drafts go behind the text, one at a time."""
        states, size = verifier.states(text[:-1], layers), len(text) - 1
        drafts: list[int] = []
        for step in range(DEPTH):
            padded = torch.nn.functional.pad(states, (0, 0, 0, step))
            ids = torch.tensor([text[1:] + drafts])
            chosen = model(padded, ids, torch.zeros_like(ids), ttt_steps=step + 1)[step][0, size - 1]
            drafts.append(int(chosen + model.d2t[chosen]))
        return drafts

    return Peer("eagle3", draft)


def speculators_block(
    verifier: Verifier, path: Path, *, layer_types: list[str] | None = None, window: int | None = None, **more: Any
) -> Peer:
    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.dspark import DSparkDraftModel

    is_dspark = "markov_rank" in more
    layers, size = [1, 4, 7], DEPTH + (0 if is_dspark else 1)
    settings = {"block_size": size, "mask_token_id": MASK, "target_layer_ids": layers, **more}
    arguments = training_arguments(verifier, 2, transformers.Qwen3Config, **settings)
    arguments["verifier_config"].layer_types = layer_types or ["full_attention"] * 2
    arguments["verifier_config"].sliding_window = window
    model = trained(DSparkDraftModel if is_dspark else DFlashDraftModel, arguments, path, 7)

    def draft(text: list[int]) -> list[int]:
        anchor, length = len(text) - 1, len(text) + size
        states = verifier.states(text[:-1], layers)
        states = torch.nn.functional.pad(states, (0, 0, 0, length - anchor))
        ids = torch.tensor([text + [0] * (length - len(text))])
        wanted = torch.zeros(1, length)
        wanted[0, anchor] = 1
        last = torch.zeros(1, length, SIZES["hidden_size"])
        hidden, logits, *_ = model._backbone_forward(states, ids, wanted, last, torch.zeros_like(ids), max_anchors=1)
        if not is_dspark:
            return [token + int(model.d2t[token]) for token in best(logits[0, 1:])]
        drafts, previous = [], text[-1]
        for slot in range(size):
            bias = model.markov_head.block_bias(
                prev_token_ids=torch.tensor([[previous]]), hidden_states=hidden[:, slot : slot + 1]
            )
            chosen = best(logits[:, slot : slot + 1] + bias)[0]
            previous = chosen + int(model.d2t[chosen])
            drafts.append(previous)
        return drafts

    return Peer("dspark" if is_dspark else "dflash", draft)
