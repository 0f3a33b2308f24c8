"""Outrider: speculative decoding for any target with any drafter, and output that is the target's own.
What is exported is imported when it is first used: the version and the help of a command need no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.async_llm import AsyncLLM
    from outrider.config import EngineConfig, SpeculativeConfig, WatchdogConfig
    from outrider.inputs import PromptType, TextPrompt, TokensPrompt
    from outrider.llm import LLM
    from outrider.llm_arguments import AsyncEngineArgs, EngineArgs
    from outrider.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from outrider.sampling_params import (
        BeamSearchParams,
        Guided,
        RequestOutputKind,
        SamplingParams,
        Speculation,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "Guided",
    "Logprob",
    "PromptType",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Speculation",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WatchdogConfig",
]
__version__ = "0.1.0"

_MODULES = {
    "AsyncEngineArgs": "llm_arguments",
    "AsyncLLM": "async_llm",
    "BeamSearchParams": "sampling_params",
    "CompletionOutput": "outputs",
    "EngineArgs": "llm_arguments",
    "EngineConfig": "config",
    "Guided": "sampling_params",
    "LLM": "llm",
    "Logprob": "outputs",
    "PromptType": "inputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "Speculation": "sampling_params",
    "SpeculativeConfig": "config",
    "StructuredOutputsParams": "sampling_params",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "WatchdogConfig": "config",
}


if not TYPE_CHECKING:  # a type checker that saw it would believe in any name

    def __getattr__(name: str) -> object:
        """Called by Python for a name that the module does not have yet."""
        if name not in _MODULES:
            raise AttributeError(f"module 'outrider' has no attribute {name!r}")
        value: object = vars(import_module(f"outrider.{_MODULES[name]}"))[name]
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
