"""instructor: schemas through tools, through JSON schemas, and as they grow."""

import instructor
from common import KEY, MAX_TOKENS, MODEL, QUESTION, Step, addresses, report
from openai import OpenAI

options = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
plain = OpenAI(base_url=addresses()[0], api_key=KEY)
tools = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
called, raw = tools.chat.completions.create_with_completion(response_model=Step, max_tokens=100, **options)
call = raw.choices[0].message.tool_calls[0]
schemas = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
structured = schemas.chat.completions.create(response_model=Step, max_tokens=100, **options)
*_, grown = schemas.chat.completions.create_partial(response_model=Step, max_tokens=100, **options)
text = {"response_model": None, "max_tokens": MAX_TOKENS}
streamed = tools.chat.completions.create(**text, stream=True, **options)
report(
    chat=tools.chat.completions.create(**text, **options).choices[0].message.content,
    streamed="".join(chunk.choices[0].delta.content or "" for chunk in streamed),
    call={"name": call.function.name, "arguments": call.function.arguments},
    called=called.model_dump(),
    structured=structured.model_dump(),
    grown=grown.model_dump(),
)
