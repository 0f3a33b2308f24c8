# mypy: ignore-errors
"""Answers that must look like something."""

import json
import re
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

schema = {
    "type": "object",
    "properties": {"brand": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["brand", "age"],
}


def main():
    llm = LLM(model=sys.argv[1], max_model_len=256)

    def answer(structured_outputs, prompt):
        params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=structured_outputs)
        return llm.generate(prompt, sampling_params=params)[0].outputs[0].text

    choice = answer(StructuredOutputsParams(choice=["Positive", "Negative"]), "This is fun! It is")
    regex = answer(StructuredOutputsParams(regex=r"[a-z]{2,8}@[a-z]{2,8}\.com"), "My address is")
    described = answer(StructuredOutputsParams(json=schema), "A car as JSON:")
    print(choice, regex, described)
    assert choice in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{2,8}@[a-z]{2,8}\.com", regex)
    assert set(json.loads(described)) == {"brand", "age"}


if __name__ == "__main__":
    main()
