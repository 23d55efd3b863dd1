"""The OpenAPI document, and requests made up from it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.server.live import LiveServer, answer, live

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[LiveServer, httpx.Client]]:
    with live(answer("fine")) as both:
        yield both


CASES = [
    (method, path, mode)
    for method, path in OPERATIONS
    for mode in schemathesis.GenerationMode
    # What takes nothing cannot be asked wrongly.
    if method == "POST" or mode is schemathesis.GenerationMode.POSITIVE
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_made_up_requests_get_documented_answers(
    served: tuple[LiveServer, httpx.Client],
    method: str,
    path: str,
    mode: schemathesis.GenerationMode,
) -> None:
    operation = schemathesis.openapi.from_url(f"{served[0].url}/openapi.json")[path][method]
    num_examples = 40 if method == "POST" else 5

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


def test_the_document_names_what_there_is(served: tuple[LiveServer, httpx.Client]) -> None:
    document = served[1].get("/openapi.json").json()
    assert set(document["paths"]) == {path for _, path in OPERATIONS}
    text = json.dumps(document)
    assert "HTTPValidationError" not in text  # errors are of OpenAI's shape only
    responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert "text/event-stream" in responses["200"]["content"]
    for page in ("/docs", "/redoc"):
        assert served[1].get(page).status_code == 404
