"""From names to a running engine: which target, which drafter, whether both fit, then weights and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from outrider.checkpoints.gguf import GgufCheckpoint
from outrider.checkpoints.loader import (
    Forms,
    KeptBlocks,
    Progress,
    build_drafter,
    build_target,
    building,
    can_keep_blocks,
    keeps_few_bits,
    load_weights,
    stored_bytes,
    weights_in_target,
)
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafters.base import Drafter
from outrider.drafters.predicted import with_predictions
from outrider.engine.cache import NUM_MISSABLE
from outrider.engine.cache_dtype import choose_pages, take_scales
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.engine.memory import Budget, Demand, plan_memory
from outrider.engine.stages import AbsentDrafter, split_layers
from outrider.engine.team import Team, device_for
from outrider.engine.workers import Workers, return_workers, take_workers
from outrider.kernels import native_library
from outrider.kernels.quantised import ROUNDED_TO, Kind
from outrider.layers.cached import recurrent_layers
from outrider.layers.exact import make_exact
from outrider.layers.linear import deferred
from outrider.layers.moe import route_in_one_launch
from outrider.layers.norm import norm_on_the_way
from outrider.layers.packing import Packing, gains_from_packing, held_bytes, packing_of, share_blocks
from outrider.layers.split import split_over
from outrider.models.base import Target
from outrider.preflight import refuse_drafter
from outrider.startup import StartupTimes
from outrider.threads import threads
from outrider.tokenizer_choice import check_same_tokenizer, end_ids_of, tokenizer_of
from outrider.types import Checkpoint

SMALL_DRAFTER = 2**29  # parameters
DEFAULT_DIRECTORY = Path(__file__).parent / "default"
EMBEDDED_DRAFTERS = {"eagle3": "drafter", "dflash": "dflash"}  # by method, where they are; the first is the usual one
AUTO = "auto"  # speculative_config: the drafter that comes with the model, if one does

Speculative = SpeculativeConfig | Mapping[str, Any] | str | None


def named_pair(model: str | Path | None, given: Speculative) -> tuple[str | Path, SpeculativeConfig | None]:
    """The target and the drafter that are meant. Without a model, the embedded ones; a drafter in speculators' format
    may be named as the model: it says itself which target it was trained for."""
    if model is None:
        settings = _speculative(given, str(DEFAULT_DIRECTORY / "drafter"))
        if settings is not None and settings.model is None and settings.method in EMBEDDED_DRAFTERS:
            settings = replace(settings, model=str(DEFAULT_DIRECTORY / EMBEDDED_DRAFTERS[settings.method]))
        return DEFAULT_DIRECTORY / "target", settings
    if not Path(model).expanduser().is_file():  # a GGUF is a target
        checkpoint = open_checkpoint(model)
        checkpoint.close()
        speculators = checkpoint.config.get("speculators_config")
        if speculators is not None:
            return _named_by_drafter(model, speculators, given)
        refuse_drafter(model, checkpoint.config)
    return model, _speculative(given, None)


def target_of(model: str | Path | None) -> str | Path:
    """Where the target is that a user's choice of a model means."""
    return named_pair(model, None)[0]


def shown_name(model: str | Path) -> str:
    """What reports call a target."""
    return "embedded default" if Path(model) == DEFAULT_DIRECTORY / "target" else str(model)


def dtype_of(config: EngineConfig) -> torch.dtype:
    """What the target's weights are computed in."""
    checkpoint = open_checkpoint(config.model)
    checkpoint.close()
    return config.torch_dtype(_stored_dtype(checkpoint.config))


def _named_by_drafter(
    drafter: str | Path, speculators: Any, given: Speculative
) -> tuple[str | Path, SpeculativeConfig | None]:
    try:
        target = speculators["verifier"]["name_or_path"]
        proposals = speculators.get("proposal_methods") or [{}]
        count = proposals[0].get("speculative_tokens")
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{drafter} is a drafter whose speculators_config does not name its target (verifier.name_or_path): give "
            'the target as the model, and the drafter as "model" in speculative_config'
        ) from error
    if not target:
        raise ValueError(f"{drafter} is a drafter, and names no target: give the target as the model")
    settings = _speculative(given, str(drafter))
    if given == AUTO and settings is not None and count:
        settings = replace(settings, num_speculative_tokens=count)
    return target, settings


