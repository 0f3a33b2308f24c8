"""What the user chose. Frozen; derived values are properties."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from outrider.compatibility.llm import SPECULATIVE, method_named

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}
CPU_ACTIVATIONS = ("auto", "int8", "float32")
KV_CACHE_DTYPES = ("auto", "fp8", "float16", "float32", "bfloat16")


@dataclass(frozen=True)
class Setting:
    """A setting of speculative_config that a method's class declares for itself: its default, which says of what kind
    it is, and the bounds of a number."""

    default: Any
    low: float = -math.inf
    high: float = math.inf

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError for a value of another kind, or out of bounds."""
        number = type(self.default) in (int, float)
        kind = (int, float) if type(self.default) is float else type(self.default)
        fits = isinstance(value, kind) and isinstance(value, bool) == isinstance(self.default, bool)
        if not fits and not number:
            raise ValueError(f"{name} must be of the kind of {self.default!r}, its default, not {value!r}")
        if not fits or (number and not self.low <= value <= self.high):
            what = "a whole number" if type(self.default) is int else "a number"
            bounds = (f" from {self.low:g}" if self.low > -math.inf else "") + (
                f" to {self.high:g}" if self.high < math.inf else ""
            )
            raise ValueError(f"{name} must be {what}{bounds}, not {value!r}")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Which drafter rides ahead, in the names of vLLM's speculative_config."""

    method: str | None = None  # None: read from the checkpoint
    model: str | None = None
    num_speculative_tokens: int = 5
    force: bool = False  # use it even if it does not agree with the target at all, and draft as much as possible
    adaptive: bool = True  # draft as much as is worth it: rounds are timed, and what they bring is counted
    taps: tuple[int, ...] | None = None  # overrides what the checkpoint says: tap i is the state after i layers
    quantization: str | None = None  # as of an EngineConfig, for the drafter's own matrices
    kv_cache_dtype: str = "auto"  # as of an EngineConfig, for the drafter's own pages
    synthetic_acceptance_length: float | None = None  # for measuring rounds: accept so much, right or wrong
    synthetic_acceptance_rates: tuple[float, ...] | None = None  # the same for each token, of one request after another
    parallel_drafting: bool = False  # all draft tokens in one pass, by a checkpoint that was trained for it
    draft_tensor_parallel_size: int | None = None  # 1: whole on every rank; None: by its size, or split as the target
    more: tuple[tuple[str, Any], ...] = ()  # settings that only the method's class may know: see own()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculativeConfig:
        known = {item.name for item in fields(cls)} - {"more"}
        values = dict(values)
        pairs = values.pop("more", ())  # where asdict() has made the values
        if not isinstance(pairs, list | tuple) or not all(isinstance(pair, list | tuple) for pair in pairs):
            _refuse_unknown(["more"], known)
        values |= dict(pairs)
        foreign = values.keys() & set(SPECULATIVE.names()) - known
        SPECULATIVE.settle({name: values[name] for name in sorted(foreign)}, "speculative_config")
        values = {name: value for name, value in values.items() if name not in foreign}
        more = {name: values[name] for name in sorted(set(values) - known)}
        if more and not {"method", "model"} & set(values):  # there is nobody who could know them
            _refuse_unknown(more, known)
        values = {name: value for name, value in values.items() if name in known} | {"more": tuple(more.items())}
        for name in ("method", "model"):
            if not isinstance(values.get(name), str | Path | None):
                raise ValueError(f"speculative_config: {name} must be a name or a path, not {values[name]!r}")
        if values.get("method") is not None:
            values = {**values, "method": method_named(str(values["method"]))}
        if values.get("taps") is not None:
            if not isinstance(values["taps"], list | tuple):
                raise ValueError(f"speculative_config: taps must be a list of layer counts, not {values['taps']!r}")
            values = {**values, "taps": tuple(values["taps"])}
        if isinstance(values.get("synthetic_acceptance_rates"), list):
            values = {**values, "synthetic_acceptance_rates": tuple(values["synthetic_acceptance_rates"])}
        return cls(**values)

    def own(self, declared: Mapping[str, Any]) -> dict[str, Any]:
        """What was said of the settings that a method's class declares, or else their defaults, checked. `declared`: a
        Setting of each name, or a default alone."""
        said, found = dict(self.more), {}
        for name, given in declared.items():
            setting = given if isinstance(given, Setting) else Setting(given)
            found[name] = said.get(name, setting.default)
            setting.check(name, found[name])
        return found

    def refuse_unknown(self, declared: Iterable[str]) -> None:
        """Raises ValueError for settings that are neither ours nor declared by the method's class."""
        unknown = [name for name, _ in self.more if name not in declared]
        if unknown:
            _refuse_unknown(unknown, {item.name for item in fields(self)} - {"more"} | set(declared))

    @property
    def is_synthetic(self) -> bool:
        """Whether acceptance is made up."""
        return self.synthetic_acceptance_length is not None or self.synthetic_acceptance_rates is not None

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 64:
            raise ValueError(f"num_speculative_tokens must be a whole number from 1 to 64, not {count!r}")
        if not isinstance(self.parallel_drafting, bool):
            raise ValueError(f"parallel_drafting must be true or false, not {self.parallel_drafting!r}")
        length = self.synthetic_acceptance_length
        if length is not None and not (isinstance(length, int | float) and 1 <= length <= 65):
            raise ValueError(f"synthetic_acceptance_length must be a number from 1 to 65, not {length!r}")
        rates = self.synthetic_acceptance_rates
        if rates is not None:
            if length is not None:
                raise ValueError("synthetic_acceptance_length and synthetic_acceptance_rates both make up acceptance")
            if not rates or not all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates):
                raise ValueError(f"synthetic_acceptance_rates must be numbers from 0 to 1, not {rates!r}")
        for name in ("force", "adaptive"):
            if not isinstance(vars(self)[name], bool):
                raise ValueError(f"{name} must be true or false, not {vars(self)[name]!r}")
        _check_kv_cache_dtype(self.kv_cache_dtype)
        if self.method is None and self.model is None:
            raise ValueError('speculative_config needs a "method" (e.g. ngram) or a "model" (a drafter checkpoint)')


