# mypy: ignore-errors
"""Several prompts at once, sampled; then with what the model's authors advise."""

import sys

from vllm import LLM, SamplingParams

prompts = ["Once upon a time", "My name is", "The little dog"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=3)


def main():
    llm = LLM(model=sys.argv[1], seed=0, swap_space=4, tensor_parallel_size=1)
    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}, output: {output.outputs[0].text!r}")
    advised = llm.get_default_sampling_params()
    advised.max_tokens = 4
    for output in llm.generate(prompts, advised, use_tqdm=False):
        assert len(output.outputs[0].token_ids) <= 4
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode(prompts[0])) == prompts[0]


if __name__ == "__main__":
    main()
