"""Other engines that a benchmark can stand beside ours, on the very same weights.
One that is missing is named, not hidden."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import nn

from outrider.bench.sides import Prompts, Side, Timing
from outrider.engine.checkpoint import open_checkpoint
from outrider.registry import Registry
from outrider.types import Checkpoint


class PeerUnavailable(ValueError):  # noqa: N818  (it reads as what it says)
    """This peer cannot take part, and why."""


@dataclass(frozen=True)
class PeerOptions:
    """What a peer must know to be comparable."""

    model: str | Path
    dtype: torch.dtype
    device: torch.device
    max_len: int
    threads: int


class Peer:
    name: str
    pass_bytes: int = 0

    @classmethod
    def open(cls, options: PeerOptions) -> Self:
        raise NotImplementedError

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        raise NotImplementedError

    def close(self) -> None:
        """Frees the weights."""


peers: Registry[type[Peer]] = Registry("peer")


def open_peers(names: Sequence[str], options: PeerOptions) -> tuple[list[Side], list[str]]:
    """The peers that can take part, and a note for each that cannot. Transformers was asked for: it must be there."""
    opened: list[Side] = []
    notes: list[str] = []
    for name in names:
        try:
            opened.append(peers[name].open(options))
        except PeerUnavailable as reason:
            if peers[name] is Transformers:
                raise
            notes.append(f"{name} is left out: {reason}")
    return opened, notes


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerUnavailable(f"{package} is not installed ({error}): pip install {package}") from error


# transformers


@peers.register("transformers")
class Transformers(Peer):
    """`generate` of Hugging Face transformers: greedy, batched with left padding, no end-of-text token."""

    name = "transformers"

    def __init__(self, library: ModuleType, model: Any) -> None:
        self._library = library
        self.model = model.eval()
        self.pass_bytes = _bytes_read(model)
        # An end-of-text token must neither end an answer nor be avoided: every side generates what the model says.
        self.model.generation_config = library.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    @classmethod
    def open(cls, options: PeerOptions) -> Self:
        library = _import("transformers", "transformers")
        path = Path(options.model).expanduser()
        if path.is_dir() or not path.exists():
            model = library.AutoModelForCausalLM.from_pretrained(
                str(options.model), local_files_only=True, dtype=options.dtype, trust_remote_code=False
            )
        else:
            checkpoint = open_checkpoint(path)
            try:
                model = build_transformers(library, checkpoint, options.dtype)
            finally:
                checkpoint.close()
        return cls(library, model.to(options.device))

    @torch.inference_mode()
    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        width = max(len(ids) for ids in prompts)
        device = self.model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        clock = _Clock()
        criteria = self._library.StoppingCriteriaList([clock.criterion(self._library)])
        output = self.model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            stopping_criteria=criteria,
        )
        tokens = output[:, width:].tolist()
        seconds = clock.now()
        assert all(len(answer) == max_tokens for answer in tokens), "an answer of another length"
        return Timing(seconds, clock.first or seconds, max_tokens, tokens)

    def close(self) -> None:
        del self.model


class _Clock:
    """Starts when made; notes when the first token is there."""

    def __init__(self) -> None:
        self.first: float | None = None
        self._begin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begin

    def criterion(self, library: ModuleType) -> Any:
        """A stopping criterion that never stops, but is asked after every token."""
        clock = self

        class Noting(library.StoppingCriteria):  # type: ignore[name-defined,misc]
            def __call__(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
                clock.first = clock.first or clock.now()
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        return Noting()


def build_transformers(library: ModuleType, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Transformers' model with our own reading of a checkpoint that it cannot read, or reads differently."""
    values = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "model_type")}
    scaling = values.get("rope_scaling") or {}
    factors = scaling.get("factors") if scaling.get("rope_type") == "llama3_factors" else None
    if factors is not None:  # Llama 3 in a GGUF file: the factors themselves, a form that transformers does not know
        values["rope_scaling"] = None
    config = library.AutoConfig.for_model(checkpoint.config["model_type"], **values)
    model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    if config.tie_word_embeddings:
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, strict=True)
    if factors is not None:
        model.model.rotary_emb.inv_freq.div_(torch.tensor(factors))
    return model


def _bytes_read(model: Any) -> int:
    """As for our own targets: all weights, but for an embedding that is not the head as well."""
    parameters: set[nn.Parameter] = set(model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:
        parameters.discard(embedding)
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


# llama.cpp


@peers.register("llama-cpp-python", "llama.cpp")
class LlamaCpp(Peer):
    """llama.cpp on the quantised file itself. Its Python binding knows no batches: prompts come one after the other."""

    name = "llama-cpp-python"

    def __init__(self, model: Any, file_bytes: int) -> None:
        self.model = model
        self.pass_bytes = file_bytes

    @classmethod
    def open(cls, options: PeerOptions) -> Self:
        path = Path(options.model).expanduser()
        if path.suffix != ".gguf":
            raise PeerUnavailable(f"it reads .gguf files only, and {path} is none")
        library = _import("llama_cpp", "llama-cpp-python")
        threads = options.threads
        on_device = -1 if options.device.type == "cuda" else 0
        model = library.Llama(
            str(path), n_ctx=options.max_len, n_threads=threads, n_gpu_layers=on_device, verbose=False
        )
        return cls(model, path.stat().st_size)

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        clock = _Clock()
        firsts, tokens = [], []
        for prompt in prompts:
            self.model.reset()
            answer: list[int] = []
            for token in self.model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
                if not answer:
                    firsts.append(clock.now())
                answer.append(int(token))
                if len(answer) == max_tokens:
                    break
            tokens.append(answer)
        return Timing(clock.now(), sum(firsts) / len(firsts), max_tokens * len(prompts), tokens)

    def close(self) -> None:
        self.model.close()
