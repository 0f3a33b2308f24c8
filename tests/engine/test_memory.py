"""How memory is shared out before it is taken."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from outrider import LLM
from outrider.config import CPU_LIMITS, GPU_LIMITS, EngineConfig, batch_limits
from outrider.engine import memory
from outrider.engine.memory import GRAPH_BYTES, Budget, Demand, plan_memory
from outrider.layers.cached import CachedLayer, RecurrentLayer
from outrider.layers.linear import Linear
from outrider.types import Paged, Recurrent

GIB = 2**30
PAGE = 16 * 2 * 8 * 64 * 2 * 32  # tokens, keys and values, heads, dim, bytes, layers


class Layer(CachedLayer):
    def __init__(self) -> None:
        super().__init__(Paged(8, 64, 64))


def demand(**changes: int) -> Demand:
    model = nn.ModuleList([Layer() for _ in range(32)])
    with torch.device("meta"):
        model.append(Linear(4096, 28672))
    usual = Demand(
        models=[model],
        tap_width=0,
        missable_width=0,
        itemsize=2,
        lookahead=5,
        model_max_len=8192,
        hidden_size=4096,
        vocab_size=128256,
    )
    return replace(usual, **changes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device of 140 GiB. The weights, 16 GiB, are there already when memory is planned."""
    state = {"free": 123 * GIB, "total": 140 * GIB, "unused": 0}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (state["free"], state["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB + state["unused"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * GIB)
    return state


def gpu_config(**settings: float) -> EngineConfig:
    limits = {"max_num_seqs": GPU_LIMITS.max_num_seqs, "max_num_batched_tokens": GPU_LIMITS.max_num_batched_tokens}
    return EngineConfig("model", device="cuda", **(limits | settings))  # type: ignore[arg-type]


def taken(budget: Budget, config: EngineConfig) -> int:
    """All but what the working memory is reckoned to be."""
    judged = config.max_num_seqs * 6
    working = demand().working_bytes(config.max_num_batched_tokens, judged) + GRAPH_BYTES
    tables = (config.max_num_seqs + 1) * demand().vocab_size * (4 + 6 / 8)  # biases, and masks of six rows
    return budget.weight_bytes + budget.cache_bytes + working + int(tables)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_gpu_is_used_up_to_its_share(gpu: dict[str, int], share: float) -> None:
    config = gpu_config(gpu_memory_utilization=share)
    budget = plan_memory(config, demand(), 16 * GIB)
    assert 0 <= share * gpu["total"] - taken(budget, config) <= 2 * PAGE
    assert not budget.grows


def test_a_gpu_that_others_use_gives_what_it_has(gpu: dict[str, int]) -> None:
    gpu["free"] = 40 * GIB
    alone = plan_memory(gpu_config(), demand(), 16 * GIB)
    assert 0 <= 56 * GIB - taken(alone, gpu_config()) <= 2 * PAGE
    gpu["unused"] = 10 * GIB  # that torch holds, and can hand out again
    assert plan_memory(gpu_config(), demand(), 16 * GIB).cache_bytes - alone.cache_bytes == pytest.approx(
        10 * GIB, abs=PAGE
    )
    gpu["free"], gpu["unused"] = 3 * GIB, 0
    with pytest.raises(ValueError, match=r"lacks .*: lower max_num_seqs"):
        plan_memory(gpu_config(), demand(), 16 * GIB)


def test_working_memory_grows_with_what_is_computed_at_once() -> None:
    usual = demand().working_bytes(8192, 1536)
    assert 2 * GIB < usual < 6 * GIB
    assert demand().working_bytes(16384, 1536) > usual
    assert demand().working_bytes(8192, 3072) > usual


def test_memory_that_was_asked_for_is_given(gpu: dict[str, int]) -> None:
    budget = plan_memory(gpu_config(kv_cache_memory=10 * GIB), demand(), 16 * GIB)
    assert budget.page_bytes * budget.num_pages == pytest.approx(10 * GIB, abs=PAGE)


def test_a_cpu_keeps_half_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 10 * GIB)
    config = EngineConfig("model", device="cpu")
    budget = plan_memory(config, demand(), 4 * GIB)
    assert budget.page_bytes * budget.num_pages == pytest.approx(3 * GIB, rel=0.01)
    assert budget.grows
    with pytest.raises(ValueError, match=r"lacks .*: use a smaller model"):
        plan_memory(config, demand(), 11 * GIB)
    with pytest.raises(ValueError, match="lower max_model_len"):
        plan_memory(replace(config, max_model_len=100000), demand(model_max_len=100000), 4 * GIB)


def test_texts_that_have_ended_keep_a_share_of_a_cpu(gpu: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 100 * GIB)
    config = EngineConfig("model", device="cpu")
    for weight_bytes, wanted in ((4 * GIB, GIB // 4), (2**20, 32 * 2**20)):
        ample = plan_memory(config, demand(), weight_bytes).num_ample
        assert ample is not None
        assert ample * PAGE == pytest.approx(wanted, abs=2 * PAGE)
    asked = replace(config, kv_cache_memory=4 * GIB)
    assert plan_memory(asked, demand(), 4 * GIB).num_ample is None, "all of what was asked for"
    assert plan_memory(gpu_config(), demand(), 4 * GIB).num_ample is None


def test_limits_suit_the_device(gpu: dict[str, int]) -> None:
    assert batch_limits("cpu") == CPU_LIMITS
    assert batch_limits("auto") == batch_limits("cuda:0") == GPU_LIMITS
    with LLM(None, None, device="cpu", max_num_batched_tokens=77) as llm:
        assert (llm.config.max_num_seqs, llm.config.max_num_batched_tokens) == (16, 77)


class Memory(RecurrentLayer):
    """Of 4 MiB."""

    def __init__(self) -> None:
        super().__init__(Recurrent(((1024, 1024),)))


def recurrent_demand() -> Demand:
    usual = demand()
    model = nn.ModuleList([*usual.models, *(Memory() for _ in range(24))])
    return replace(usual, models=[model], lookahead=0)


def test_snapshots_of_recurrent_states(gpu: dict[str, int]) -> None:
    """Four for each request, or a quarter of the room; the rest goes to pages."""
    state, roomy = 24 * 4 * 2**20, gpu_config(max_num_seqs=16)
    budget = plan_memory(roomy, recurrent_demand(), 16 * GIB)
    assert (budget.num_snapshots, budget.snapshot_bytes) == (64, state)
    crowded = gpu_config(max_num_seqs=256)
    budget = plan_memory(crowded, recurrent_demand(), 16 * GIB)
    room = budget.cache_bytes - budget.state_bytes
    assert budget.state_bytes > 257 * state
    assert 0.24 * room < budget.num_snapshot_places * state <= 0.25 * room + PAGE
    working = recurrent_demand().working_bytes(8192, 256) + GRAPH_BYTES + recurrent_demand().option_bytes(257)
    assert 0 <= 0.9 * gpu["total"] - 16 * GIB - working - budget.cache_bytes <= 2 * PAGE
    asked = plan_memory(replace(crowded, num_snapshots=7), recurrent_demand(), 16 * GIB)
    assert asked.num_snapshots == 7
    assert asked.cache_bytes == pytest.approx(budget.cache_bytes, abs=2 * PAGE)
    paged = plan_memory(replace(crowded, kv_cache_memory=10 * GIB), recurrent_demand(), 16 * GIB)
    assert paged.page_bytes * paged.num_pages == pytest.approx(10 * GIB, abs=PAGE)
    assert paged.num_snapshots > 100
    with pytest.raises(ValueError, match="400 snapshots of recurrent states need"):
        plan_memory(replace(crowded, kv_cache_memory=60 * GIB, num_snapshots=400), recurrent_demand(), 16 * GIB)
    for off in ({"enable_prefix_caching": False}, {"num_snapshots": 0}):
        assert plan_memory(replace(roomy, **off), recurrent_demand(), 16 * GIB).num_snapshot_places == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0, 1.01, -1])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization must be"):
        EngineConfig("model", gpu_memory_utilization=share)


def test_a_budget_says_where_memory_goes() -> None:
    budget = Budget(3 * GIB, 2**20, 1025, 4096, page_size=16, drafter_bytes=GIB, grows=True)
    assert budget.describe() == (
        "weights 2.00 GiB; drafter 1.00 GiB; cache up to 1.00 GiB, taken as it is used (1,024 pages, 16,384 tokens); "
        "context 4,096 tokens"
    )
    assert (
        "taken as it is used, above 100 MiB by what runs or comes again (" in replace(budget, num_ample=100).describe()
    )
    assert replace(budget, num_ample=1025).describe() == budget.describe()
    assert list(replace(budget, drafter_bytes=0, grows=False).rows()) == ["weights", "cache", "context"]
