# mypy: ignore-errors
"""A drafter, and how often it was right, from the engine's figures."""

import argparse

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.metrics.reader import Counter, Vector


def config_of(args):
    if args.method == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": args.num_spec_tokens,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        }
    return {
        "method": args.method,
        "model": args.eagle_dir,
        "num_speculative_tokens": args.num_spec_tokens,
        "disable_padded_drafter_batch": False,
        "draft_tensor_parallel_size": 1,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--eagle-dir")
    parser.add_argument("--num-spec-tokens", type=int, default=3)
    args = parser.parse_args()
    llm = LLM(
        model=args.model_dir,
        trust_remote_code=True,
        tensor_parallel_size=1,
        enable_chunked_prefill=True,
        enforce_eager=True,
        gpu_memory_utilization=0.9,
        speculative_config=config_of(args),
        disable_log_stats=False,
        max_model_len=1024,
        max_num_seqs=4,
        limit_mm_per_prompt={"image": 5},
        disable_chunked_mm_input=True,
        allowed_local_media_path="",
    )
    texts = ["Once upon a time there was a frog.", "a b c d e f g a b c d e f g a b c"]
    ids = [llm.get_tokenizer().encode(text) for text in texts]
    sampling_params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=x) for x in ids], sampling_params=sampling_params)
    total = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_drafts = num_draft_tokens = num_accepted_tokens = num_generated = 0
    acceptance_counts = [0] * args.num_spec_tokens
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            assert isinstance(metric, Counter)
            num_draft_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            assert isinstance(metric, Counter)
            num_accepted_tokens += metric.value
        elif metric.name == "vllm:generation_tokens":
            num_generated += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for pos in range(len(metric.values)):
                acceptance_counts[pos] += metric.values[pos]
    assert total == num_generated == 64
    assert 0 < num_drafts <= num_draft_tokens <= args.num_spec_tokens * num_drafts
    assert 0 < num_accepted_tokens == sum(acceptance_counts) < num_draft_tokens
    print(f"total_num_output_tokens: {total}")
    print(f"mean acceptance length: {1 + num_accepted_tokens / num_drafts:.2f}")
    for i, count in enumerate(acceptance_counts):
        print(f"acceptance at token {i}: {count / num_drafts:.2f}")


if __name__ == "__main__":
    main()
