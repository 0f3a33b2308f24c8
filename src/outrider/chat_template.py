"""From a conversation to the text of a prompt, by the chat template that came with a model or by a given one.
What clients write in several ways (text in parts, arguments as JSON text) reaches every template in one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.overload import OverloadError
from outrider.template import TemplateError, Templates

MAX_CHAT_LEN = 16 * 2**20  # characters a chat template may produce; a hostile template must not fill the memory

MAX_IMAGES = 16  # in one conversation
LONG_CHAT, MANY_MESSAGES = 2**16, 2**8  # characters and messages

Messages = Sequence[Mapping[str, Any]]
_OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation becomes a prompt, in the names that vLLM users know."""

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None  # its source, instead of the model's own
    add_generation_prompt: bool = True  # the prompt ends with the header of the assistant's next message
    continue_final_message: bool = False  # the prompt ends inside the last message, which the model goes on with
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the template, as enable_thinking

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message goes on with the last message, and add_generation_prompt begins a new one: "
                "set add_generation_prompt to false"
            )
        own = [name for name in _OWN if name in self.template_kwargs]
        if own:
            raise ValueError(f"chat_template_kwargs holds {own[0]}, which is an option of its own: give it there")


def template_text(given: str | Path | None) -> str | None:
    """A chat template's text: given as such, or as a file that holds it."""
    if given is None or (isinstance(given, str) and ("{" in given or "\n" in given)):
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template is neither a template nor a file that holds one: {given}")
    return path.read_text(encoding="utf-8")


class ChatTemplates:
    """The chat templates of one model, by name; the usual one is called "default"."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        self.sources = dict(sources)
        self._special_tokens, self.origin = dict(special_tokens), origin
        self._given: tuple[str, Templates] | None = None  # the last template that a caller brought along

    def render(self, messages: Messages, options: ChatOptions) -> str:
        plain = plain_messages(messages)
        if not options.continue_final_message:
            return self._render(plain, options)
        mark = secrets.token_hex(16)  # templates write more after a message; this shows where its text ends
        last = plain[-1] if plain else {}
        if not isinstance(last.get("content"), str):
            raise ValueError("continue_final_message needs a last message whose content is text")
        marked = [*plain[:-1], {**last, "content": last["content"] + mark}]
        text, found, _ = self._render(marked, options).rpartition(mark)
        if not found:
            raise ValueError(f"the chat template of {self.origin} leaves the last message out: it cannot be continued")
        return text

    def _render(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        given = {
            "messages": messages,
            "tools": options.tools,
            "add_generation_prompt": options.add_generation_prompt,
        }
        variables = {"documents": None, **self._special_tokens, **options.template_kwargs, **given}
        is_own = options.chat_template is None
        origin = f"the chat template of {self.origin}" if is_own else "the given chat_template"
        try:
            if options.chat_template is None:
                renderer = self._own_for_long if _is_long(messages) else self._own
                return renderer.render(self._name(options.tools), variables)
            return self._renderer_of(options.chat_template).render("default", variables)
        except TemplateError as error:
            if error.is_busy:
                raise OverloadError(f"{error}: try again later") from error
            if error.is_source:
                raise ValueError(f"{origin} does not parse ({error}); replace it") from error
            raise ValueError(f"{origin} failed on these messages ({error})") from error
        except RecursionError:
            raise ValueError("the messages are nested too deeply for a chat template; flatten them") from None

    @cached_property
    def _own(self) -> Templates:
        return Templates(self.sources, MAX_CHAT_LEN)

    @cached_property
    def _own_for_long(self) -> Templates:
        """One after the other is rendered, and nobody should wait for a book."""
        return Templates(self.sources, MAX_CHAT_LEN)

    def _renderer_of(self, source: str) -> Templates:
        """Kept until another template is given: its process need not start anew for every prompt."""
        kept = self._given
        if kept is None or kept[0] != source:
            kept = self._given = (source, Templates({"default": source}, MAX_CHAT_LEN))
        return kept[1]

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if not self.sources:
            raise ValueError(
                f"{self.origin} has no chat template; send a plain prompt, or give it a chat_template.jinja"
            )
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise ValueError(f"{self.origin} has no default chat template, only {known}; name one of them 'default'")
        return name


def _is_long(messages: Sequence[Mapping[str, Any]]) -> bool:
    return len(messages) > MANY_MESSAGES or sum(len(str(each.get("content"))) for each in messages) > LONG_CHAT


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """As templates expect them: content in parts is one text, unless there is an image among the parts, and the
    arguments of tool calls are objects."""
    plain = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"a message must be a mapping with a role and content, not {type(message).__name__}")
        fields = dict(message)
        content = fields.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            fields["content"] = _content_of(content)
        if fields.get("tool_calls"):
            fields["tool_calls"] = [_call_of(call) for call in fields["tool_calls"]]
        plain.append(fields)
    return plain


def _content_of(parts: Sequence[Any]) -> str | list[Any]:
    read = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    for part in read:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind not in ("text", "image", "image_url") or (kind == "text" and not isinstance(part.get("text"), str)):
            raise ValueError(f"a message's content holds a part of type {kind!r}: text and images are taken")
    if all(part["type"] == "text" for part in read):
        return "".join(part["text"] for part in read)
    return read


def _call_of(call: Any) -> Any:
    """Clients send a call's arguments as JSON text; templates write JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise ValueError("the arguments of a tool call in messages are not valid JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """A conversation without its images, and the images in order. A part of a message's content is an image where it
    is {"type": "image", "image": ...} or OpenAI's {"type": "image_url", "image_url": {"url": "data:..."}}."""
    plain, pictures = [], []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) and isinstance(content, Sequence):
            parts = []
            for part in content:
                if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                    pictures.append(_picture_in(part))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        plain.append(dict(message))
    if len(pictures) > MAX_IMAGES:
        raise ValueError(f"the conversation holds {len(pictures)} images; at most {MAX_IMAGES} are taken")
    return plain, pictures


def _picture_in(part: Mapping[str, Any]) -> Any:
    found = part.get("image") or part.get("image_url")
    if isinstance(found, Mapping):
        found = found.get("url")
    if found is None:
        raise ValueError(f"an image part of a message has no image: {sorted(part)}")
    return found
