"""Whatever the OpenAPI document allows, and what it forbids: no answer is a server's error, all are as documented."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from running import Running, Serve
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from outrider.server.security import OPEN_PATHS, access_for

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    negative_data_rejection,
]
KEY = "a-key-of-ours"


MAX_EXAMPLES = 30  # of each kind, for each route
GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def adapted(body: Any, speculates: bool) -> Any:
    """Few tokens, so that it is soon done, and time to make them: a request may well ask for too little of it."""
    if not isinstance(body, dict) or not {"prompt", "messages", "input"} & set(body):
        return body
    if isinstance(body.get("model"), str) and len(body["model"]) > 2:  # else most requests would end with 404
        body["model"] = "default"
    for name in LENGTHS:
        if type(body.get(name)) is int and body[name] > 3:
            body[name] = 3
    if type(body.get("min_tokens")) is int and body["min_tokens"] > 3:
        body["min_tokens"] = 3
    if type(body.get("timeout")) in (int, float) and 0 < body["timeout"] < 20:
        body["timeout"] = 20
    if "max_tokens" not in body and "tokens" not in body:
        body["max_tokens"] = 3
    if not speculates and "speculative" not in body:
        body["speculative"] = {"enabled": False}
    return body


def explore(running: Running, paths: Callable[[str], bool], speculation: Sequence[bool]) -> Counter[int]:
    """Valid and invalid requests to those routes; how many got each status."""
    statuses: Counter[int] = Counter()
    document = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    for found in document.get_all_operations():
        operation = found.ok()
        if not paths(operation.path):
            continue
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and operation.method == "get":
                continue  # nothing could be wrong with it
            if mode is GenerationMode.NEGATIVE and operation.path == "/v1/responses":
                continue  # what is wrong for an item of one kind is right for another, and counted as wrong

            @settings(
                max_examples=MAX_EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def run(case: schemathesis.Case) -> None:
                for speculates in speculation:
                    case.body = adapted(case.body, speculates)
                    statuses[case.call_and_validate(checks=CHECKS, timeout=30).status_code] += 1

            run()
    return statuses


def test_generation(running: Running) -> None:
    statuses = explore(running, lambda path: path in GENERATION, (True, False))
    print(statuses)
    assert {200, 400} <= set(statuses) <= {200, 400, 404}  # whether a wrong model is among them is up to chance
    assert min(statuses[200], statuses[400]) >= 20


def test_other_routes(running: Running) -> None:
    statuses = explore(running, lambda path: path not in GENERATION, (True,))
    print(statuses)
    assert set(statuses) == {200, 400, 404}


def test_the_engine_is_well(running: Running) -> None:
    assert running.get("/health/decode").status_code == 200
    answer = running.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_the_document_says_who_needs_a_key(serve: Serve) -> None:
    with serve(access=access_for("127.0.0.1", [KEY])) as running:
        assert running.get("/openapi.json").status_code == 401
        document = running.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                needs_key = bool(operation["security"])
                assert needs_key == (path not in OPEN_PATHS)
                status = httpx.request(method, running.url + path.replace("{name}", "x"), timeout=30).status_code
                assert (status == 401) == needs_key, path


def test_every_route_documents_its_answers(running: Running) -> None:
    document = running.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            assert {"200", "4XX", "500"} <= set(answers), path
            assert "422" not in answers  # which FastAPI would promise by itself; here it is 400
            for content in answers["200"]["content"].values():
                assert content["schema"], path
            error = answers["4XX"]["content"]["application/json"]["schema"]["$ref"]
            assert error.endswith("/ErrorAnswer")
