"""Options that name a target and a drafter and say how to run them: the same in all commands, declared once.
A command reads an EngineConfig from them; whatever can be found wrong without loading a weight is refused here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.commands import length, option

if TYPE_CHECKING:
    from outrider.config import EngineConfig, SpeculativeConfig

MODEL_VARIABLE = "OUTRIDER_MODEL"
MODEL, DRAFTER, ENGINE, SAMPLING, OUTPUT = "Model", "Drafter", "Engine", "Sampling", "Output"

_MODEL_HELP = "Target: a directory, a .gguf file or a hub id. Without it, OUTRIDER_MODEL, or the embedded model."
_DRAFT_HELP = "Drafter: a directory, a hub id, or a method that needs no checkpoint, such as ngram."
_CONFIG_HELP = "The drafter with all its settings, in vLLM's names."
_FORCE_HELP = "Use the drafter even if it agrees with nothing, and draft as much as possible."
_ADAPTIVE_HELP = "Always draft as much as possible, also where it does not pay."
_THREADS_HELP = "Threads of the CPU. By default, one for every processor that others leave."
_LENGTH_HELP = "Longest context, prompt and answer together; as 4096 or 4k."
_QUANTIZATION_HELP = "How the target is quantised. On a GPU a dense one can be rounded to fp8 or int4."
_KV_DTYPE_HELP = "Of keys and values: on a GPU fp8, on a CPU float16 (auto for GGUF) or float32; auto: as the model."
_RANKS_HELP = "Processes, each with a GPU if there are as many, that share every layer."
_STAGES_HELP = "Stages, each with some of the layers and as many processes as share them."
_ACTIVATIONS_HELP = "What GGUF matrices are multiplied by on a CPU: int8 (auto, where it pays) or float32."
_EXACT_HELP = "On a GPU: the bits of a token do not depend on what else is computed with it."
_CHAT_HELP = "Put prompts through the chat template. By default, if the model has one."
_PROMPTS_HELP = 'JSONL with "prompt", "turns" or "prompt_token_ids" on each line.'

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="The target; the same as --model.")]
DrafterArgument = Annotated[str | None, typer.Argument(metavar="DRAFTER", help="The drafter; the same as --draft.")]
Model = Annotated[str | None, option(MODEL, "--model", "-m", metavar="M", help=_MODEL_HELP)]
Draft = Annotated[str | None, option(DRAFTER, "--draft", "-d", metavar="D", help=_DRAFT_HELP)]
NoDraft = Annotated[bool, option(DRAFTER, "--no-draft", help="Decode plainly, without any drafter.")]
SpeculativeJson = Annotated[str | None, option(DRAFTER, "--speculative-config", metavar="JSON", help=_CONFIG_HELP)]
NumSpeculativeTokens = Annotated[
    int | None, option(DRAFTER, "--num-speculative-tokens", "-k", metavar="K", help="Tokens to draft a round, at most.")
]
Force = Annotated[bool, option(DRAFTER, "--force", help=_FORCE_HELP)]
NoAdaptive = Annotated[bool, option(DRAFTER, "--no-adaptive", help=_ADAPTIVE_HELP)]
Dtype = Annotated[str, option(ENGINE, "--dtype", metavar="NAME", help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, option(ENGINE, "--device", metavar="NAME", help="cpu, cuda, cuda:N or auto.")]
MaxModelLen = Annotated[int | None, option(ENGINE, "--max-model-len", metavar="N", help=_LENGTH_HELP, parser=length)]
Threads = Annotated[int | None, option(ENGINE, "--threads", metavar="N", help=_THREADS_HELP, min=1)]
Quantization = Annotated[str | None, option(ENGINE, "--quantization", metavar="NAME", help=_QUANTIZATION_HELP)]
KvCacheDtype = Annotated[str, option(ENGINE, "--kv-cache-dtype", metavar="NAME", help=_KV_DTYPE_HELP)]
CpuActivations = Annotated[str, option(ENGINE, "--cpu-activations", metavar="NAME", help=_ACTIVATIONS_HELP)]
Exact = Annotated[bool, option(ENGINE, "--exact", help=_EXACT_HELP)]
Eager = Annotated[bool, option(ENGINE, "--enforce-eager", help="On a GPU: no CUDA graphs.")]
TensorParallelSize = Annotated[int, option(ENGINE, "--tensor-parallel-size", metavar="N", help=_RANKS_HELP, min=1)]
PipelineParallelSize = Annotated[int, option(ENGINE, "--pipeline-parallel-size", metavar="M", help=_STAGES_HELP, min=1)]
PromptFile = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help=_PROMPTS_HELP, exists=True, dir_okay=False)
]
ChatTemplate = Annotated[bool | None, typer.Option("--chat/--no-chat", help=_CHAT_HELP, show_default=False)]


def remember(ctx: typer.Context, parameter: typer.CallbackParam, value: bool) -> bool:
    """A flag is kept where Commands finds it, also when it comes after the sub-command's name."""
    if value:
        ctx.meta[str(parameter.name)] = True
    return value


AsJson = Annotated[bool, option(OUTPUT, "--json", help="Print one JSON object and nothing else.")]
NoColor = Annotated[bool, option(OUTPUT, "--no-color", help="Plain text, as with NO_COLOR set.", callback=remember)]


