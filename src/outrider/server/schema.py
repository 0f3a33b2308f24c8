"""What a client may send. Every field has a bound, checked before anything is made of it; unknown fields are refused:
a field that silently does nothing would be worse."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from outrider.compatibility import fields
from outrider.compatibility.rules import Rules
from outrider.sampling_params import BOUNDS, MAX_PREDICTION, MAX_STOP_STRINGS
from outrider.server.schema_base import Lenient, Strict, settle_fields

MAX_ANSWERS = 64  # of one request: n
MAX_TEXT = 2**22  # characters in one text
MAX_TOKENS = 2**20
MAX_ALLOWED = 2**18  # no vocabulary has more ids
MAX_MESSAGES = 4096
MAX_PROMPTS = 64
MAX_BIASES = 1024
MAX_CHOICES = 1024
MAX_PATTERN = 2**16  # characters in a grammar
MAX_TOP_LOGPROBS = 20  # as OpenAI has it
MAX_VARIABLES = 64  # of a chat template
TEMPLATE_OWN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


def within(name: str, *, least: int | None = None) -> Any:
    """The bounds that a field of SamplingParams has."""
    low, high = BOUNDS[name]
    return Field(ge=low if least is None else least, le=high)


# strict: true is no number, and neither is "7"
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
TokenKey = Annotated[int, Field(ge=0, lt=2**31)]  # JSON has texts only as keys
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
Begun = Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]
Continuation = Annotated[list[Begun], Field(min_length=1, max_length=MAX_PROMPTS * MAX_ANSWERS)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Name = Annotated[str, StringConstraints(max_length=256)]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATTERN)]
RequestId = Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9._:/=+-]+$")]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class StreamOptions(Strict):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False  # taken, and used for nothing; --pace does more


class Speculative(Strict):
    """Speculation of this request: the same answer either way, only sooner or later."""

    enabled: Flag = True
    num_speculative_tokens: Annotated[Whole, within("num_speculative_tokens")] | None = None

    @property
    def num_tokens(self) -> int | None:
        return self.num_speculative_tokens if self.enabled else 0


class JsonSchema(Strict):
    name: Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Flag | None = None  # always is


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


class StructuredOutputs(Strict):
    """What an answer must look like, in vLLM's names: one of them."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")  # a schema, or its text
    regex: Pattern | None = None
    choice: Annotated[list[Pattern], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Pattern | None = None
    json_object: Flag | None = None
    disable_fallback: Flag = False  # these three, taken and used for nothing, hold in any case
    disable_any_whitespace: Flag = False
    disable_additional_properties: Flag = False


class TextPart(Lenient):
    type: Literal["text"]
    text: Text


class RefusalPart(Lenient):
    """A refusal in an answer of another model, sent back in a conversation."""

    type: Literal["refusal"]
    refusal: Text


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

    foreign: ClassVar[Rules] = fields.CHAT  # what becomes of fields that are not declared here
    model: Name | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_ANSWERS)] = 1
    temperature: Annotated[Number, within("temperature")] | None = None
    top_p: Annotated[Number, within("top_p")] | None = None
    top_k: Annotated[Whole, within("top_k")] | None = None
    min_p: Annotated[Number, within("min_p")] | None = None
    seed: Annotated[Whole, within("seed")] | None = None
    repetition_penalty: Annotated[Number, within("repetition_penalty")] | None = None
    presence_penalty: Annotated[Number, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[Number, within("frequency_penalty")] | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Annotated[Number, within("logit_bias")]], Field(max_length=MAX_BIASES)] | None
    ) = None
    bad_words: list[Stop] = Field([], max_length=MAX_STOP_STRINGS)
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    max_tokens: Annotated[Whole, within("max_tokens")] | None = None
    min_tokens: Annotated[Whole, within("min_tokens")] = 0
    ignore_eos: Flag = False
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_STRINGS)
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    speculative: Speculative | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None  # a schema, or its text
    guided_regex: Pattern | None = None
    guided_choice: Annotated[list[Pattern], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    guided_grammar: Pattern | None = None
    guided_max_whitespace: Annotated[Whole, within("max_whitespace")] = 1  # between two parts of a JSON text
    guided_close: Flag = True  # JSON that max_tokens would cut is closed in time
    return_token_ids: Flag = False  # with every choice: its tokens, their texts, and the place of each in a draft
    return_drafts: Flag = False  # with every piece of a stream: what had been drafted for it
    prediction: PredictedOutput | None = None  # what the answer will be like; the answer is the same without
    continuation: Continuation | None = None  # of each answer: the tokens that it has; what is asked for is the rest
    allow_learning: Flag = False  # a drafter that learns online may learn from this answer
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    timeout: Annotated[Number, Field(gt=0, le=86400)] | None = None  # seconds; at most the server's own deadline
    request_id: RequestId | None = None  # becomes part of the answer's id; what the log calls it
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=2**31)] | None = None  # its last tokens; -1: what has room
    prompt_logprobs: Annotated[Whole, within("prompt_logprobs")] | None = None  # not in a stream

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, given: Any) -> Any:
        return settle_fields(cls, cls.foreign, given)

    @model_validator(mode="after")
    def _check(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs come with a whole answer only: leave out stream")
        if self.return_drafts and not (self.stream and self.return_token_ids):
            raise ValueError("return_drafts needs stream: true and return_token_ids: true")
        return self


def holds_image(url: str) -> str:
    if not url.startswith("data:"):
        raise ValueError("an image must come as a data: URL; nothing is fetched, and no file of the server is read")
    return url


class ImageUrl(Lenient):
    """The image itself: nothing is fetched, and no file of the server is read."""

    url: Annotated[str, StringConstraints(max_length=2**26), AfterValidator(holds_image)]


class ImagePart(Lenient):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Lenient):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    arguments: Text | dict[str, Any] = "{}"


