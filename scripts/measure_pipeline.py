"""What it brings that a pipeline has as many groups of requests under way as stages: tokens a second, by turns with one
group at a time, every rank on one thread and a processor of its own. The target has random weights; with `--drafts` a
drafter of one layer drafts so many tokens, of which half are taken to be right.

    python scripts/measure_pipeline.py --requests 1 8 32
    python scripts/measure_pipeline.py --requests 1 8 32 --drafts 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.engine.workers import Workers

SHAPE: dict[str, Any] = {  # the layers of SmolLM2-135M with a small vocabulary, so that stages take about as long
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
}


def save_random(directory: Path, **others: Any) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **others})).save_pretrained(directory)
    return directory


def pin(llm: LLM) -> None:
    """Ranks to processors, by turns."""
    workers = llm.engine.workers
    assert isinstance(workers, Workers)
    processors = sorted(os.sched_getaffinity(0))
    for rank, pid in enumerate([os.getpid(), *(process.pid for process in workers._processes)]):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {processors[rank % len(processors)]})


def use_groups(llm: LLM, count: int) -> None:
    engine = llm.engine
    engine.scheduler.limits = replace(engine.scheduler.limits, num_groups=count)
    engine._max_flying = count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    params = SamplingParams(max_tokens=given.tokens, temperature=0, ignore_eos=True)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        model, settings = save_random(Path(directory, "target")), None
        if given.drafts:
            drafter = save_random(Path(directory, "drafter"), num_hidden_layers=1)
            settings = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": given.drafts}
            settings |= {"adaptive": False, "synthetic_acceptance_length": 1 + given.drafts / 2}
        options = {"pipeline_parallel_size": given.stages, "max_model_len": 512, "threads": 1}
        with LLM(model, settings, max_num_seqs=max(given.requests), **options) as llm:
            pin(llm)
            for count in given.requests:
                prompts = [[5 + number, *range(10, 26)] for number in range(count)]
                rates: dict[int, list[float]] = {1: [], given.stages: []}
                said = set()
                for turn in range(given.turns + 1):
                    for groups in rates:
                        use_groups(llm, groups)
                        begin = time.perf_counter()
                        outputs = llm.generate(prompts, params)
                        seconds = time.perf_counter() - begin
                        said.add(str([output.outputs[0].token_ids for output in outputs]))
                        if turn:  # the first warms up
                            rates[groups].append(count * given.tokens / seconds)
                assert len(said) == 1, "groups must not change what is said"
                one, many = (statistics.median(each) for each in rates.values())
                ratios = [many / one for one, many in zip(*rates.values(), strict=True)]
                ratio = statistics.median(ratios)
                print(f"{count:4} requests: {one:7.1f} tok/s in one group, {many:7.1f} in {given.stages}: {ratio:.2f}")
                found.append({"requests": count, "one": rates[1], "groups": rates[given.stages], "ratio": ratio})
    print(json.dumps({"stages": given.stages, "tokens": given.tokens, "found": found}))


if __name__ == "__main__":
    main()
