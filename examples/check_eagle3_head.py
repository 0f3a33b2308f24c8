"""Is an EAGLE-3 head read the way it was trained, and how much of what it drafts is right?

python examples/check_eagle3_head.py [TARGET HEAD]

`outrider doctor TARGET HEAD` says much more: it also tries the neighbouring readings of the same weights.
"""

import sys

from outrider import LLM, SamplingParams

QUESTIONS = ["Tell me about the moon.", "Why do we sleep?", "What should I wear when it rains?"]


def main() -> None:
    target, head = sys.argv[1:3] if len(sys.argv) > 2 else (None, None)
    # All is drafted, whether it pays or not. A head that agrees with nothing would be refused here.
    settings = {"adaptive": False, "num_speculative_tokens": 5}
    named = {"method": "eagle3", "model": head} if head is not None else {"model": embedded_head()}
    with LLM(target, speculative_config={**named, **settings}) as llm:
        assert llm.drafter is not None
        for name, setting in llm.drafter.provenance().items():
            print(f"{name:24} {setting.value!s:24} {setting.source}")
        prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        speculation = output.outputs[0].speculation
        places = " ".join(f"{share:.2f}" for share in speculation.acceptance_per_position)
        print(f"{speculation.accept_length:.2f} tokens a round; right by place: {places}   {question}")


def embedded_head() -> str:
    from outrider.pair import DEFAULT_DIRECTORY

    return str(DEFAULT_DIRECTORY / "drafter")


if __name__ == "__main__":
    main()
