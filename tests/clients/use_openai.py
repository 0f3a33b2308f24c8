"""The official client: both of its interfaces."""

from common import KEY, MAX_TOKENS, MODEL, QUESTION, WALK, Step, addresses, report
from openai import OpenAI

client = OpenAI(base_url=addresses()[0], api_key=KEY)
options = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
whole = client.chat.completions.create(**options, max_tokens=MAX_TOKENS)
chunks = client.chat.completions.create(**options, max_tokens=MAX_TOKENS, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
called = client.chat.completions.create(**options, tools=[WALK], tool_choice="required", parallel_tool_calls=False)
call = called.choices[0].message.tool_calls[0]
# the conversation goes on with everything that the client makes of a message
after = [*options["messages"], called.choices[0].message.model_dump()]
after.append({"role": "tool", "tool_call_id": call.id, "content": "two hours later"})
client.chat.completions.create(**{**options, "messages": after}, tools=[WALK], max_tokens=4, store=False, metadata={})
parsed = client.chat.completions.parse(**options, response_format=Step, max_tokens=100)
report(
    chat=whole.choices[0].message.content,
    streamed=streamed,
    call={"name": call.function.name, "arguments": call.function.arguments},
    structured=parsed.choices[0].message.parsed.model_dump(),
)
