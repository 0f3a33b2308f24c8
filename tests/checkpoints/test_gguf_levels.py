"""Blocks of GGUF files as a GPU computes with them: the numbers that the gguf package reads, in another place."""

from __future__ import annotations

import pytest
import torch
from gguf_blocks import QUANTISED, floats_of, random_blocks

from outrider.checkpoints.gguf_levels import READERS, quantised_of
from outrider.kernels.quantised import Kind

CPU = torch.device("cpu")
BY_NAME = {name: number for number, name in QUANTISED.items()}


@pytest.mark.parametrize("name", READERS)
def test_every_type_stands_for_what_it_stood_for(name: str) -> None:
    blocks = random_blocks(BY_NAME[name], 5, 512, seed=1)
    found = quantised_of([blocks], CPU)
    assert found is not None
    assert found.kind.num_bits == (4 if name.startswith("Q4") else 8)
    torch.testing.assert_close(found.dense(torch.float32), floats_of(blocks), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0", "Q4_1"), ("Q5_K", "Q4_K")])
def test_types_that_differ_become_as_wide_as_the_widest(names: tuple[str, ...]) -> None:
    parts = [random_blocks(BY_NAME[name], 3, 256, seed=number) for number, name in enumerate(names)]
    found = quantised_of(parts, CPU)
    assert found is not None
    assert found.kind is Kind.INT8
    wanted = torch.cat([floats_of(part) for part in parts])
    torch.testing.assert_close(found.dense(torch.float32), wanted, rtol=1e-6, atol=1e-6)


def test_parts_of_one_type_stay_as_narrow_as_they_are() -> None:
    parts = [random_blocks(BY_NAME["Q4_K"], 3, 256, seed=number) for number in range(2)]
    found = quantised_of(parts, CPU)
    assert found is not None
    assert found.kind is Kind.UINT4
    assert torch.equal(found.rows_from(3).dense(torch.float32), quantised_of(parts[1:], CPU).dense(torch.float32))  # type: ignore[union-attr]
