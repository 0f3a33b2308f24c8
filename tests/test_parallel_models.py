"""Every target split over ranks computes what it computes alone, and all ranks find the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from harness import Harness, load_target
from thread_ranks import on_ranks, on_teams

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.loader import build_target, load_weights
from outrider.engine.channel import decode, encode
from outrider.engine.stages import split_layers
from outrider.engine.team import Team
from outrider.kernels.collective import Ranks
from outrider.layers.embedding import Head
from outrider.layers.split import Share, key_share, split_over, width_share
from outrider.layers.stage import borders

PROMPTS = [list(range(5, 45)), list(range(60, 83))]  # longer than every window
# 3 divides few sizes: as many heads as it needs
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}


def run(path: Path, chunk: int, ranks: Ranks | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with split_over(ranks):
        return Harness(load_target(path)).run(PROMPTS, chunk)


def check(path: Path, size: int) -> None:
    expected = run(path, 100)
    found = on_ranks(size, lambda ranks: run(path, 100, ranks))
    for others in found[1:]:
        for (logits, taps), (first_logits, first_taps) in zip(others, found[0], strict=True):
            assert torch.equal(logits, first_logits)
            assert torch.equal(taps, first_taps)
    for (logits, taps), (whole_logits, whole_taps) in zip(found[0], expected, strict=True):
        for split, whole in ((logits, whole_logits), (taps, whole_taps)):
            torch.testing.assert_close(split, whole, atol=1e-5 * max(1.0, float(whole.abs().max())), rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_two_ranks(family: str, target_path: Callable[..., Path]) -> None:
    check(target_path(family), 2)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "nemotron_h", "deepseek_v3"])
def test_a_row_has_the_same_bits_in_any_company(family: str, target_path: Callable[..., Path]) -> None:
    path = target_path(family)
    together, apart = (on_ranks(2, lambda ranks, size=size: run(path, size, ranks)) for size in (100, 3))
    for (logits, taps), (other_logits, other_taps) in zip(together[0], apart[0], strict=True):
        assert torch.equal(logits, other_logits)
        assert torch.equal(taps, other_taps)


def run_stage(path: Path, team: Team) -> list[tuple[torch.Tensor, torch.Tensor]]:
    checkpoint = open_checkpoint(path)
    target = build_target(checkpoint)
    split_layers(target, None, team)
    load_weights(target, checkpoint)
    checkpoint.close()
    if team.stage < team.num_stages - 1:
        assert len(list(target.parameters())) < len(target.weights()), "it keeps its own layers alone"
        target.logits = lambda last, out=None: last  # type: ignore[method-assign]
    return Harness(target).run(PROMPTS, 100)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_two_stages(family: str, target_path: Callable[..., Path]) -> None:
    """Bit for bit: nothing is computed otherwise, only elsewhere."""
    expected = run(target_path(family), 100)
    *_, found = on_teams(2, 2, lambda team: run_stage(target_path(family), team))
    for (logits, taps), (whole_logits, whole_taps) in zip(found, expected, strict=True):
        assert torch.equal(logits, whole_logits)
        assert torch.equal(taps, whole_taps)


@pytest.mark.parametrize("vocab_size", [257, 1000, 49_152])
@pytest.mark.parametrize("tied", [False, True])
def test_any_vocabulary(tied: bool, vocab_size: int, target_path: Callable[..., Path]) -> None:
    path = target_path("llama", vocab_size=vocab_size, tie_word_embeddings=tied, **THREE)
    for size in (2, 3):
        check(path, size)


def test_sums_are_added_in_the_order_of_ranks_each_row_for_itself() -> None:
    parts = torch.tensor([[1e8, 1.0, -1e8], [1.0, 1e8, -1e8], [1e8, -1e8, 1.0]]).T  # [ranks, rows]
    found = on_ranks(3, lambda ranks: ranks.sum(parts[ranks.rank]))
    assert [each.tolist() for each in found] == [[0.0, 0.0, 1.0]] * 3, "(1e8 + 1) - 1e8 is 0 in float32"
    rows = on_ranks(3, lambda ranks: torch.cat([ranks.sum(row) for row in parts[ranks.rank].split(1)]))
    assert all(torch.equal(row, found[0]) for row in rows)


def test_the_best_of_all_ranks_is_the_first_of_equals() -> None:
    values = torch.tensor([[1.0, 5.0, -torch.inf], [3.0, 5.0, -torch.inf], [2.0, 4.0, -7.0]])
    ids = torch.tensor([[3, 4, 5], [13, 14, 15], [23, 24, 25]])
    found = on_ranks(3, lambda ranks: ranks.best(values[ranks.rank], ids[ranks.rank]))
    assert [each.tolist() for each in found] == [[13, 4, 25]] * 3


def test_shares_of_all_ranks_are_the_whole() -> None:
    for size in (2, 3, 5):
        ranges = [each for share in on_ranks(size, lambda ranks: _widths(ranks)) for each in share.ranges]
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == 80
    heads = Share(4, ((1, 2),))
    assert (heads * 8 + Share(3, ((0, 3),))).ranges == ((8, 16), (32, 35))


def _widths(ranks: Ranks) -> Share:
    with split_over(ranks):
        return width_share(80, "intermediate_size")


def test_every_query_head_finds_its_keys() -> None:
    """Whatever the number of key/value heads, a rank's query heads are shared out evenly among those it has."""
    for num_heads, num_kv_heads, size in ((8, 4, 2), (8, 1, 4), (6, 2, 3), (12, 4, 3), (6, 6, 3), (12, 3, 2)):

        def check_rank(ranks: Ranks, heads: int = num_heads, keys: int = num_kv_heads) -> None:
            with split_over(ranks):
                share = key_share(heads, keys)
            own = [head for begin, end in share.ranges for head in range(begin, end)]
            each = heads // ranks.size
            for place in range(each):
                assert own[place // (each // len(own))] == (ranks.rank * each + place) // (heads // keys)

        on_ranks(size, check_rank)


def test_messages_come_back_as_they_were() -> None:
    tensors = [torch.randn(3, 2).to(torch.bfloat16), torch.zeros(0, 4), torch.arange(5), torch.tensor([True, False])]
    message, found = decode(encode({"do": ["what", 0.1, None]}, tensors))
    assert message == {"do": ["what", 0.1, None]}
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


def test_stages() -> None:
    assert borders(8, 3) == [0, 3, 5, 8]
    assert borders(6, 2, together=[(3, 4), (1, 5)]) == [0, 1, 6], "no border between those who read each other"
    with pytest.raises(ValueError, match="2 layers cannot be split over 3 stages"):
        borders(2, 3)
    with pytest.raises(ValueError, match="too many of them read what earlier ones remember"):
        borders(4, 2, together=[(0, 3)])


def test_padding_is_never_chosen() -> None:
    """Not even where all that can be is less likely than nothing."""

    def rows(ranks: Ranks) -> torch.Tensor:
        with split_over(ranks):
            head = Head(7, 4)
        with torch.no_grad():
            head.weight.zero_()
            head.weight[: head.share.size] = -1.0
            logits = head.own_logits(torch.ones(2, 4))
        assert head.columns is not None
        assert (logits > -torch.inf).sum() == 2 * head.share.size
        return head.columns.ranks.best(*(each[:, 0] for each in _best(logits, head.columns.begin)))

    assert all((found == 0).all() for found in on_ranks(3, rows))


def _best(logits: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = logits.max(-1, keepdim=True)
    return values, places + begin
