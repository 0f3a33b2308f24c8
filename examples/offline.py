"""Several prompts in one batch, plainly and with the drafter: the same tokens in fewer passes of the target.

python examples/offline.py [TARGET DRAFTER]
"""

import sys

from outrider import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The little dog", "Rain is"]
GREEDY = SamplingParams(temperature=0, max_tokens=48)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=48)


def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else None  # None: the embedded one
    drafter = {"model": sys.argv[2], "num_speculative_tokens": 5} if len(sys.argv) > 2 else "auto"
    with LLM(target, speculative_config=drafter) as fast, LLM(target, speculative_config=None) as plain:
        for params in (GREEDY, SAMPLED):
            drafted, alone = fast.generate(PROMPTS, params), plain.generate(PROMPTS, params)
            for prompt, one, other in zip(PROMPTS, drafted, alone, strict=True):
                answer = one.outputs[0]
                assert answer.token_ids == other.outputs[0].token_ids  # always, whatever was drafted
                print(f"{prompt}|{answer.text!r}\n  {answer.speculation.accept_length:.2f} tokens a round")


if __name__ == "__main__":
    main()
