"""Hugging Face transformers as a peer: eager, compiled over a static cache, with prompt lookup, in a stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import nn

from outrider.bench.peers import Clock, Peer, PeerOptions, PeerUnavailable, import_peer, peers
from outrider.bench.sides import Prompts, Timing
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.types import Checkpoint

BLOCK_SIZE = 256  # tokens, of transformers' paged cache
NUM_LOOKED_UP = 10  # tokens that prompt lookup drafts


@peers.register("transformers")
class Transformers(Peer):
    """`generate`: greedy, batched with left padding, no end-of-text token."""

    name = "transformers"
    required = True

    def __init__(self, library: ModuleType, model: Any, max_len: int) -> None:
        """`max_len`: of the longest prompt with its answer."""
        self._library, self._max_len = library, max_len
        self.model = model.eval()
        self.pass_bytes = _bytes_read(model)
        # An end-of-text token must neither end an answer nor be avoided: every side generates what the model says.
        self.model.generation_config = library.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    @classmethod
    def open(cls, options: PeerOptions) -> Self:
        library = import_peer("transformers", "transformers")
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
        return cls(library, model.to(options.device), options.max_len)

    @torch.no_grad()
    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        width = max(len(ids) for ids in prompts)
        device = self.model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        options = self._options(len(prompts))
        clock = Clock()
        criteria = self._library.StoppingCriteriaList([_noting(clock, self._library)])
        output = self.model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            stopping_criteria=criteria,
            **options,
        )
        tokens = output[:, width:].tolist()
        seconds = clock.now()
        assert all(len(answer) == max_tokens for answer in tokens), "an answer of another length"
        first = clock.first or seconds
        steady = len(prompts) * (max_tokens - 1) / (seconds - first) if max_tokens > 1 else None
        return Timing(seconds, first, max_tokens, tokens, steady=steady)

    def _options(self, batch_size: int) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        del self.model


@peers.register("transformers-compiled")
class Compiled(Transformers):
    """A cache of one fixed size lets transformers compile the forward pass, on a GPU into CUDA graphs."""

    name = "transformers-compiled"

    def __init__(self, library: ModuleType, model: Any, max_len: int) -> None:
        super().__init__(library, model, max_len)
        self._caches: dict[int, Any] = {}  # by batch size: another cache would mean compiling again

    def _options(self, batch_size: int) -> dict[str, Any]:
        if batch_size not in self._caches:
            self._caches[batch_size] = self._library.StaticCache(self.model.config, max_cache_len=self._max_len)
        self._caches[batch_size].reset()
        return {"past_key_values": self._caches[batch_size]}

    def close(self) -> None:
        self._caches.clear()
        super().close()


@peers.register("transformers-lookup")
class Lookup(Transformers):
    """Prompt lookup: what followed the same few tokens before is drafted. One prompt at a time: it knows no batches."""

    name = "transformers-lookup"

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        if len(prompts) > 1:
            raise PeerUnavailable(f"{self.name} answers one prompt at a time, not {len(prompts)}: use batch 1")
        return super().answer(prompts, max_tokens)

    def _options(self, batch_size: int) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": NUM_LOOKED_UP}


@peers.register("transformers-continuous")
class Continuous(Transformers):
    """Continuous batching, with its memory and its graphs kept from call to call."""

    name = "transformers-continuous"

    def __init__(self, library: ModuleType, model: Any, max_len: int) -> None:
        super().__init__(library, model, max_len)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it would warn in every call

    @torch.no_grad()
    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        settings = self._library.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max_tokens
        )
        # like ours: prompts that come again in every run must be read in every run
        cache: dict[str, Any] = {"allow_block_sharing": False}
        if self.model.device.type == "cpu":  # where it would take nearly all of the memory
            cache["num_blocks"] = 2 * len(prompts) * (1 + self._max_len // BLOCK_SIZE)
        options = {
            "continuous_batching_config": self._library.ContinuousBatchingConfig(**cache),
            "record_timestamps": True,
            "persistent_manager": True,
        }
        clock = Clock()
        made = self.model.generate_batch(inputs=[list(ids) for ids in prompts], generation_config=settings, **options)
        seconds = clock.now()
        outputs = list(made.values())
        tokens = [list(output.generated_tokens) for output in outputs]
        assert [len(answer) for answer in tokens] == [max_tokens] * len(prompts), "an answer is missing or too short"
        stamps = [list(output.timestamps or ()) for output in outputs]
        first = seconds
        if all(stamps):  # its thread takes time to end, which is nobody's waiting time
            seconds = max(times[-1] for times in stamps) - clock.begin
            first = sum(times[0] - clock.begin for times in stamps) / len(stamps)
        return Timing(seconds, first, max_tokens, tokens, steady=steady_rate(stamps))

    def close(self) -> None:
        self.model.destroy_cached_continuous_batching_manager()
        super().close()


def steady_rate(stamps: Sequence[Sequence[float]]) -> float | None:
    """Tokens a second between the moment when the last request begins to answer and the one when the first ends."""
    if not all(stamps):
        return None
    begin, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    made = sum(begin < stamp <= end for times in stamps for stamp in times)
    return made / (end - begin) if made and end > begin else None


def _noting(clock: Clock, library: ModuleType) -> Any:
    """A stopping criterion that never stops, but is asked after every token."""

    class Noting(library.StoppingCriteria):  # type: ignore[name-defined,misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
            if clock.first is None:
                int(input_ids[0, -1])  # waits for the device
                clock.first = clock.now()
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
