"""Runs the cases in vLLM and writes down every draft it makes. Needs vLLM's virtualenv and outrider_side's results:
python vllm_side.py DIRECTORY [PART OF A CASE'S NAME ...]"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

for key, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the runner lives in this process, where it can be watched
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(key, value)

import torch  # noqa: E402
import vllm  # noqa: E402
from sides import NUM_TOKENS, Case, load_cases, override, text_number  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

Drafts = list[dict[int, list[int]]]  # for each prompt: number of tokens so far -> draft


def watch(case: Case, truth: list[list[int]]) -> Drafts:
    """Every draft is noted, then overridden as on the other side. The target sees it in the next step."""
    drafts: Drafts = [{} for _ in case.prompts]
    propose = GPUModelRunner.propose_draft_token_ids

    def watched(runner: Any, scheduled: Any, sampled: Any, *rest: Any, **named: Any) -> Any:
        batch = runner.input_batch
        before = isinstance(sampled, torch.Tensor)  # whether the batch does not know yet of this step's tokens
        own = propose(runner, scheduled, sampled, *rest, **named)
        rows = own.tolist() if isinstance(own, torch.Tensor) else own
        fresh = sampled.tolist() if before else sampled
        for index, row in enumerate(rows):
            count = sum(token != -1 for token in fresh[index])
            known = int(batch.num_tokens_no_spec[index])
            prompt = batch.token_ids_cpu[index, : batch.num_prompt_tokens[index]].tolist()
            computed = batch.num_computed_tokens_cpu[index] + scheduled.num_scheduled_tokens[batch.req_ids[index]]
            if computed < len(prompt) or not row:
                continue  # a part of a prompt, or nothing to say
            length = known + count if before else known
            number = text_number(case.prompts, prompt)
            drafts[number][length] = list(row)
            if case.guided:
                rows[index] = override(list(row), truth[number], length, case.vocab_size)
        return torch.tensor(rows, dtype=own.dtype) if isinstance(own, torch.Tensor) else rows

    GPUModelRunner.propose_draft_token_ids = watched
    return drafts


def run(case: Case, truth: list[list[int]]) -> dict[str, Any]:
    drafts = watch(case, truth)
    llm = vllm.LLM(
        case.target,
        speculative_config={**case.speculative, **case.vllm_speculative},
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        async_scheduling=False,
        **case.vllm,
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in case.prompts], params, use_tqdm=False)
    return {"texts": [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs], "drafts": drafts}


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    texts = json.loads((directory / "outrider.json").read_text())
    for case in load_cases(directory, names):
        child = os.fork()  # vLLM does not give everything back, so every case has a process of its own
        if child == 0:
            try:
                result = run(case, texts[case.name]["texts"])
            except BaseException as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            (directory / f"vllm-{case.name}.json").write_text(json.dumps(result))
            print(case.name, result.get("error", "done"), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
