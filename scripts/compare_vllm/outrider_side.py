"""Runs the cases in Outrider: plainly, which is the truth, then with the drafter, writing down every draft it makes.
python scripts/compare_vllm/outrider_side.py DIRECTORY [PART OF A CASE'S NAME ...]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from sides import NUM_TOKENS, Case, load_cases, override, text_number

from outrider import LLM, SamplingParams
from outrider.types import Draft, Hidden, Step, Verdict

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, trace=True)


def watch(llm: LLM, case: Case, truth: list[list[int]]) -> list[dict[int, list[int]]]:
    """For each prompt: number of tokens so far -> draft."""
    assert llm.drafter is not None
    drafts: list[dict[int, list[int]]] = [{} for _ in case.prompts]
    propose = llm.drafter.propose

    def watched(step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        own = propose(step, hidden, verdict)
        rows, counts = own.tokens.tolist(), own.count.tolist()
        for index, slot in enumerate(step.batch.slots.tolist()):
            length = int(step.state.lengths[slot])
            if not counts[index]:
                continue
            number = text_number(truth, step.state.tokens[slot, :length].tolist())
            row = rows[index][: counts[index]]
            drafts[number][length] = row
            if case.guided:
                rows[index][: len(row)] = override(row, truth[number], length, case.vocab_size)
        return Draft(torch.tensor(rows, dtype=own.tokens.dtype), own.count)

    llm.drafter.propose = watched  # type: ignore[method-assign]
    return drafts


def run(case: Case) -> dict[str, Any]:
    common: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "dtype": "float32"}
    with LLM(case.target, None, **common) as llm:
        truth = [
            p + o.outputs[0].token_ids for p, o in zip(case.prompts, llm.generate(case.prompts, PARAMS), strict=True)
        ]
    with LLM(case.target, {**case.speculative, "force": True, **case.outrider}, **common) as llm:
        assert llm.drafter is not None
        source = {name: str(resolved) for name, resolved in llm.drafter.provenance().items()}
        drafts = watch(llm, case, truth)
        outputs = llm.generate(case.prompts, PARAMS)
    texts = [p + o.outputs[0].token_ids for p, o in zip(case.prompts, outputs, strict=True)]
    assert texts == truth, f"{case.name}: speculation changed the text"
    return {"texts": texts, "drafts": drafts, "provenance": source}


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    path = directory / "outrider.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for case in load_cases(directory, names):
        results[case.name] = run(case)
        print(case.name, "done", flush=True)
        path.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
