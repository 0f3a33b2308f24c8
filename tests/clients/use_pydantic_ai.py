"""pydantic-ai: agents whose output is text, a schema through a tool, a schema of its own; and one on responses."""

import asyncio

from common import KEY, MAX_TOKENS, MODEL, QUESTION, Step, addresses, report
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=addresses()[0], api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)
short = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
long = {"temperature": 0.0, "max_tokens": 100}


async def streamed() -> str:
    async with Agent(model, model_settings=short).run_stream(QUESTION) as run:
        return await run.get_output()


whole = Agent(model, model_settings=short).run_sync(QUESTION).output
by_tool = Agent(model, output_type=Step, model_settings=long).run_sync(QUESTION)
parts = [part for message in by_tool.all_messages() if isinstance(message, ModelResponse) for part in message.parts]
call = next(part for part in parts if isinstance(part, ToolCallPart))
native = Agent(model, output_type=NativeOutput(Step), model_settings=long).run_sync(QUESTION)
response = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=short).run_sync(QUESTION)
report(
    chat=whole,
    streamed=asyncio.run(streamed()),
    call={"name": call.tool_name, "arguments": call.args_as_dict()},
    called=by_tool.output.model_dump(),
    structured=native.output.model_dump(),
    response=response.output,
)
