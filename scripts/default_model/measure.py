"""The measurement: the engine answers simple prompts with the drafter, greedily, and counts what every round brings."""

from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.outputs import total_speculation

RAW_PROMPTS = [
    "Once upon a time",
    "The little dog ran",
    "One day, a girl named Anna",
    "It was a cold winter morning and",
    "The sun is",
    "My best friend",
    "In the forest, there was an old house.",
    "A good way to learn is",
    "The farmer had a cow that",
    "Dear Tom,",
    "There once was a brave knight who",
    "Bees are",
    "To make a good soup,",
    "The old man looked at the sea and",
    "Ben and Lily went to the park.",
    "Water is important because",
    "The cat sat on",
    "At the end of the day,",
    "Every morning, the baker",
    '"Where are you going?" asked the fox.',
]
# Written after the training prompts and checked to be none of them.
CHAT_PROMPTS = [
    "Tell me something nice about cats.",
    "My dog is sick. What should I do?",
    "Write two sentences about a red car.",
    "What is the difference between a lake and the sea?",
    "Tell me a story in which a boy plants a seed that grows into the sky.",
    "I am going to visit my aunt. What can I bring her?",
    "Can you write a story about two sisters and a bear?",
    "Which fruit is good for children?",
    "What happens when ice gets warm?",
    "Write a story that begins in a train.",
    "Say something about winter in the mountains.",
    "Give me an idea for a birthday party.",
    "Why are some people afraid of the dark?",
    "Tell me how a baker makes bread.",
    "Write a short message for my teacher.",
    "What do you see when you look out of a window?",
    "Tell me a story about a king who could not sleep.",
    "How do people build a house?",
    "What would a cat say to a mouse?",
    "Please describe an old man who sells apples.",
]
# Requests that the drafter met in training, word for word (its figure is not one of unseen text), or nearly so.
FAMILIAR_PROMPTS = [
    "Tell me a story.",
    "Tell me a short story about a brave mouse.",
    "What is the moon?",
    "How do I make a cup of tea?",
    "Why is it good to read every day?",
    "Write a short letter to Anna about a trip to the sea.",
    "List five animals that live on a farm.",
    "Describe a garden in spring.",
    "Write a short talk between a fox and a hen.",
    "Who are you?",
    "Hello!",
    "What do bees do?",
    "Tell me about trees.",
    "How can I be kind today?",
    "Write a story about a lost ball.",
    "Why do we sleep?",
    "What should I take to the beach?",
    "Explain in simple words what a river is.",
    "Tell me a bedtime story about a sleepy bear.",
    "What can I do on a rainy day?",
]
GROUPS = {"raw": RAW_PROMPTS, "chat": CHAT_PROMPTS, "familiar chat": FAMILIAR_PROMPTS}
MORE = ("Tell me more.", "What happened then?", "Tell me another story.", "Why?", "Go on.")
CONTEXTS = (0, 256, 512, 1024, 2048)  # of a conversation that goes on until there is no more room


def measure(target: Path, drafter: Path, num_drafts: int, max_new: int, check: bool, device: str) -> None:
    """Print the accept length on raw prompts, unseen chat prompts and familiar ones, then by length of context."""
    greedy = SamplingParams(max_tokens=max_new, temperature=0)
    settings = {"model": str(drafter), "num_speculative_tokens": num_drafts, "force": True}
    found: dict[str, list[Any]] = {}
    with LLM(target, settings, device=device) as llm:
        for name, prompts in GROUPS.items():
            found[name] = _answers(llm, prompts, greedy, chat=name != "raw")
            total = total_speculation(found[name])
            shares = " ".join(f"{share:.2f}" for share in total.acceptance_per_position)
            print(f"{name:<14} accept length {total.accept_length:.2f}, {total.rounds} rounds; by position {shares}")
        for low, high, length, rounds in by_context(llm, greedy):
            print(f"context {low:>4} to {high:>4}: accept length {length:.2f} over {rounds} rounds")
    if check:
        with LLM(target, None, device=device) as llm:
            for name, prompts in GROUPS.items():
                plain = _answers(llm, prompts, greedy, chat=name != "raw")
                for one, other in zip(plain, found[name], strict=True):
                    assert one.outputs[0].token_ids == other.outputs[0].token_ids, "speculation changed the text"
        print("all texts are those of plain decoding")


def _answers(llm: LLM, prompts: list[str], params: SamplingParams, *, chat: bool) -> list[Any]:
    if not chat:
        return llm.generate(prompts, params)
    return llm.chat([[{"role": "user", "content": text}] for text in prompts], params)


def by_context(llm: LLM, params: SamplingParams) -> list[tuple[int, int, float, int]]:
    """Conversations of many turns: (from, to, accept length, rounds) by how long each was when an answer began."""
    threads = [[{"role": "user", "content": text}] for text in CHAT_PROMPTS]
    tokens, rounds = [0] * len(CONTEXTS), [0] * len(CONTEXTS)
    for turn in range(40):
        going_on = [each for each in threads if _length(llm, each) + params.max_tokens < llm.max_model_len]
        if not going_on:
            break
        for thread, output in zip(going_on, llm.chat(going_on, params), strict=True):
            begin, total = _length(llm, thread), total_speculation([output])
            place = next(number for number, high in enumerate(CONTEXTS) if begin <= high)
            tokens[place] += round(total.accept_length * total.rounds)
            rounds[place] += total.rounds
            thread.append({"role": "assistant", "content": output.outputs[0].text})
            thread.append({"role": "user", "content": MORE[turn % len(MORE)]})
        threads = going_on
    pairs = zip(CONTEXTS, CONTEXTS[1:], tokens[1:], rounds[1:], strict=False)
    return [(low, high, token / count, count) for low, high, token, count in pairs if count]


def _length(llm: LLM, messages: list[dict[str, str]]) -> int:
    return len(llm.chat_prompt(messages)["prompt_token_ids"])
