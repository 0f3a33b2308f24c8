# mypy: ignore-errors
"""A conversation, several conversations, and a template of one's own."""

import sys

from vllm import LLM

conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I help you today?"},
    {"role": "user", "content": "Tell me a story about a frog."},
]
template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def main():
    llm = LLM(model=sys.argv[1])
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 12
    sampling_params.temperature = 0
    outputs = llm.chat(conversation, sampling_params, use_tqdm=True)
    outputs += llm.chat([conversation] * 3, sampling_params, use_tqdm=False)
    outputs += llm.chat(conversation, sampling_params, chat_template=template, add_generation_prompt=False)
    for output in outputs:
        print("Prompt:", repr(output.prompt))
        print("Answer:", repr(output.outputs[0].text))
    assert outputs[0].outputs[0].text == outputs[3].outputs[0].text
    assert outputs[-1].prompt.startswith("system: You are")


if __name__ == "__main__":
    main()
