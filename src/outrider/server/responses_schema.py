"""What a client may send to /v1/responses, and the chat that is meant by it. Nothing is stored here: a conversation
goes on by sending all of it again, the model's own items included."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from outrider.compatibility import fields
from outrider.compatibility.rules import Rules
from outrider.server.schema import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    ChatRequest,
    Flag,
    Generation,
    Name,
    PredictedOutput,
    Text,
    Whole,
    holds_image,
    within,
)
from outrider.server.schema_base import Lenient, Strict

FunctionNameText = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class InputText(Lenient):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text

    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class InputRefusal(Lenient):
    type: Literal["refusal"]
    refusal: Text

    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.refusal}


class InputImage(Lenient):
    type: Literal["input_image"]
    image_url: Annotated[str, StringConstraints(max_length=2**26), AfterValidator(holds_image)]

    def part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


InputPart = Annotated[InputText | InputRefusal | InputImage, Field(discriminator="type")]
Content = Text | Annotated[list[InputPart], Field(max_length=MAX_MESSAGES)]


class MessageItem(Lenient):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Lenient):
    type: Literal["function_call"]
    call_id: Name
    name: FunctionNameText
    arguments: Text


class ResultItem(Lenient):
    type: Literal["function_call_output"]
    call_id: Name
    output: Content


class ReasoningItem(Lenient):
    """Of an earlier answer; a summary in the place of the text itself counts as much."""

    type: Literal["reasoning"]
    content: Annotated[list[InputText], Field(max_length=MAX_MESSAGES)] = Field([])
    summary: Annotated[list[InputText], Field(max_length=MAX_MESSAGES)] = Field([])

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]


class ResponseTool(Strict):
    """A function of the client's. Tools that a server would run itself are refused: there are none."""

    type: Literal["function"]
    name: FunctionNameText
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class ToolName(Strict):
    type: Literal["function"]
    name: Name


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("a schema goes with type json_schema, and only with it")
        return self

    def response_format(self) -> dict[str, Any]:
        if self.schema_ is None:
            return {"type": self.type}
        named = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": "json_schema", "json_schema": named}


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Name | None = None  # taken, and used for nothing


class ReasoningOptions(Strict):
    effort: Name | None = None
    summary: Name | None = None  # these two, taken and used for nothing: reasoning is given as it is
    generate_summary: Name | None = None


_OF_CHAT = set(Generation.model_fields) - {"n", "max_tokens", "stream_options", "response_format", "prompt_logprobs"}
_OF_CHAT -= {"return_token_ids", "return_drafts"}


class ResponseRequest(Generation):
    """The sampling options of a chat, beside OpenAI's fields."""

    foreign: ClassVar[Rules] = fields.RESPONSE

    n: Literal[1] = 1
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: Annotated[Whole, within("max_tokens")] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: Flag | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: dict[str, Any] | None = None  # given back, and used for nothing else
    store: Flag | None = None
    prediction: PredictedOutput | None = None

    @model_validator(mode="after")
    def _check_extras(self) -> ResponseRequest:
        foreign = ("return_token_ids", "return_drafts", "prompt_logprobs", "continuation")
        asked = [name for name in foreign if getattr(self, name)]
        if asked:
            raise ValueError(f"{asked[0]} has no place in a response: ask /v1/chat/completions")
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_types(cls, given: Any) -> Any:
        """A message may come without its type."""
        if isinstance(given, dict) and isinstance(given.get("input"), list):
            items = [
                {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
                for item in given["input"]
            ]
            return {**given, "input": items}
        return given

    def chat(self) -> ChatRequest:
        """The same as a chat. What is wrong with a part of it is said in the chat's own terms."""
        shared = self.model_dump(include=_OF_CHAT & self.model_fields_set, by_alias=True)
        wanted: dict[str, Any] = {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens if self.max_output_tokens is not None else self.max_tokens,
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "logprobs": self.top_logprobs is not None,
            "top_logprobs": self.top_logprobs,
        }
        return ChatRequest.model_validate(shared | wanted)

    def _response_format(self) -> dict[str, Any] | None:
        if self.text is not None and self.text.format is not None:
            return self.text.format.response_format()
        return self.response_format.model_dump(by_alias=True) if self.response_format is not None else None

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, ResultItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
            elif isinstance(item, MessageItem) and item.role != "assistant":
                messages.append({"role": item.role, "content": _content(item.content)})
            else:
                _add_to_answer(messages, item)
        return messages


def _add_to_answer(messages: list[dict[str, Any]], item: MessageItem | CallItem | ReasoningItem) -> None:
    """Reasoning, text and calls that follow each other were one message of the assistant's."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or (not isinstance(item, CallItem) and ("content" in last or "tool_calls" in last)):
        last = {"role": "assistant"}
        messages.append(last)
    if isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        last["reasoning_content"] = last.get("reasoning_content", "") + item.text
    else:
        last["content"] = _content(item.content)


def _content(content: Content) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.part() for part in content]


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _chat_choice(choice: str | ToolName | None) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ToolName) else choice
