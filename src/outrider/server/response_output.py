"""From the deltas of an assistant's message to the items of /v1/responses and the events that tell of them. A whole
response is what its events add up to, so the two cannot differ."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from outrider.server.messages import Delta

Event = dict[str, Any]


class ResponseOutput:
    """Items, in the order in which the model wrote them; at most the last is still being written."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._call: int | None = None  # the number of the call that is being written
        self._logprobs: list[dict[str, Any]] = []  # of tokens that no text has come of yet

    def read(self, deltas: Sequence[Delta], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """`logprobs` of the tokens that these deltas were made of."""
        self._logprobs += logprobs
        events: list[Event] = []
        for delta in deltas:
            if delta.get("content"):
                events += self._write_text(delta["content"])
            elif delta.get("reasoning_content"):
                events += self._write_reasoning(delta["reasoning_content"])
            for call in delta.get("tool_calls", ()):
                events += self._write_call(call)
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """The end of the last item. An answer without any item has an empty text."""
        opened = [] if self.items else self._open_text()
        return opened + self._close("completed" if complete else "incomplete")

    # what is written

    def _write_text(self, text: str) -> list[Event]:
        opened = [] if self._is_open("message") else self._open_text()
        part, logprobs = self.items[-1]["content"][0], self._taken()
        part["text"] += text
        part["logprobs"] += logprobs
        return [*opened, self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _write_reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open("reasoning"):
            events = self._open({"type": "reasoning", "id": _name("rs"), "summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
            events.append(self._event("content_part.added", content_index=0, part=dict(part)))
            self.items[-1]["content"].append(part)
        self.items[-1]["content"][0]["text"] += text
        return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def _write_call(self, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if not self._is_open("function_call") or call["index"] != self._call:
            named = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
            events = self._open({"type": "function_call", "id": _name("fc"), **named})
            self._call = call["index"]
        arguments = call["function"].get("arguments", "")
        if arguments:
            self.items[-1]["arguments"] += arguments
            events.append(self._event("function_call_arguments.delta", delta=arguments))
        return events

    # items

    def _is_open(self, kind: str) -> bool:
        return bool(self.items) and self.items[-1]["type"] == kind and self.items[-1]["status"] == "in_progress"

    def _open(self, item: dict[str, Any]) -> list[Event]:
        closed = self._close("completed")
        self.items.append(item | {"status": "in_progress"})
        return [*closed, self._event("output_item.added", named=False, item=_copy(self.items[-1]))]

    def _open_text(self) -> list[Event]:
        events = self._open({"type": "message", "id": _name("msg"), "role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events.append(self._event("content_part.added", content_index=0, part=_copy(part)))
        self.items[-1]["content"].append(part)
        return events

    def _close(self, status: str) -> list[Event]:
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item = self.items[-1]
        events = []
        if item["type"] == "function_call":
            events.append(self._event("function_call_arguments.done", arguments=item["arguments"], name=item["name"]))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._taken()
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._event("output_text.done", content_index=0, **done))
            else:
                events.append(self._event("reasoning_text.done", content_index=0, text=part["text"]))
            events.append(self._event("content_part.done", content_index=0, part=_copy(part)))
        item["status"] = status
        return [*events, self._event("output_item.done", named=False, item=_copy(item))]

    def _event(self, kind: str, *, named: bool = True, **fields: Any) -> Event:
        place = {"output_index": len(self.items) - 1}
        if named:
            place |= {"item_id": self.items[-1]["id"]}
        return {"type": f"response.{kind}", **place, **fields}

    def _taken(self) -> list[dict[str, Any]]:
        taken, self._logprobs = self._logprobs, []
        return taken


def _copy(value: Any) -> Any:
    """An item as it is now: the original will be written on."""
    if isinstance(value, dict):
        return {name: _copy(each) for name, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _name(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