class MadeCall(Lenient):
    """A call of a tool, in an earlier message."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Lenient):
    """One that was said. What other servers and clients add to a message is left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(max_length=MAX_MESSAGES)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # the same under its newer name
    tool_calls: Annotated[list[MadeCall], Field(max_length=128)] | None = None
    tool_call_id: Name | None = None


class Function(Strict):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class TemplateOptions(Strict):
    """What a chat template may be told: variables of its own; none that would change what is rendered, or by what."""

    model_config = ConfigDict(extra="allow")

    enable_thinking: Flag | None = None  # Qwen, GLM
    thinking: Flag | None = None  # DeepSeek
    reasoning_effort: Name | None = None  # gpt-oss

    @model_validator(mode="after")
    def _check(self) -> TemplateOptions:
        others = self.__pydantic_extra__ or {}
        if len(others) > MAX_VARIABLES:
            raise ValueError(f"at most {MAX_VARIABLES} variables are taken")
        for name in others:
            if not name.isidentifier() or len(name) > 64 or name in TEMPLATE_OWN or name.endswith("_token"):
                raise ValueError(f"{name[:64]} is no variable that a client may set")
        return self


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Whole, within("max_tokens")] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    reasoning_effort: Name | None = None  # for the template; none: no reasoning, where the template can do without
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False  # needs add_generation_prompt: false

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class CompletionRequest(Generation):
    foreign: ClassVar[Rules] = fields.COMPLETION
    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[Whole, within("logprobs")] | None = None
    max_tokens: Annotated[Whole, within("max_tokens", least=0)] | None = None
    echo: Flag = False
    add_special_tokens: Flag = True

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ValueError("echo gives the whole prompt back, and truncate_prompt_tokens reads a part: leave one out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: true, which gives the prompt back; else there is no answer")
        return self


class TokenizeRequest(Strict):
    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: Flag = True
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        return self


class DetokenizeRequest(Strict):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]
    skip_special_tokens: Flag = False
