"""What the target is asked, read from a file: chat messages, ShareGPT's conversations, prompts, or plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.tokenizer import Tokenizer

_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
             "bing": "assistant", "bard": "assistant", "system": "system"}  # fmt: skip
_FORMS = (
    '{"messages": [{"role": "user", "content": "..."}]}, {"conversations": [{"from": "human", "value": "..."}]}, '
    '{"turns": ["..."]}, {"prompt": "..."}, {"question": "..."} or {"text": "..."}'
)


@dataclass(frozen=True)
class Conversation:
    """A conversation, of whose messages the assistant's may be missing; or a text that nobody says to anybody."""

    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    text: str = ""

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def has_answers(self) -> bool:
        return not self.is_chat or any(role == "assistant" for role, _ in self.messages)

    def asked(self) -> list[tuple[str, str]]:
        """Without the assistant's messages."""
        return [(role, content) for role, content in self.messages if role != "assistant"]


def read_all(paths: Sequence[Path], limit: int | None = None) -> list[Conversation]:
    """Of several files; `limit`: the first so many of each."""
    return [conversation for path in paths for conversation in read_conversations(path, limit)]


def read_conversations(path: Path, limit: int | None = None) -> list[Conversation]:
    """From JSONL, from a JSON list, or from a .txt file, in which an empty line ends a text."""
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: give JSONL, JSON or plain text") from error
    found: list[Conversation] = []
    for conversation in _read(path, content):
        found.append(conversation)
        if len(found) == limit:
            break
    if not found:
        raise ValueError(f"{path} holds nothing to learn from: write one JSON object a line, such as {_FORMS}")
    return found


def _read(path: Path, content: str) -> Iterator[Conversation]:
    if path.suffix == ".txt":
        yield from (Conversation(text=part.strip()) for part in content.split("\n\n") if part.strip())
        return
    if content.lstrip().startswith("["):
        try:
            entries = json.loads(content)
        except ValueError as error:
            raise ValueError(f"{path} begins like a JSON list, but is none: {error}") from error
        numbered: Iterator[tuple[str, Any]] = (
            (f"entry {number}", entry) for number, entry in enumerate(entries, start=1)
        )
    else:
        numbered = _lines(path, content)
    for name, entry in numbered:
        try:
            yield conversation_of(entry)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, {name}: {error}") from error


def _lines(path: Path, content: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is no JSON ({error}): write one object a line, such as {_FORMS}; plain text "
                "goes into a file that ends in .txt"
            ) from error


def conversation_of(entry: Any) -> Conversation:
    if not isinstance(entry, Mapping):
        raise ValueError(f"not a JSON object: write {_FORMS}")
    if "messages" in entry:
        return _chat((str(each["role"]), each["content"]) for each in entry["messages"])
    if "conversations" in entry:  # ShareGPT
        return _chat((str(each.get("from", each.get("role"))), each.get("value", each.get("content")))
                     for each in entry["conversations"])  # fmt: skip
    if isinstance(entry.get("turns"), list):
        return _chat(("user", turn) for turn in entry["turns"])
    if isinstance(entry.get("prompt"), str):
        return _chat([("user", entry["prompt"])])
    if isinstance(entry.get("question"), str):
        answer = entry.get("answer")
        return _chat([("user", entry["question"]), *([("assistant", answer)] if isinstance(answer, str) else [])])
    if isinstance(entry.get("text"), str) and entry["text"].strip():
        return Conversation(text=entry["text"])
    raise ValueError(f"knows none of the ways to write a prompt: {_FORMS}")


def _chat(messages: Any) -> Conversation:
    found = []
    for speaker, content in messages:
        role = _SPEAKERS.get(speaker.lower())
        if role is None:
            raise ValueError(f"nobody is called {speaker!r}: roles are {', '.join(sorted(set(_SPEAKERS.values())))}")
        if not isinstance(content, str):
            raise ValueError(f"a message's content must be text, not {type(content).__name__}")
        found.append((role, content))
    while found and found[0][0] == "assistant":  # ShareGPT's begin in the middle at times
        found.pop(0)
    if not any(role == "user" and content.strip() for role, content in found):
        raise ValueError("the user says nothing")
    return Conversation(tuple(found))


def check_template(conversations: list[Conversation], tokenizer: Tokenizer | None, model: str, *, chat: bool) -> None:
    """That they can become tokens."""
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer: text cannot become tokens")
    if chat and any(each.is_chat for each in conversations) and not tokenizer.has_chat_template:
        raise ValueError(
            f"{model} has no chat template, and the data are conversations: choose a chat model, or --no-chat to take "
            "what users say as the beginnings of texts"
        )