def _speculative(given: Speculative, own: str | None) -> SpeculativeConfig | None:
    """`own` is the drafter that comes with the model."""
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, str):
        if given != AUTO:
            raise ValueError(f'speculative_config must be a mapping, None or "auto", not {given!r}')
        return SpeculativeConfig(model=own) if own is not None else None
    return SpeculativeConfig.from_dict(dict(given))


def open_pair(
    config: EngineConfig, progress: Progress | None, startup: StartupTimes | None = None, team: Team | None = None
) -> tuple[Engine, Budget]:  # fmt: skip
    """Builds both models, checks that everything fits, and only then reads weights and takes memory. What its parts
    take is noted in `startup`. `team`: the ranks that this is one of; where more than one is asked for and there is
    none yet, they are started."""
    startup = startup or StartupTimes()
    if team is None and config.num_ranks > 1:
        return _open_with_workers(config, progress, startup)
    ranks = team.ranks if team is not None else None
    _use_threads(config)
    checkpoint = open_checkpoint(config.model)
    drafter_checkpoint: Checkpoint | None = None
    try:
        dtype = config.torch_dtype(_stored_dtype(checkpoint.config))
        drafter: Drafter | None = None
        kinds = {checkpoint: rounded_to(config.quantization, checkpoint)}
        if config.speculative is not None:
            if config.speculative.model is not None:
                drafter_checkpoint = open_checkpoint(config.speculative.model)
                kinds[drafter_checkpoint] = rounded_to(config.speculative.quantization, drafter_checkpoint)
            elif weights_in_target(config.speculative):
                drafter_checkpoint = checkpoint
        _check_activations(config, kinds)
        keeps = any(keeps_few_bits(source, config.torch_device, kind) for source, kind in kinds.items())
        # matrices of layers that are on other stages never get memory
        defers = deferred() if keeps or config.pipeline_parallel_size > 1 else nullcontext()
        with startup.timed("models"), building(config.torch_device, dtype), defers:
            with split_over(ranks):
                target = build_target(checkpoint)
            _check_dtype(config, target, dtype)
            if config.speculative is not None:
                with split_over(ranks if is_split(config, drafter_checkpoint, checkpoint) else None):
                    drafter = build_drafter(config.speculative, target, drafter_checkpoint)
                drafter.ranks = team.world if team is not None else None
        is_drafting = True
        if team is not None and team.num_stages > 1:
            split_layers(target, drafter, team)
            is_drafting = drafter is None or drafter.reads_tokens_only or team.stage == team.num_stages - 1
            if drafter is not None and not is_drafting:
                drafter = AbsentDrafter(drafter)
        with startup.timed("models"):
            tokenizer = tokenizer_of(config, checkpoint)
        if drafter is not None and drafter_checkpoint is not None and drafter.needs_tokenizer_of_target:
            check_same_tokenizer(tokenizer, load_tokenizer(drafter_checkpoint))
        loaded: list[tuple[Target | Drafter, Checkpoint]] = [(target, checkpoint)]
        if drafter is not None and drafter_checkpoint is not None and is_drafting:
            loaded.append((drafter, drafter_checkpoint))
        in_few_bits = {module for module, source in loaded if _is_tiled(config, module, source)}
        choose_pages(config, target, drafter, in_few_bits)
        bounded, demand = _bounded(config, target), demand_of(target, drafter)
        with startup.timed("weights"):
            if not keeps:
                budget = plan_memory(bounded, demand, _weight_bytes(loaded, config))
            _load(loaded, progress, kinds, config)
            for module, source in loaded:
                take_scales(module, source)
        held = held_bytes(*(module for module, _ in loaded))
        if keeps:  # what it comes to is known only now
            budget = plan_memory(bounded, demand, held)
        budget = replace(budget, weight_bytes=held, drafter_bytes=held - held_bytes(target))
        if team is not None:
            budget = agreed_budget(budget, team)
        if config.torch_device.type == "cpu":
            target.register_forward_pre_hook(lambda *_: threads.adjust())
        if config.exact:  # of the target alone: what a drafter says is judged
            make_exact(target)
        else:
            norm_on_the_way(target)
            route_in_one_launch(target)
        with startup.timed("cache"):
            predicting = _predicting(config, target, drafter)
            if predicting is not None:
                predicting.ranks = team.world if team is not None else None
            engine = Engine(config, target, Drafting.of(config, drafter, predicting), budget, tokenizer, team)
        if team is not None:
            team.agree([])  # that all have their memory
        engine.end_ids = end_ids_of(checkpoint, tokenizer)
        return engine, budget
    except Exception as error:
        if team is not None:
            team.fail(error)
        raise
    finally:
        checkpoint.close()
        if drafter_checkpoint is not None:
            drafter_checkpoint.close()


