"""How many answers in JSON end, on any target: eighteen prompts, with a schema (one of three), and with json_object.

    PYTHONPATH=src python scripts/measure_json.py [--model M] [--max-tokens 512] [--temperature 0] [--whitespace 1]

An answer has *ended* where the model ended it, was *closed* where max_tokens would have cut it and it was ended in time
(the default of Guided), and *cut* otherwise. The last line is JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from outrider import LLM, Guided, SamplingParams
from outrider.engine.request import CLOSED

TOPICS = ("a dog", "a recipe for soup", "the weather", "a person", "a book", "three colours")
FORMS = ("Describe {} as JSON.", "Tell me about {}. Answer in JSON.", "Give me {} in JSON.")
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS]
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {"type": "object", "properties": {"name": TEXT, "age": NUMBER}, "required": ["name", "age"]},
    "list": {
        "type": "object",
        "properties": {"title": TEXT, "items": {"type": "array", "items": TEXT}},
        "required": ["title", "items"],
    },
    "nested": {
        "type": "object",
        "properties": {
            "who": {"type": "object", "properties": {"name": TEXT, "kind": {"type": "boolean"}}, "required": ["name"]},
            "kind": {"enum": ["small", "large"]},
            "price": {"type": "number"},
        },
        "required": ["who", "kind", "price"],
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--whitespace", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the answers")
    given = parser.parse_args()
    found = {}
    with LLM(given.model) as llm:
        for form in ("json_schema", "json_object"):
            schemas = [{"json_schema": schema} for schema in SCHEMAS.values()]
            found[form] = measure(llm, schemas if form == "json_schema" else [{form: True}], given)
            print(f"{form}: {', '.join(f'{name} {count}' for name, count in found[form].items())}")
    print(json.dumps(found))


def measure(llm: LLM, guides: list[dict[str, Any]], given: argparse.Namespace) -> dict[str, int]:
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS]
    wanted = [Guided(**guides[number % len(guides)], max_whitespace=given.whitespace) for number in range(len(prompts))]
    common = {"temperature": given.temperature, "max_tokens": given.max_tokens}
    params = [SamplingParams(**common, seed=number, guided=guided) for number, guided in enumerate(wanted)]
    counts: Counter[str] = Counter()
    for output in llm.generate(prompts, params):
        (answer,) = output.outputs
        closed = answer.stop_reason == CLOSED
        counts["cut" if answer.finish_reason != "stop" else "closed" if closed else "ended"] += 1
        if answer.finish_reason == "stop":
            json.loads(answer.text)
        if given.show:
            print(len(answer.token_ids), answer.stop_reason, repr(answer.text[:300]))
    return {"answers": len(prompts), **{name: counts[name] for name in ("ended", "closed", "cut")}}


if __name__ == "__main__":
    main()
