"""A sample drafter of every registered method, and an oracle that is right with a chosen probability."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import tiny_dflash
import torch
import transformers
from mtp_checkpoints import with_modules

from outrider.certify.hints import guide as guide  # re-exported to tests
from outrider.certify.hints import told as told
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, drafters, extend, no_draft, shifted
from outrider.models.base import Target, targets
from outrider.types import Checkpoint, Draft, Hidden, Step, Verdict

METHODS = [*(name for name in drafters if name != "oracle"), "pard"]  # a draft model with parallel_drafting


def drafter_settings(method: str, directory: Path, target: Callable[..., Path], family: str) -> dict[str, Any]:
    """speculative_config for a tiny drafter that goes with tiny targets of a family. It is random, and agrees with
    nothing: a target with a tokenizer would refuse it. One line per method."""
    if method == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 1}
    if method == "draft_model":
        return {"method": "draft_model", "model": str(target(family, num_hidden_layers=3))}
    if method == "eagle":
        return {"method": "eagle", "model": str(tiny.save_eagle(directory / "eagle"))}
    if method == "eagle3":
        return {"method": "eagle3", "model": str(tiny.save_eagle3(directory / "eagle3", draft_vocab=200))}
    if method == "p_eagle":
        return {"method": "eagle3", "parallel_drafting": True, "model": str(save_p_eagle(directory / "p_eagle"))}
    if method == "pard":
        model = str(target(family, num_hidden_layers=3, pard_token=2))
        return {"method": "draft_model", "parallel_drafting": True, "model": model}
    if method == "suffix":
        return {"method": "suffix"}
    if method == "gemma4_assistant":
        model = save_assistant(directory / "assistant", values_are_keys=family == "gemma4_moe")
        return {"method": "gemma4_assistant", "model": str(model)}
    if method == "dflash":
        return {"method": "dflash", "model": str(tiny_dflash.save_dflash(directory / "dflash"))}
    if method == "dspark":
        return {"method": "dspark", "model": str(tiny_dflash.save_dspark(directory / "dspark"))}
    if method == "mtp":
        return {"method": "mtp"}
    if method == "oracle":
        return {"method": "oracle"}
    raise AssertionError(f"tests/samples.py has no sample of the method {method!r}: add one")


def suits(method: str, family: str) -> bool:
    """Whether there can be a drafter of this method for tiny targets of a family."""
    return method not in drafters or drafters[method].supports(targets[tiny.FAMILIES[family].registered])


def sample_target(method: str, directory: Path, target: Callable[..., Path], family: str) -> Path:
    """The tiny target that goes with the sample: some drafters live in its checkpoint."""
    return with_modules(target(family), directory / "target") if method == "mtp" else target(family)


def save_p_eagle(directory: Path, **config: Any) -> Path:
    """A head of two layers; the mask token is the last of the vocabulary."""
    tensors = tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB, num_layers=2, own_embedding=True)
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * 64, generator=torch.Generator().manual_seed(2))
    return tiny.save_eagle3(directory, tensors, num_hidden_layers=2, ptd_token_id=tiny.VOCAB - 1, **config)


def save_assistant(directory: Path, *, values_are_keys: bool = False, **settings: Any) -> Path:
    """Gemma 4's assistant for tiny targets of that family; settings go to the outer config or to text_config."""
    assistant(values_are_keys=values_are_keys, **settings).save_pretrained(directory)
    return directory


def assistant(*, values_are_keys: bool = False, **settings: Any) -> transformers.PreTrainedModel:
    outer = ("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k", "backbone_hidden_size")
    text = {
        **tiny.COMMON,
        **tiny.GEMMA4_DENSE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "use_double_wide_mlp": False,
        "attention_k_eq_v": values_are_keys,
        "rms_norm_eps": 1e-3,
        **{key: value for key, value in settings.items() if key not in outer},
    }
    around = {"backbone_hidden_size": 64, **{key: settings[key] for key in outer if key in settings}}
    config = transformers.Gemma4AssistantConfig(text_config=text, **around)
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    tiny.randomise(model, seed=3, norm_centre=0.6)
    if config.use_ordered_embeddings:
        order = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(4))
        model.masked_embedding.token_ordering.copy_(order)
    model.tie_weights()
    return model


@drafters.register("oracle")
class Oracle(Drafter):
    """Knows the true continuations (told through `truth`) and gets a token right with probability `skill`.

    It asks for taps and follows the text like a real one, and checks that what it is handed is right."""

    truth: list[list[int]] = []  # noqa: RUF012
    skill = 0.7
    taps = (1, 3)

    def __init__(self, settings: SpeculativeConfig, target: Target) -> None:
        super().__init__()
        self.lookahead = settings.num_speculative_tokens
        self.vocab_size = target.vocab_size

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Oracle:
        return cls(settings, target)

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        extension = extend(step, 1)
        assert shifted(hidden, extension, step).shape[0] == len(extension.batch.input_ids)
        if not step.depth:
            return no_draft(step, self.lookahead)
        return told(step, self.truth, self.lookahead, self.skill, self.vocab_size)
