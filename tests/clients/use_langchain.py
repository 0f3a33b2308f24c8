"""langchain-openai, through chat completions and through responses."""

from common import KEY, MAX_TOKENS, MODEL, QUESTION, WALK, Step, addresses, report
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

options = {"model": MODEL, "base_url": addresses()[0], "api_key": KEY, "temperature": 0}
chat = ChatOpenAI(**options, max_tokens=MAX_TOKENS)
whole = chat.invoke(QUESTION)
streamed = "".join(chunk.text for chunk in chat.stream(QUESTION))
caller = ChatOpenAI(**options, max_tokens=100).bind_tools([WALK], tool_choice="walk")
called = caller.invoke(QUESTION)
call = called.tool_calls[0]
history = [HumanMessage(QUESTION), called, ToolMessage("two hours later", tool_call_id=call["id"])]
chat.bind_tools([WALK]).invoke(history)
structured = ChatOpenAI(**options, max_tokens=100).with_structured_output(Step, method="json_schema").invoke(QUESTION)
responses = ChatOpenAI(**options, max_tokens=MAX_TOKENS, use_responses_api=True)
report(
    chat=whole.text,
    streamed=streamed,
    call={"name": call["name"], "arguments": call["args"]},
    structured=structured.model_dump(),
    response=responses.invoke(QUESTION).text,
    streamed_response="".join(chunk.text for chunk in responses.stream(QUESTION)),
)
