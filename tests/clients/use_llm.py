"""The `llm` tool, through its Python interface. It cannot insist on a call: the other server's model makes one."""

import json

from common import KEY, MAX_TOKENS, MODEL, QUESTION, Step, addresses, report
from llm.default_plugins.openai_models import Chat

url, calling_url = addresses()


def model(base: str) -> Chat:
    return Chat(MODEL, key=KEY, model_name=MODEL, api_base=base, supports_schema=True, supports_tools=True)


def walk(hours: int) -> str:
    """Go somewhere"""
    return f"{hours} hours later"


options = {"temperature": 0, "max_tokens": MAX_TOKENS}
whole = model(url).prompt(QUESTION, stream=False, **options).text()
streamed = "".join(model(url).prompt(QUESTION, stream=True, **options))
asked = model(calling_url).prompt(QUESTION, tools=[walk], stream=False, temperature=0, max_tokens=100)
call = asked.tool_calls()[0]
result = asked.execute_tool_calls()[0]
formed = model(url).prompt(QUESTION, schema=Step, stream=False, temperature=0, max_tokens=100).text()
report(
    chat=whole,
    streamed=streamed,
    call={"name": call.name, "arguments": call.arguments},
    result=result.output,
    structured=json.loads(formed),
)
