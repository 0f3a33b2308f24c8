"""A run that is broken off goes on to the last bit; several processes learn what one would; rows come in turn."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import lessons
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.pair import DEFAULT_DIRECTORY
from outrider.tokenizer import Tokenizer
from outrider.training.checkpoint import load_state, save_state
from outrider.training.optimizer import LEAST_SIZE, Optimizer, Rates, orthogonal
from outrider.training.run import mask_token
from outrider.training.texts import Text, counted, coverage, frequent, load_texts, pack, save_texts, usable
from outrider.training.trainer import World


@pytest.fixture(scope="module")
def texts(target_path: Callable[..., Path]) -> list[list[int]]:
    return lessons.written(target_path("llama"), 8, 40)


def test_a_run_goes_on_to_the_last_bit(
    target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]]
) -> None:
    """P-EAGLE, because it needs random numbers in every step."""
    school = lessons.open_school("p_eagle", target_path("llama"), tmp_path / "drafter", texts)
    rows = pack([lessons.text_of(text) for text in texts], 64)
    with school.llm:
        begun = {name: p.detach().clone() for name, p in school.drafter.named_parameters()}
        whole = school.trainer(rows, num_rows=3)
        for number in range(5):
            whole.step(number / 5)
        wanted = {name: value.clone() for name, value in whole.state().items()}
        school.drafter.load_state_dict(begun)
        first = school.trainer(rows, num_rows=3)
        for number in range(2):
            first.step(number / 5)
        save_state(tmp_path, first.state(), {"step": first.step_number})
        school.drafter.load_state_dict(begun)
        second = school.trainer(rows, num_rows=3)
        saved = load_state(tmp_path)
        assert saved is not None
        second.restore(saved.tensors, saved.facts["step"])
        for number in range(2, 5):
            second.step(number / 5)
    for name, value in second.state().items():
        assert torch.equal(value, wanted[name]), name
    assert not torch.equal(wanted["average.mask_hidden"], begun["mask_hidden"])


def test_parts_and_processes_change_nothing(
    target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]]
) -> None:
    """Two processes, each with its rows in two parts, take the step that one takes with all rows at once."""
    target, here = target_path("llama"), tmp_path / "drafter"
    school = lessons.open_school("p_eagle", target, here, texts)
    rows = pack([lessons.text_of(text) for text in texts], 64)
    save_texts(tmp_path / "texts", [lessons.text_of(text) for text in texts], {})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.Popen([sys.executable, __file__, str(target), str(tmp_path)], env=environment)
    with school.llm:
        alone = school.trainer(rows, num_rows=4)
        alone.step(0.5)
    steps(str(target), tmp_path, rank=0)
    assert child.wait(timeout=120) == 0
    found = load_file(str(tmp_path / "rank0.safetensors"))
    other = load_file(str(tmp_path / "rank1.safetensors"))
    for name, value in alone.state().items():
        assert torch.equal(found[name], other[name]), name
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4)


def steps(target: str, folder: Path, rank: int) -> None:
    """One of two processes."""
    place, patience = f"file://{folder / 'meeting'}", timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=patience)
    try:
        texts = load_texts(folder / "texts", {})
        assert texts is not None
        school = lessons.open_school("p_eagle", Path(target), folder / f"drafter{rank}", [])
        with school.llm:
            trainer = school.trainer(pack(texts, 64), num_rows=4, parts=2)
            trainer.world = World(rank, 2)
            trainer.step(0.5)
            save_file(
                {name: value.clone() for name, value in trainer.state().items()}, folder / f"rank{rank}.safetensors"
            )
    finally:
        torch.distributed.destroy_process_group()


def test_every_row_comes_once_before_any_comes_again(
    target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]]
) -> None:
    school = lessons.open_school("mtp", target_path("llama"), tmp_path, texts)
    with school.llm:
        trainer = school.trainer(lessons.rows_apart(texts), num_rows=3)
        order = torch.cat([trainer.chosen(number) for number in range(8)]).tolist()
    assert [sorted(order[begin : begin + 8]) for begin in (0, 8, 16)] == [list(range(8))] * 3
    assert order[:8] != order[8:16]


def test_orthogonal_has_singular_values_near_one() -> None:
    for shape in ((12, 30), (30, 12)):
        both = (
            torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 9.0])[:, None, None]
        )
        found = orthogonal(both)
        assert 0.6 < torch.linalg.svdvals(found).min() <= torch.linalg.svdvals(found).max() < 1.3
        torch.testing.assert_close(found, torch.stack([orthogonal(each) for each in both]))  # each by itself


def test_steps_are_a_share_of_what_a_matrix_is(
    target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]]
) -> None:
    """Weights that are eight times larger behind norms that are eight times smaller compute the same, and learn the
    same: targets differ in that by more."""
    losses = []
    for larger in (1.0, 8.0):
        school = lessons.open_school("eagle3", target_path("llama"), tmp_path / f"{larger}", texts)
        block = school.drafter.network.first.block
        with school.llm, torch.no_grad():
            for norm in (block.attention_norm, school.drafter.network.first.hidden_norm, block.mlp_norm):
                norm.weight.div_(larger)
            for matrix in (block.attention.qkv, block.mlp.gate_up):
                matrix.weight.mul_(larger)
            trainer = school.trainer(lessons.rows_apart(texts))
            trainer.optimizer = Optimizer(trainer.trained(), Rates(0.03, others=0.0, clip=1e9))
            with torch.enable_grad():
                for number in range(6):
                    trainer.step(number / 6)
                    losses.append(trainer.record.read()["loss"])
    assert losses[0] - losses[5] > 0.05
    assert losses[6:] == pytest.approx(losses[:6], abs=2e-3)


def test_what_begins_as_nothing_learns_too() -> None:
    matrix = torch.nn.Parameter(torch.zeros(6, 16))
    matrix.grad = torch.randn(6, 16, generator=torch.Generator().manual_seed(2))
    Optimizer({"markov": matrix}, Rates(matrices=0.1)).step(1.0)
    size = float(matrix.detach().square().mean().sqrt())
    assert 0.5 < size / (0.1 * LEAST_SIZE * 16**-0.5) < 1.5


def test_adamw_is_torchs() -> None:
    """On parameters that are no matrices."""
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    rates = Rates(0.03, others=0.01, weight_decay=0.1, clip=1e9)
    optimizer, reference = (
        Optimizer({"norm": ours}, rates),
        torch.optim.AdamW([theirs], lr=0.01, betas=rates.betas, weight_decay=0.1),
    )
    for number in range(4):
        for parameter in (ours, theirs):
            parameter.grad = torch.sin(torch.arange(9) + number) * (1 + number)
        optimizer.step(1.0)
        reference.step()
    torch.testing.assert_close(ours, theirs)


def test_texts_are_kept_packed_and_counted(tmp_path: Path) -> None:
    texts = [Text.of([1, 2, 3, 4, 3], [False, False, True, True, True]), Text.of([9, 3, 3], [False, True, True])]
    save_texts(tmp_path / "texts", texts, {"of": 1})
    assert load_texts(tmp_path / "texts", {"of": 2}) is None
    found = load_texts(tmp_path / "texts", {"of": 1})
    assert found is not None
    assert [text.tokens.tolist() for text in found] == [[1, 2, 3, 4, 3], [9, 3, 3]]
    rows = pack(found, 8)
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 3, 9, 3, 3]]
    assert rows.documents.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert rows.places.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert rows.learnt.tolist() == [[False, True, True, True, False, True, True, False]]
    assert pack(found, 4).learnt.tolist()[0] == [False, True, True, False]  # what is cut off cannot be learnt
    ids = frequent(texts, 1, 16)
    assert ids is not None
    assert ids.tolist() == [3]
    assert coverage(texts, ids) == pytest.approx(4 / 5)
    tokenizer = Tokenizer.from_directory(DEFAULT_DIRECTORY / "target")
    assert tokenizer is not None
    counts = counted(texts, 4096)
    assert counts[:5].tolist() == [0, 1, 1, 4, 1]
    pad = tokenizer.special_id("<|pad|>")
    assert mask_token(tokenizer, counts) == (pad if not counts[pad] else 0)
    assert mask_token(None, np.array([2, 1, 0, 0])) == 2
    with pytest.raises(ValueError, match="raise --row-len"):
        usable([Text.of([1, 2, 3], [False, False, True])], 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps(sys.argv[1], Path(sys.argv[2]), rank=1)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_rate_that_nobody_chose_is_the_drafters_own(
    method: str, target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]]
) -> None:
    school = lessons.open_school(method, target_path("llama"), tmp_path, texts)
    with school.llm:
        trainer = school.trainer(lessons.rows_apart(texts))
        assert trainer.rates == lessons.RATES
        own = replace(trainer, rates=Rates(others=0.5)).rates
        assert own == Rates(school.drafter.matrix_rate, others=0.5)
        assert own.matrices == (0.02 if method == "mtp" else 0.03)
