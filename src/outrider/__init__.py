"""Outrider: speculative decoding for any target with any drafter, and output that is the target's own."""

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