def _open_with_workers(config: EngineConfig, progress: Progress | None, startup: StartupTimes) -> tuple[Engine, Budget]:
    """The other ranks are processes of this engine, and end with it."""
    with startup.timed("ranks"):
        workers = take_workers(config)
    try:
        with workers.watched(ValueError):  # which all ranks have heard of
            device, _ = device_for(config, 0, workers.size)
            workers.open(config)
            engine, budget = open_pair(replace(config, device=device), progress, startup, workers.team)
    except ValueError:
        return_workers(workers)
        raise
    except BaseException:
        if isinstance(workers, Workers):
            workers.end()
        raise
    engine.workers = workers
    return engine, budget


def is_split(config: EngineConfig, drafter: Checkpoint | None, target: Checkpoint) -> bool:
    """Whether the drafter is split over ranks like the target; else all of it is on every rank. Where nobody says,
    small ones are not: what they would wait for each other is more than what they would read less."""
    assert config.speculative is not None
    asked, size = config.speculative.draft_tensor_parallel_size, config.tensor_parallel_size
    if asked not in (None, 1, size):
        raise ValueError(f"draft_tensor_parallel_size must be 1 or {size} (tensor_parallel_size), not {asked!r}")
    if asked is not None or drafter is None or drafter is target:
        return asked != 1
    return sum(math.prod(drafter.shape(name)) for name in drafter.names()) > SMALL_DRAFTER


def agreed_budget(budget: Budget, team: Team) -> Budget:
    """What every rank has room for."""
    mine = [budget.num_pages, budget.max_model_len, budget.num_snapshots]
    pages, length, snapshots = (min(each) for each in zip(*team.agree(mine), strict=True))
    return replace(budget, num_pages=pages, max_model_len=length, num_snapshots=snapshots)


