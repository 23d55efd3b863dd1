"""What a request that cannot be served is told: OpenAI's shape, the right status, the field."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.live import LiveServer, answer, live

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[LiveServer, httpx.Client]]:
    with live(answer("x"), engine={"max_model_len": 200}, max_body_bytes=20_000) as both:
        yield both


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = dict(response.json()["error"])
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


def post(client: httpx.Client, path: str, body: bytes | str) -> httpx.Response:
    return client.post(path, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"nonsense", b"[]", b'"text"', b"null", b"\xff\xfe", b"1" * 5000, b"[" * 9000],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(
    served: tuple[LiveServer, httpx.Client], path: str, body: bytes
) -> None:
    error_of(post(served[1], path, body), 400)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
        ({"{braces}": 1}, "{braces}", "Unknown field '{braces}'"),
        ({"stream_options": {"include": True}}, "stream_options.include", "Unknown field"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": -1}, "temperature", "0 or more"),
        ({"temperature": 1e400}, "temperature", "0 or more"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": True}, "n", "integer"),
        ({"n": 10**30}, "n", "128"),
        ({"max_tokens": 0}, "max_tokens", "greater than"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": 3}, "stop", "valid"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 1000}}, "logit_bias[1]", "between"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"reasoning_effort": "none"}, "reasoning_effort", "low, medium, high, xhigh"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "one rule",
        ),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "regex"),
        ({"functions": [{"name": "f"}]}, "functions", "Use tools."),
        ({"audio": {"voice": "x"}}, "audio", "text model only"),
        ({"modalities": ["text", "audio"]}, "modalities", "text model only"),
        ({"guided_json": {}}, "guided_json", "response_format"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "checkpoint's"),
        ({"chat_template_kwargs": {"messages": []}}, None, "'messages' cannot be set"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [3]}, "messages[0]", "dictionary"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'king'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "string"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].tool_call_id",
            "no earlier",
        ),
        ({"continue_final_message": True}, "continue_final_message", "assistant's"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than"),
    ],
)
def test_fields_that_cannot_be_honoured(
    served: tuple[LiveServer, httpx.Client], fields: dict[str, Any], param: str | None, words: str
) -> None:
    server, client = served
    before = len(server.engine.requests)
    body = json.dumps({"messages": HELLO, **fields})
    error = error_of(post(client, CHAT, body), 400)
    assert words in error["message"]
    assert error["param"] == param
    assert len(server.engine.requests) == before


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "/etc/passwd"}},
        {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/x"}},
    ],
)
def test_images_audio_and_files_are_refused_unread(
    served: tuple[LiveServer, httpx.Client], part: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]
    error = error_of(served[1].post(CHAT, json={"messages": messages}), 400)
    assert "text" in error["message"]
    assert "only" in error["message"]
    assert error["param"] == "messages[0].content[1]"


def test_schemas_are_never_fetched(served: tuple[LiveServer, httpx.Client]) -> None:
    schema = {"$ref": "http://127.0.0.1:9/schema.json"}
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"messages": HELLO, "response_format": response_format}
    assert served[1].post(CHAT, json=body).is_success  # the engine's grammar is what judges it
    rule = served[0].engine.requests[-1].structured_output
    assert rule is not None
    assert json.loads(rule.body) == schema


def test_template_values_are_data(served: tuple[LiveServer, httpx.Client]) -> None:
    values = {"x": "{{ cycler.__init__.__globals__ }}", "y": "{% include '/etc/passwd' %}"}
    body = {"messages": HELLO, "chat_template_kwargs": values}
    assert served[1].post(CHAT, json=body).is_success
    body = {"messages": [{"role": "user", "content": "{{ 7 * 191 }}"}]}
    assert served[1].post(CHAT, json=body).is_success
    count = served[1].post("/tokenize", json=body).json()["tokens"]
    assert "1337" not in served[1].post("/detokenize", json={"tokens": count}).json()["prompt"]


def test_half_characters_are_told(served: tuple[LiveServer, httpx.Client]) -> None:
    for body in (
        r'{"messages": [{"role": "user", "content": "\ud800"}]}',
        r'{"messages": [{"role": "\ud800", "content": ""}]}',
        r'{"messages": [{"role": "user", "content": "x"}], "\ud800": 1}',
        r'{"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "\ud800"}',
    ):
        error_of(post(served[1], CHAT, body), 400)
    error_of(post(served[1], CHAT, r'{"messages": [{"role": "user"}], "model": "\ud800"}'), 404)
    error_of(post(served[1], "/v1/completions", r'{"prompt": "\ud800"}'), 400)


def test_prompts_that_do_not_fit(served: tuple[LiveServer, httpx.Client]) -> None:
    _, client = served
    messages = [{"role": "user", "content": "x" * 300}]
    for path, body, param in (
        (CHAT, {"messages": messages}, "messages"),
        ("/v1/completions", {"prompt": "x" * 200}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 200}, "prompt"),
    ):
        error = error_of(client.post(path, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
        assert "200" in error["message"]


def test_too_many_outputs(served: tuple[LiveServer, httpx.Client]) -> None:
    body = {"prompt": ["a"] * 100, "n": 2}
    assert "200 outputs" in error_of(served[1].post("/v1/completions", json=body), 400)["message"]


def test_other_models_and_paths(served: tuple[LiveServer, httpx.Client]) -> None:
    _, client = served
    for response in (
        client.post(CHAT, json={"messages": HELLO, "model": "gpt-4"}),
        client.post("/v1/completions", json={"prompt": "x", "model": "gpt-4"}),
        client.post("/tokenize", json={"prompt": "x", "model": "gpt-4"}),
        client.get("/v1/models/gpt-4"),
    ):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert "spark-mini" in error["message"]
    assert "/v2/x" in error_of(client.get("/v2/x"), 404)["message"]
    assert "GET" in error_of(client.get(CHAT), 405)["message"]


def test_bodies_too_large(served: tuple[LiveServer, httpx.Client]) -> None:
    server, client = served
    big = json.dumps({"messages": [{"role": "user", "content": "x" * 30_000}]}).encode()
    assert "20000" in error_of(post(client, CHAT, big), 413)["message"]

    def in_parts() -> Iterator[bytes]:
        for start in range(0, len(big), 1000):
            yield big[start : start + 1000]

    with httpx.Client(base_url=server.url) as other:
        response = other.post(
            CHAT, content=in_parts(), headers={"Content-Type": "application/json"}
        )
        error_of(response, 413)
        assert response.headers["connection"] == "close"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_bodies_of_another_type(served: tuple[LiveServer, httpx.Client], kind: str) -> None:
    body = json.dumps({"messages": HELLO})
    headers = {"Content-Type": kind}
    error_of(served[1].post(CHAT, content=body, headers=headers), 415)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["a"] * 300_000 + [1]}),
        ("/v1/completions", {"prompt": [[1]] * 300_000}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): "x" for i in range(200_000)}}),
        ("/v1/completions", {"prompt": "a", "stop": [1] * 500_000}),
        ("/v1/completions", {"prompt": "a", **{f"field{i}": 1 for i in range(100_000)}}),
        (CHAT, {"messages": [1] * 500_000}),
        (CHAT, {"messages": HELLO, "tools": [1] * 500_000}),
        (CHAT, {"messages": HELLO, "x" * 1_000_000: 1}),
        ("/detokenize", {"tokens": ["a"] * 300_000}),
    ],
    ids=range(9),
)
def test_large_nonsense_is_refused_quickly(path: str, fields: dict[str, Any]) -> None:
    with live(answer("x")) as (_server, client):
        body = json.dumps(fields)
        started = time.monotonic()
        response = post(client, path, body)
        error_of(response, 400)
        assert len(response.content) < 1000
        assert time.monotonic() - started < 5  # a few tenths of a second, on a free machine


def test_a_full_queue() -> None:
    with live(answer("x"), engine={"max_queue_len": 0}) as (_server, client):
        response = client.post(CHAT, json={"messages": HELLO, "stream": True})
        assert error_of(response, 503)["code"] == "server_overloaded"
        assert int(response.headers["retry-after"]) >= 1


def test_a_bug_in_the_server_says_nothing_of_itself() -> None:
    def script(_request: object, _index: int) -> list[int]:
        return [2**40]  # no such token; no decoder can take it

    with live(script) as (_server, client):
        error = error_of(client.post(CHAT, json={"messages": HELLO}), 500)
        assert "Overflow" not in json.dumps(error)
        with client.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as response:
            events = [line for line in response.iter_lines() if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "server_error"
        assert client.get("/health").status_code == 200
