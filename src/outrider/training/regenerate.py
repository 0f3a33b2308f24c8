"""The target answers itself: conversations in, texts of its own out, as tokens straight from its generation.
A drafter that learns from anybody else's answers foresees somebody who is not there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.chat_template import ChatOptions
from outrider.llm import LLM
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer
from outrider.training.conversations import Conversation
from outrider.training.texts import Text

OnProgress = Callable[[int, int], None]  # answers so far, and all


@dataclass(frozen=True)
class Regeneration:
    """How answers are written."""

    max_tokens: int = 256  # of one answer
    max_len: int = 1024  # of a whole conversation: no further turn begins beyond
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    max_turns: int = 3
    chat: bool = True
    seed: int = 0


@dataclass
class _Thread:
    """A conversation as it grows."""

    left: list[tuple[str, str]]
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    said: list[bool] = field(default_factory=list)
    temperature: float = 0.0
    seed: int = 0

    def add(self, ids: Sequence[int], said: bool) -> None:
        self.tokens += ids
        self.said += [said] * len(ids)


def regenerate(
    llm: LLM,
    conversations: Sequence[Conversation],
    how: Regeneration,
    on_progress: OnProgress | None = None,
    deadline: float | None = None,
) -> list[Text]:
    """Turn by turn, all conversations together. `deadline`: of time.monotonic(), when no further turn begins."""
    tokenizer, pick = llm.get_tokenizer(), random.Random(how.seed)
    threads = [_begin(each, how, pick, tokenizer, llm.max_model_len) for each in conversations]
    active = [thread for thread in threads if thread is not None]
    finished: list[_Thread] = []
    limit = min(how.max_len, llm.max_model_len - 1)
    for turn in range(how.max_turns):
        active = [thread for thread in active if len(thread.tokens) < limit]
        if not active or (turn and deadline is not None and time.monotonic() > deadline):
            break
        outputs = llm.generate(
            [list(thread.tokens) for thread in active],
            [_params(thread, how, limit) for thread in active],
            on_step=on_progress if turn == 0 else None,
        )
        going_on = []
        for thread, output in zip(active, outputs, strict=True):
            thread.add(output.outputs[0].token_ids, True)
            done = output.outputs[0].finish_reason == "length"
            answer = tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
            if not done and _goes_on(thread, answer, tokenizer):
                going_on.append(thread)
            else:
                finished.append(thread)
        active = going_on
    return [Text.of(thread.tokens, thread.said) for thread in finished + active if any(thread.said)]


def _params(thread: _Thread, how: Regeneration, limit: int) -> SamplingParams:
    room = max(min(how.max_tokens, limit - len(thread.tokens)), 1)
    return SamplingParams(max_tokens=room, temperature=thread.temperature, seed=thread.seed, detokenize=False)


def _begin(
    conversation: Conversation, how: Regeneration, pick: random.Random, tokenizer: Tokenizer, most: int
) -> _Thread | None:
    """The first prompt; None where it leaves no room for an answer."""
    thread = _Thread(conversation.asked(), temperature=pick.choice(how.temperatures), seed=pick.getrandbits(32))
    if conversation.is_chat and how.chat:
        thread.add(_next_turn(thread, tokenizer, ""), False)
    else:
        text = conversation.text or thread.left[0][1]
        thread.left = []
        ids = tokenizer.encode(text)
        thread.add(ids if not conversation.text else ids[: pick.randint(2, 24)], False)
    return thread if 0 < len(thread.tokens) < min(how.max_len, most - 1) else None


def _goes_on(thread: _Thread, answer: str, tokenizer: Tokenizer) -> bool:
    """Adds what the user says next to a conversation that has been answered; false where that is nothing."""
    if not any(role == "user" for role, _ in thread.left):
        return False
    before = tokenizer.chat(thread.messages)
    thread.messages.append({"role": "assistant", "content": answer})
    ids = _next_turn(thread, tokenizer, before + answer)
    if not ids:
        return False
    thread.add(ids, False)
    return True


def _next_turn(thread: _Thread, tokenizer: Tokenizer, before: str) -> list[int]:
    """The tokens up to the next answer, after the text `before`, whose tokens are there already. A template that
    rewrites what was said before ends the conversation."""
    while thread.left:
        role, content = thread.left.pop(0)
        thread.messages.append({"role": role, "content": content})
        if role == "user":
            break
    text = tokenizer.chat(thread.messages)
    if not text.startswith(before):
        return []
    rest = text[len(before) :]
    ids = tokenizer.encode(rest, add_special_tokens=False)
    if before and ids and thread.tokens and thread.tokens[-1] == ids[0]:
        ids = ids[1:]  # the answer's own end
    return ids


def as_they_are(conversations: Sequence[Conversation], tokenizer: Tokenizer, *, chat: bool) -> list[Text]:
    """Texts whose answers are the target's already."""
    return [_given(each, tokenizer, chat) for each in conversations if each.has_answers]


def _given(conversation: Conversation, tokenizer: Tokenizer, chat: bool) -> Text:
    if not (conversation.is_chat and chat):
        text = conversation.text or "\n".join(content for _, content in conversation.messages)
        tokens = tokenizer.encode(text)
        return Text.of(tokens, [True] * len(tokens))
    messages: list[dict[str, str]] = []
    tokens, said, shown = [], [], ""
    for role, content in conversation.messages:
        if role == "assistant":  # the header is not its own
            ids, shown = _more(tokenizer, messages, shown, ChatOptions())
            tokens += ids
            said += [False] * len(ids)
        messages.append({"role": role, "content": content})
        if role == "assistant":
            ids, shown = _more(tokenizer, messages, shown, ChatOptions(add_generation_prompt=False))
            tokens += ids
            said += [True] * len(ids)
    return Text.of(tokens, said)


def _more(
    tokenizer: Tokenizer, messages: list[dict[str, str]], shown: str, options: ChatOptions
) -> tuple[list[int], str]:
    """What a template adds to the text that was shown before, as tokens, and the whole text."""
    text = tokenizer.chat(messages, options)
    if not text.startswith(shown):
        return [], shown
    return tokenizer.encode(text[len(shown) :], add_special_tokens=False), text
