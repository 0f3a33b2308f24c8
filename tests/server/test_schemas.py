"""Two hundred schemas over HTTP, drafts on: every finished answer keeps to its schema, and is the plain answer."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest
from made_schemas import KEYS, Schema, schemas
from running import Running

from outrider.tokenizer import Tokenizer

pytest.importorskip("xgrammar")

NUM_SCHEMAS = 200
NUM_AT_ONCE = 16
MAX_TOKENS = 160
MESSAGES = [{"role": "user", "content": "Answer in JSON."}]


def prediction(number: int, text: str) -> dict[str, Any]:
    """For every second one, so that long runs are accepted as well: the answer itself, wrong in one place. The drafter
    alone knows nothing of the grammar, nor of the bias, and is rarely right."""
    if number % 2 or not text:
        return {}
    middle = len(text) // 2
    return {"prediction": {"type": "content", "content": f"{text[:middle]}?{text[middle + 1 :]}"}}


@dataclass
class Answer:
    text: str
    reason: str
    drafted: int
    accepted: int


def body_of(number: int, schema: Schema) -> dict[str, Any]:
    """In one of the two ways to say it; two are greedy, two are sampled, and so on."""
    form = {"type": "json_schema", "json_schema": {"name": "made", "schema": schema}}
    said = {"response_format": form} if number % 3 else {"guided_json": schema}
    return {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": number // 2 % 2, "seed": number, **said}


def brevity(tokenizer: Tokenizer) -> dict[str, float]:
    """A bias against white space and towards closing quotes: left to itself, this small model fills pages with both."""
    texts = {token: tokenizer.token(token) for token in range(tokenizer.vocab_size)}
    blank = {str(token): -50.0 for token, text in texts.items() if text and not text.strip()}
    return blank | {str(token): 9.0 for token, text in texts.items() if text.startswith('"')}


def ask(client: httpx.Client, body: dict[str, Any]) -> Answer:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, (response.text, body)
    answer = response.json()
    figures = (answer["metrics"] or {}).get("speculative_decoding", {})
    choice = answer["choices"][0]
    drafted, accepted = figures.get("num_draft_tokens", 0), figures.get("num_accepted_draft_tokens", 0)
    return Answer(choice["message"]["content"], choice["finish_reason"], drafted, accepted)


def test_answers_keep_to_their_schemas(running: Running) -> None:
    made = schemas(NUM_SCHEMAS)
    tokenizer = running.llm.tokenizer
    assert tokenizer is not None
    bias = {"logit_bias": brevity(tokenizer)}
    bodies = [body_of(number, schema) | bias for number, schema in enumerate(made)]
    plain_bodies = [body | {"speculative": {"enabled": False}} for body in bodies]
    with httpx.Client(base_url=running.url, timeout=60) as client, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        plain = list(pool.map(lambda body: ask(client, body), plain_bodies))
        predicted = [body | prediction(number, plain[number].text) for number, body in enumerate(bodies)]
        answers = list(pool.map(lambda body: ask(client, body), predicted))
    ends = Counter(answer.reason for answer in answers)
    for schema, answer, other in zip(made, answers, plain, strict=True):
        assert (answer.text, answer.reason) == (other.text, other.reason), schema
        assert other.drafted == 0
        if answer.reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema)
    drafted, accepted = sum(answer.drafted for answer in answers), sum(answer.accepted for answer in answers)
    print(f"{dict(ends)}; {accepted} of {drafted} drafted tokens accepted")
    assert set(ends) <= {"stop", "length"}
    assert ends["length"] < 0.05 * NUM_SCHEMAS, "answers that max_tokens cut say nothing about schemas"
    assert min(accepted, drafted - accepted) > 500


def test_schemas_are_of_many_shapes() -> None:
    made = schemas(NUM_SCHEMAS)
    text = json.dumps(made, ensure_ascii=False)
    assert made == schemas(NUM_SCHEMAS)
    assert len({json.dumps(schema) for schema in made}) == NUM_SCHEMAS
    words = "$ref $defs definitions anyOf oneOf enum const pattern format minItems maxItems prefixItems minLength"
    for word in [*words.split(), "additionalProperties", "exclusiveMaximum", "minimum", "required"]:
        assert f'"{word}"' in text, word
    for key in KEYS:
        assert json.dumps(key, ensure_ascii=False) in text, key


def test_the_check_can_fail() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 3}}, "required": ["x"]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"x": 4}, schema)