@dataclass(frozen=True)
class EngineOptions:
    """Which target with which drafter, and how they run."""

    model: Model = None
    draft: Draft = None
    no_draft: NoDraft = False
    speculative_config: SpeculativeJson = None
    num_speculative_tokens: NumSpeculativeTokens = None
    force: Force = False
    no_adaptive: NoAdaptive = False
    dtype: Dtype = "auto"
    device: Device = "auto"
    max_model_len: MaxModelLen = None
    threads: Threads = None
    quantization: Quantization = None
    kv_cache_dtype: KvCacheDtype = "auto"
    cpu_activations: CpuActivations = "auto"
    exact: Exact = False
    enforce_eager: Eager = False
    tensor_parallel_size: TensorParallelSize = 1
    pipeline_parallel_size: PipelineParallelSize = 1

    def named(self, model: str | None, drafter: str | None = None, *, needs_model: bool = True) -> EngineOptions:
        """With names that were given without an option's: `outrider serve MODEL`. Where no target is named, and one is
        needed, the environment may name it."""
        found = _one_of(self.model, model, "--model", "MODEL")
        return replace(
            self,
            model=found if found is not None or not needs_model else os.environ.get(MODEL_VARIABLE) or None,
            draft=_one_of(self.draft, drafter, "--draft", "DRAFTER"),
        )

    def config(self, *, default_method: str | None = None, **settings: Any) -> EngineConfig:
        """Everything that was chosen; `settings` are those that a command decides itself. `default_method` drafts where
        neither the options nor the model name a drafter. How much is computed at once suits the device."""
        from outrider.config import EngineConfig, batch_limits
        from outrider.pair import named_pair
        from outrider.preflight import check_drafter

        given = self._speculative_values()
        target, speculative = named_pair(self.model, given)
        if speculative is None and default_method is not None and not self.no_draft:
            speculative = named_pair(self.model, {"method": default_method})[1]
        chosen = {
            **vars(batch_limits(self.device)),
            "max_model_len": self.max_model_len,
            "threads": self.threads,
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "cpu_activations": self.cpu_activations,
            "exact": self.exact,
            "enforce_eager": self.enforce_eager,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        config = EngineConfig(
            model=target,
            speculative=self._adjusted(speculative),
            dtype=self.dtype,
            device=self.device,
            **{**chosen, **settings},
        )
        check_drafter(config)
        return config

    def arguments(self) -> list[str]:
        """These choices as arguments of another command."""
        named = {
            "--model": self.model,
            "--draft": self.draft,
            "--speculative-config": self.speculative_config,
            "--num-speculative-tokens": self.num_speculative_tokens,
            "--dtype": self.dtype,
            "--device": self.device,
            "--max-model-len": self.max_model_len,
            "--threads": self.threads,
            "--quantization": self.quantization,
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--tensor-parallel-size": self.tensor_parallel_size if self.tensor_parallel_size > 1 else None,
            "--pipeline-parallel-size": self.pipeline_parallel_size if self.pipeline_parallel_size > 1 else None,
            "--cpu-activations": self.cpu_activations,
        }
        flags = {
            "--no-draft": self.no_draft,
            "--force": self.force,
            "--no-adaptive": self.no_adaptive,
            "--exact": self.exact,
            "--enforce-eager": self.enforce_eager,
        }
        values = [part for name, value in named.items() if value is not None for part in (name, str(value))]
        return values + [name for name, is_set in flags.items() if is_set]

    def _speculative_values(self) -> dict[str, Any] | str | None:
        """The drafter that was asked for, as `speculative_config`; "auto": the one that comes with the model."""
        from outrider.pair import AUTO, DEFAULT_DIRECTORY
        from outrider.preflight import draft_values

        named = {
            "--draft": self.draft is not None,
            "--speculative-config": self.speculative_config is not None,
            "--no-draft": self.no_draft,
        }
        given = [name for name, is_given in named.items() if is_given]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} contradict each other: give one of them")
        if self.no_draft:
            return None
        if self.draft is not None:
            return draft_values(self.draft)
        if self.speculative_config is None:
            return AUTO
        values = _parse(self.speculative_config)
        if self.model is None and not {"method", "model"} & values.keys():
            values["model"] = str(DEFAULT_DIRECTORY / "drafter")
        return values

    def _adjusted(self, speculative: SpeculativeConfig | None) -> SpeculativeConfig | None:
        """speculative_config with what other options say about the drafter."""
        changes = {
            "--num-speculative-tokens": ("num_speculative_tokens", self.num_speculative_tokens),
            "--force": ("force", True if self.force else None),
            "--no-adaptive": ("adaptive", False if self.no_adaptive else None),
        }
        wanted = {option: change for option, change in changes.items() if change[1] is not None}
        if speculative is None and wanted:
            raise ValueError(f"{' and '.join(wanted)} needs a drafter: add --draft, or leave it out")
        values: dict[str, Any] = dict(wanted.values())
        return replace(speculative, **values) if speculative is not None else None


def _one_of(first: str | None, second: str | None, option: str, argument: str) -> str | None:
    if first is not None and second is not None and first != second:
        raise ValueError(f"{option} {first} and {argument} {second} contradict each other: give one of them")
    return first if first is not None else second


def _parse(text: str) -> dict[str, Any]:
    example = """'{"method": "ngram", "num_speculative_tokens": 5}'"""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--speculative-config is not valid JSON ({error}); write it like {example}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--speculative-config must be a JSON object, not {text}; write it like {example}")
    return values
