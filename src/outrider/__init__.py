"""Outrider: speculative decoding for any target with any drafter, and output that is the target's own.
What is exported is imported when it is first used: the version and the help of a command need no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.config import EngineConfig, SpeculativeConfig, WatchdogConfig
    from outrider.llm import LLM
    from outrider.outputs import CompletionOutput, RequestOutput
    from outrider.sampling_params import Guided, SamplingParams, Speculation

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Guided",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "SpeculativeConfig",
    "WatchdogConfig",
]
__version__ = "0.1.0"

_MODULES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "Guided": "sampling_params",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "Speculation": "sampling_params",
    "SpeculativeConfig": "config",
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
