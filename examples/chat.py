"""A conversation: what was said before is kept, and answers are printed as they grow.

python examples/chat.py [MODEL]        (from a pipe, every line is a message)
"""

import sys

from outrider import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None  # None: the embedded one
    messages: list[dict[str, str]] = []
    with LLM(model) as llm:
        print("Say something; an empty line ends it.")
        for line in iter(sys.stdin.readline, ""):
            if not line.strip():
                break
            messages.append({"role": "user", "content": line.strip()})
            said = ""
            for output in llm.stream(llm.chat_prompt(messages), SamplingParams(temperature=0, max_tokens=64)):
                text = output.outputs[0].text
                print(text[len(said) :], end="", flush=True)
                said = text
            print()
            messages.append({"role": "assistant", "content": said})


if __name__ == "__main__":
    main()
