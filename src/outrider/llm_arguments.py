"""Arguments of LLM that vLLM has and EngineConfig does not: what they come to before anything is opened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.chat_template import template_text as template_text  # found here by LLM
from outrider.compatibility.llm import LLM as RULES
from outrider.config import SpeculativeConfig
from outrider.hub import TOKENIZER_PATTERNS, Hub, located
from outrider.pair import AUTO, Speculative
from outrider.sampling_params import MAX_LOGPROBS

_SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_FETCHING = ("revision", "tokenizer_revision", "download_dir", "hf_token")


@dataclass(frozen=True)
class Named:
    """What is opened: the model, its tokenizer, its drafter."""

    model: str | Path | None
    tokenizer: str | Path | None
    speculative: Speculative


def settle(named: Named, others: Mapping[str, Any], llm: Callable[..., Any]) -> tuple[Named, dict[str, Any]]:
    """What `others`, all of them vLLM's, make of the names; and what is left of them, in the names of EngineConfig."""
    own = inspect.signature(llm).parameters
    given = RULES.settle(others, "LLM", own)
    hub = Hub(download_dir=given.get("download_dir"), token=given.get("hf_token"))
    model = _fetched(named.model, replace(hub, revision=given.get("revision")), None)
    revision = given.get("tokenizer_revision")
    tokenizer = _fetched(named.tokenizer, replace(hub, revision=revision), TOKENIZER_PATTERNS)
    if (given.get("max_logprobs") or 0) > MAX_LOGPROBS:
        raise ValueError(f"max_logprobs is {given['max_logprobs']}; {MAX_LOGPROBS} are the most that can be asked for")
    settled = Named(model, tokenizer, _speculative(named.speculative, given))
    done = {*_SPECULATIVE, *_FETCHING, "max_logprobs"}
    return settled, {name: value for name, value in given.items() if name not in done and value is not None}


def settle_files(model: str | Path | None, given: Mapping[str, Any]) -> tuple[str | Path | None, str | Path | None]:
    """Where model and tokenizer are, for a server that was told in the same names."""
    named, _ = settle(Named(model, given.get("tokenizer"), None), _others(given), lambda: None)
    if named.tokenizer is None:
        return named.model, None
    return named.model, located(named.tokenizer, patterns=TOKENIZER_PATTERNS)


def _others(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "tokenizer"}


def _fetched(name: str | Path | None, hub: Hub, patterns: list[str] | None) -> str | Path | None:
    if name is None or hub.is_usual:
        return name
    return located(name, hub) if patterns is None else located(name, hub, patterns)


def _speculative(given: Speculative, others: Mapping[str, Any]) -> Speculative:
    """speculative_config with vLLM's short forms of it, spec_method and the like."""
    short = {_SPECULATIVE[name]: others[name] for name in _SPECULATIVE if others.get(name) is not None}
    if not short:
        return given
    if isinstance(given, SpeculativeConfig):
        return replace(given, **short)
    if given is None or given == AUTO:
        return short
    assert not isinstance(given, str), given
    return {**given, **short}


def dtype_name(dtype: str | torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def length_of(max_model_len: int | str | None) -> int | None:
    """vLLM says "auto" or -1 for what the model and the memory allow."""
    if max_model_len in (None, "auto", -1):
        return None
    if not isinstance(max_model_len, int) or isinstance(max_model_len, bool):
        raise ValueError(f"max_model_len must be a whole number, or auto, not {max_model_len!r}")
    return max_model_len


class EngineArgs:
    """Arguments of an LLM that is opened later: LLM.from_engine_args, AsyncLLM.from_engine_args, LLM(**vars(...))."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __repr__(self) -> str:
        return f"EngineArgs({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


AsyncEngineArgs = EngineArgs