def _check_kv_cache_dtype(name: str) -> None:
    if name not in KV_CACHE_DTYPES:
        raise ValueError(f"unknown kv_cache_dtype {name!r}; known: {', '.join(KV_CACHE_DTYPES)}")


def _refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    raise ValueError(f"speculative_config does not know {', '.join(names)}; it takes {', '.join(sorted(known))}")


@dataclass(frozen=True)
class WatchdogConfig:
    """When acceptance counts as dead, and what is done then. Rounds without a draft do not count."""

    dead_acceptance: float = 0.1  # accepted draft tokens a round: below, drafting costs more than it can ever bring
    suspicious_share: float = 0.98  # accepted share of drafts: above, a text is in a loop, or the judge is broken
    window: int = 16  # rounds that the average of a request looks back on; nothing accepted: dead after 36
    engine_window: int = 64  # the same for all requests together
    pause: int = 64  # plain rounds after which a request that has died tries drafts again; twice as many the next time

    def __post_init__(self) -> None:
        for name in ("window", "engine_window", "pause"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"watchdog: {name} must be a whole number of at least 1, not {value!r}")
        if not 0 < self.dead_acceptance < 0.5:
            raise ValueError(f"watchdog: dead_acceptance must be above 0 and below 0.5, not {self.dead_acceptance!r}")
        if not 0 < self.suspicious_share <= 1:
            raise ValueError(f"watchdog: suspicious_share must be above 0, at most 1, not {self.suspicious_share!r}")