def rounded_to(name: str | None, checkpoint: Checkpoint) -> Kind | None:
    """What matrices are rounded to as they are loaded. Of a checkpoint that is quantised already, the name
    is what somebody believes it to be; vLLM's kernels have suffixes, as in awq_marlin."""
    if name is None:
        return None
    is_gguf = isinstance(checkpoint, GgufCheckpoint)
    held = "gguf" if is_gguf else (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    if held is None and name in ROUNDED_TO:
        return Kind(name)
    if held is None or name.removesuffix("_marlin").replace("_", "-") != str(held).replace("_", "-"):
        found = f"quantised as {held}" if held else f"not quantised, and can be rounded to {' or '.join(ROUNDED_TO)}"
        raise ValueError(
            f"{checkpoint.path} is {found}, not {name}: leave quantization out, or give a checkpoint of that kind"
        )
    return None


def _load(
    loaded: Sequence[tuple[Target | Drafter, Checkpoint]],
    progress: Progress | None,
    kinds: Mapping[Checkpoint, Kind | None],
    config: EngineConfig,
) -> None:
    """Weights, in the forms that they are computed with. `kinds`: what matrices of each checkpoint are rounded to."""
    kept: KeptBlocks = {}
    for module, source in loaded:
        as_stored = _keeps_blocks(config, module, source)
        forms = Forms(kept, as_stored, _is_tiled(config, module, source), kinds[source], _packing(module))
        load_weights(module, source, progress, forms)
    for module, _ in loaded:
        share_blocks(module, kept)
        if isinstance(module, Drafter):
            module.check()


def _packing(module: Target | Drafter) -> Packing | None:
    with torch.inference_mode():
        return packing_of(module, halves=isinstance(module, Drafter))


def _keeps_blocks(config: EngineConfig, module: Target | Drafter, source: Checkpoint) -> bool:
    return can_keep_blocks(module, source, small_too=config.cpu_activations == "int8")


def _is_tiled(config: EngineConfig, module: Target | Drafter, source: Checkpoint) -> bool:
    """Whether matrices of a GGUF file that stay quantised are multiplied in whole numbers: it is what such files are
    made for, and several times as fast. Rows stay independent of each other, so what holds of floats holds here."""
    is_kept = isinstance(source, GgufCheckpoint) and _keeps_blocks(config, module, source)
    return is_kept and config.cpu_activations != "float32" and config.torch_device.type == "cpu"


def _check_activations(config: EngineConfig, checkpoints: Iterable[Checkpoint]) -> None:
    if config.cpu_activations != "int8":
        return
    if config.torch_device.type != "cpu" or native_library.library() is None:
        raise ValueError("cpu_activations int8 is for CPUs, with a C compiler: leave it out, or install one as `cc`")
    if not any(isinstance(checkpoint, GgufCheckpoint) for checkpoint in checkpoints):
        raise ValueError("cpu_activations int8 is for quantised GGUF files: leave it out, or give one")


def _check_dtype(config: EngineConfig, target: Target, dtype: torch.dtype) -> None:
    if config.torch_device.type == "cpu" and dtype != torch.float32 and gains_from_packing(target):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} on a CPU would widen every weight for every token: leave dtype out (auto is float32, and weights "
            "that were stored in 16 bits stay so in memory)"
        )


def _weight_bytes(loaded: Sequence[tuple[Target | Drafter, Checkpoint]], config: EngineConfig) -> int:
    """What the weights will take, at most."""
    total = 0
    for module, source in loaded:
        if isinstance(source, GgufCheckpoint) and _keeps_blocks(config, module, source):
            total += source.held_bytes(tiled=_is_tiled(config, module, source))
        else:
            total += stored_bytes(module, source, _packing(module))
    return total


def _use_threads(config: EngineConfig) -> None:
    if config.threads is not None:
        threads.fix(config.threads)
    else:
        threads.adapt()


def _predicting(config: EngineConfig, target: Target, drafter: Drafter | None) -> Drafter | None:
    """Drafts from predictions need no memory, but where states are recurrent: one was reserved for each token that the
    drafter may draft, and no more."""
    models = [target] if drafter is None else [target, drafter]
    most = config.num_predicted_tokens
    if any(recurrent_layers(model) for model in models):
        most = min(most, drafter.lookahead if drafter is not None else 0)
    return with_predictions(most, drafter) if most else None


def _stored_dtype(config: Mapping[str, Any]) -> str | None:
    for each in (config, config.get("text_config") or {}):
        found = each.get("dtype") or each.get("torch_dtype")
        if found:
            return found
    return None


def demand_of(target: Target, drafter: Drafter | None) -> Demand:
    width = len(drafter.taps) * target.hidden_size if drafter is not None else 0
    return Demand(
        models=[target] if drafter is None else [target, drafter],
        tap_width=width * drafter.num_carried if drafter is not None else 0,
        missable_width=width * NUM_MISSABLE,
        itemsize=next(target.parameters()).element_size(),
        lookahead=drafter.lookahead if drafter is not None else 0,
        model_max_len=target.max_len,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )


def _bounded(config: EngineConfig, target: Target) -> EngineConfig:
    if config.max_model_len is not None and config.max_model_len > target.max_len:
        raise ValueError(
            f"max_model_len {config.max_model_len} is beyond the {target.max_len} positions that {config.model} was "
            "made for (max_position_embeddings): lower it"
        )
    return config
