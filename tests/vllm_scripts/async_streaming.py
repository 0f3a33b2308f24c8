# mypy: ignore-errors
"""Tokens as they come, of several requests at once."""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine, prompt, request_id):
    params = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
    text, num_outputs = "", 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        num_outputs += 1
        for completion in output.outputs:
            text += completion.text
        if output.finished:
            break
    assert num_outputs > 1
    print(f"{request_id}: {text!r}")


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], enforce_eager=True))
    try:
        prompts = ["The little dog", "In the forest", "The key to happiness is"]
        await asyncio.gather(*(stream_response(engine, prompt, f"stream-{i}") for i, prompt in enumerate(prompts)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