@dataclass(frozen=True)
class BatchLimits:
    """How much is computed at once where the user does not say."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_LIMITS, GPU_LIMITS = BatchLimits(16, 512), BatchLimits(256, 8192)


def batch_limits(device: str) -> BatchLimits:
    """What suits a device."""
    return CPU_LIMITS if device_of(device).type == "cpu" else GPU_LIMITS


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        num_devices = torch.cuda.device_count()
        raise ValueError(f"there is no device {name}, {num_devices} CUDA devices are visible: use another, or cpu")
    return device


@dataclass(frozen=True)
class EngineConfig:
    model: str | Path
    speculative: SpeculativeConfig | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = CPU_LIMITS.max_num_seqs
    max_num_batched_tokens: int = CPU_LIMITS.max_num_batched_tokens
    page_size: int = 16
    kv_cache_memory: int | None = None  # bytes; None: what the longest allowed requests need, within a share of memory
    gpu_memory_utilization: float = 0.9  # of a GPU's memory, for weights, activations and cache together
    enable_prefix_caching: bool = True
    num_snapshots: int | None = None  # of recurrent states, for reuse; 0: none; None: within a share of memory
    snapshot_interval: int = 256  # tokens from one to the next, as a text goes on
    num_predicted_tokens: int = 16  # drafted at once from a request's own prediction, at most
    watchdog: WatchdogConfig | None = WatchdogConfig()
    enforce_eager: bool = False  # no CUDA graphs
    quantization: str | None = None  # how the target is quantised; on a GPU, dense matrices can be rounded to fp8, int4
    kv_cache_dtype: str = "auto"  # of keys and values: fp8 on a GPU, float16 or float32 on a CPU; auto: cache_dtype.py
    cpu_activations: str = "auto"  # what GGUF matrices are multiplied by on a CPU: int8 (auto, if it pays) or float32
    exact: bool = False  # on a GPU too, no token depends on what else is computed with it, to the last bit
    threads: int | None = None  # of the CPU, for the whole process; None: as many as the machine has to spare
    tokenizer: str | Path | None = None  # None: the one that comes with the model
    skip_tokenizer_init: bool = False  # without any: prompts and answers are token ids
    tensor_parallel_size: int = 1  # processes that share every layer
    pipeline_parallel_size: int = 1  # stages, each with some of the layers, and with so many processes

    def __post_init__(self) -> None:
        if not 0 <= self.num_predicted_tokens <= 1024:
            raise ValueError(f"num_predicted_tokens must be from 0 to 1024, not {self.num_predicted_tokens!r}")
        if self.num_snapshots is not None and (not isinstance(self.num_snapshots, int) or self.num_snapshots < 0):
            raise ValueError(f"num_snapshots must be a whole number, 0 for none, not {self.num_snapshots!r}")
        sizes = ("max_num_seqs", "max_num_batched_tokens", "page_size", "snapshot_interval")
        for name in (*sizes, "tensor_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0, at most 1, not {self.gpu_memory_utilization!r}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len!r}")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: auto, {', '.join(DTYPES)}")
        _check_kv_cache_dtype(self.kv_cache_dtype)
        if self.cpu_activations not in CPU_ACTIVATIONS:
            known = ", ".join(CPU_ACTIVATIONS)
            raise ValueError(f"unknown cpu_activations {self.cpu_activations!r}; known: {known}")

    @property
    def num_ranks(self) -> int:
        """Processes that compute together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def torch_device(self) -> torch.device:
        return device_of(self.device)

    def torch_dtype(self, stored: str | None) -> torch.dtype:
        """The chosen dtype; "auto" is float32 on a CPU (fast and exact there), else what the checkpoint stores."""
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        if self.torch_device.type == "cpu":
            return torch.float32
        return DTYPES.get((stored or "bfloat16").removeprefix("torch."), torch.bfloat16)


def config_to_json(config: EngineConfig) -> dict[str, Any]:
    """A configuration as JSON, for another process."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}


def config_from_json(values: dict[str, Any]) -> EngineConfig:
    speculative, watchdog = values["speculative"], values["watchdog"]
    known = {**values, "speculative": None, "watchdog": None}
    if speculative is not None:
        lists = {name: tuple(value) for name, value in speculative.items() if isinstance(value, list)}
        known["speculative"] = SpeculativeConfig(**{**speculative, **lists})
    if watchdog is not None:
        known["watchdog"] = WatchdogConfig(**watchdog)
    return EngineConfig(**known)
