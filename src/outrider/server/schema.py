"""What a client may send. Every field has a bound, checked before anything is made of it; unknown fields are refused:
a field that silently does nothing would be worse."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from outrider.sampling_params import MAX_LOGPROBS, MAX_PREDICTION, MAX_STOP_STRINGS, MAX_WHITESPACE

MAX_N = 64
MAX_TEXT = 2**22  # characters in one text
MAX_TOKENS = 2**20
MAX_ALLOWED = 2**18  # no vocabulary has more ids
MAX_MESSAGES = 4096
MAX_PROMPTS = 64
MAX_BIASES = 1024
MAX_CHOICES = 1024
MAX_PATTERN = 2**16  # characters in a grammar
MAX_TOP_LOGPROBS = 20  # as OpenAI has it


# strict: true is no number, and neither is "7"
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenKey = Annotated[int, Field(ge=0, lt=2**31)]  # JSON has texts only as keys
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Name = Annotated[str, StringConstraints(max_length=256)]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATTERN)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculative(Strict):
    """Speculation of this request: the same answer either way, only sooner or later."""

    enabled: bool = True
    num_speculative_tokens: Annotated[Whole, Field(ge=0, le=1024)] | None = None

    @property
    def num_tokens(self) -> int | None:
        return self.num_speculative_tokens if self.enabled else 0


class JsonSchema(Strict):
    name: Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # always is


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class PredictedOutput(Strict):
    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]

    @model_validator(mode="after")
    def _check(self) -> PredictedOutput:
        if len(self.text) > MAX_PREDICTION:
            raise ValueError(f"a prediction has at most {MAX_PREDICTION} characters")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Generation(Strict):
    """What chats and completions share."""

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=1e-3, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Annotated[Number, Field(ge=-1e4, le=1e4)]], Field(max_length=MAX_BIASES)] | None
    ) = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] = []
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1, le=2**31)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=2**31)] = 0
    ignore_eos: bool = False
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculative: Speculative | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | None = None  # a schema
    guided_regex: Pattern | None = None
    guided_choice: Annotated[list[Pattern], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    guided_grammar: Pattern | None = None
    guided_max_whitespace: Annotated[Whole, Field(ge=1, le=MAX_WHITESPACE)] = 1  # between two parts of a JSON text
    guided_close: bool = True  # JSON that max_tokens would cut is closed in time
    return_token_ids: bool = False  # with every choice: its tokens, their texts, and the place of each in a draft
    return_drafts: bool = False  # with every piece of a stream: what had been drafted for it
    prediction: PredictedOutput | None = None  # what the answer will be like; the answer is the same without
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    timeout: Annotated[Number, Field(gt=0, le=86400)] | None = None  # seconds; at most the server's own deadline
    user: Name | None = None  # taken, and used for nothing

    @model_validator(mode="after")
    def _check(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.return_drafts and not (self.stream and self.return_token_ids):
            raise ValueError("return_drafts needs stream: true and return_token_ids: true")
        return self


class ImageUrl(Strict):
    """The image itself: nothing is fetched, and no file of the server is read."""

    url: Annotated[str, StringConstraints(max_length=2**26, pattern=r"^data:")]
    detail: Name | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None


class Function(Strict):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class TemplateOptions(Strict):
    """What a chat template may be told; nothing that would change what is rendered, or by what."""

    enable_thinking: bool | None = None  # Qwen, GLM
    thinking: bool | None = None  # DeepSeek
    reasoning_effort: Literal["low", "medium", "high"] | None = None  # gpt-oss


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # needs add_generation_prompt: false

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class CompletionRequest(Generation):
    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False


class TokenizeRequest(Strict):
    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        return self


class DetokenizeRequest(Strict):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]
    skip_special_tokens: bool = False
