"""A new drafter can be trained for every target that there is, whatever its layers are like."""

from collections.abc import Callable
from pathlib import Path

import lessons
import pytest
import tiny

from outrider import SamplingParams
from outrider.training.checkpoint import exported, write_drafter
from outrider.training.run import read_fresh


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    target = target_path(family)
    texts = lessons.written(target, 3, 40)
    for form in ("eagle3", "dflash", "mtp"):
        school = lessons.open_school(form, target, tmp_path / form, texts)
        with school.llm:
            trainer = school.trainer(lessons.rows_apart(texts))
            losses = lessons.learnt(trainer, 6)
            assert losses[-1] < losses[0], form
            fresh = read_fresh(school.path)
            tensors = exported(school.drafter, trainer.optimizer.average, fresh)
        write_drafter(tmp_path / f"{form} learnt", fresh.config, tensors)
        params = SamplingParams(max_tokens=35, temperature=1.0, seed=3, ignore_eos=True)
        with lessons.school_of(target, tmp_path / f"{form} learnt", texts).llm as llm:
            outputs = llm.generate([text[: lessons.PROMPT_LEN] for text in texts], params)
        assert [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs] == texts, form
        assert sum(output.outputs[0].speculation.drafted for output in outputs)
