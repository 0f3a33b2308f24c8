"""litellm, as a library."""

import litellm
from common import KEY, MAX_TOKENS, MODEL, QUESTION, WALK, Step, addresses, report

litellm.telemetry = False
options = {
    "model": f"openai/{MODEL}",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "api_base": addresses()[0],
    "api_key": KEY,
}
whole = litellm.completion(**options, max_tokens=MAX_TOKENS)
chunks = litellm.completion(**options, max_tokens=MAX_TOKENS, stream=True, stream_options={"include_usage": True})
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
called = litellm.completion(**options, tools=[WALK], tool_choice="required", parallel_tool_calls=False)
message = called.choices[0].message
call = message.tool_calls[0]
after = [*options["messages"], message.model_dump()]  # with provider_specific_fields and more
after.append({"role": "tool", "tool_call_id": call.id, "content": "two hours later"})
litellm.completion(**{**options, "messages": after}, tools=[WALK], max_tokens=4)
formed = litellm.completion(**options, response_format=Step, max_tokens=100)
try:
    litellm.completion(**{**options, "messages": [{"role": "user", "content": "word " * 5000}]}, max_tokens=4)
    error = "none"
except litellm.ContextWindowExceededError as raised:
    error = type(raised).__name__
report(
    chat=whole.choices[0].message.content,
    streamed=streamed,
    call={"name": call.function.name, "arguments": call.function.arguments},
    structured=Step.model_validate_json(formed.choices[0].message.content).model_dump(),
    too_long=error,
)
