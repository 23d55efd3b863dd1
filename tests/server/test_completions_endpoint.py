"""POST /v1/completions, /tokenize and /detokenize."""

import json
from typing import Any

import httpx
import pytest
from tests.server.live import chat_format, last_request, live, says, wire

from musespark.config.structured_output import GrammarKind
from musespark.engine.client import EngineRequest

PATH = "/v1/completions"


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"prompt": "Once", "max_tokens": 100, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def chunks(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": "Once", "max_tokens": 100, "stream": True, **fields}
    with client.stream("POST", PATH, json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


SLOW = {"delay": 0.0005}


def test_text_without_special_tokens() -> None:
    with live(" upon a <|start|>time<|eot|>", engine=SLOW) as (server, client):
        response = complete(client)
        assert response["object"] == "text_completion"
        (choice,) = response["choices"]
        assert choice == {
            "index": 0,
            "text": " upon a time",
            "logprobs": None,
            "finish_reason": "stop",
        }
        text = complete(client, skip_special_tokens=False)["choices"][0]["text"]
        assert text == " upon a <|start|>time<|eot|>"
        request = last_request(server)
    assert request.prompt_token_ids == tuple(chat_format().tokenizer.encode_prompt("Once"))
    usage = response["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids)
    assert usage["completion_tokens"] == len(wire(" upon a <|start|>time<|eot|>"))


def test_streams_add_up() -> None:
    with live(" Größe 🙂<|eot|>", engine=SLOW) as (_server, client):
        parts = chunks(client, stream_options={"include_usage": True})
        whole = complete(client)
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == " Größe 🙂"
    assert parts[-2]["choices"][0]["finish_reason"] == "stop"
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    "prompt", [["a", "bc"], [[97], [98, 99]], "a", [97]], ids=["texts", "lists", "text", "list"]
)
def test_prompts_in_every_shape(prompt: Any) -> None:
    def script(request: EngineRequest, index: int) -> list[int]:
        return wire(f"{len(request.prompt_token_ids)}.{index}<|eot|>")

    count = len(prompt) if isinstance(prompt[0], (list, str)) and prompt != "a" else 1
    with live(script, engine=SLOW) as (server, client):
        choices = complete(client, prompt=prompt, n=2)["choices"]
        parts = chunks(client, prompt=prompt, n=2)
        assert all(request.params.n == 2 for request in server.engine.requests)
    lengths = [1, 2][:count]
    expected = [f"{length}.{index}" for length in lengths for index in (0, 1)]
    assert [choice["text"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == list(range(2 * count))
    for index, text in enumerate(expected):
        joined = "".join(
            choice["text"]
            for part in parts
            for choice in part["choices"]
            if choice["index"] == index
        )
        assert joined == text


def test_stop_texts_and_limits() -> None:
    with live("one two three four", engine=SLOW) as (server, client):
        (choice,) = complete(client, stop=[" th", "four"])["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
        assert server.engine.aborted
        (choice,) = complete(client, max_tokens=5)["choices"]
        assert choice["finish_reason"] == "length"
        assert client.post(PATH, json={"prompt": "x"}).is_success
        assert last_request(server).params.max_tokens == 16


def test_logprobs_and_echo() -> None:
    with live("ab<|eot|>", engine=SLOW) as (server, client):
        (choice,) = complete(client, logprobs=1)["choices"]
        assert choice["logprobs"] == {
            "text_offset": [0, 1, 2],
            "token_logprobs": [-0.5, -0.5, -0.5],
            "tokens": ["a", "b", "<|eot|>"],
            "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"<|eot|>": -0.5}],
        }
        (choice,) = complete(client, prompt=[72, 105], logprobs=1, echo=True)["choices"]
        assert choice["text"] == "Hiab"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"][:3] == ["H", "i", "a"]
        assert logprobs["token_logprobs"][:3] == [None, -9999.0, -0.5]
        assert logprobs["text_offset"][:3] == [0, 1, 2]
        assert last_request(server).params.prompt_logprobs == 1
        # The way to score a text: no new tokens at all.
        response = complete(client, prompt=[72, 105], logprobs=0, echo=True, max_tokens=0)
        (choice,) = response["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
        assert choice["logprobs"]["tokens"] == ["H", "i"]
        assert response["usage"]["completion_tokens"] == 0
        offsets = [
            offset
            for part in chunks(client, logprobs=0)
            for offset in part["choices"][0]["logprobs"]["text_offset"]
        ]
        assert offsets == [0, 1, 2]
        refused = client.post(PATH, json={"prompt": "x", "echo": True, "logprobs": 1, "n": 2})
        assert refused.status_code == 400


def test_rules_hold_from_the_first_token_on() -> None:
    with live("{}<|eot|>") as (server, client):
        complete(client, structured_outputs={"regex": "a+"})
        rule = last_request(server).structured_output
        assert rule is not None
        assert (rule.kind, rule.body, rule.scope) == (GrammarKind.REGEX, "a+", None)


def test_tokenize_and_back() -> None:
    with live(says("x")) as (_server, client):
        text = "Grüße <|eot|>"
        response = client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
        tokens = response.json()["tokens"]
        assert response.json()["count"] == len(tokens)
        assert response.json()["max_model_len"] == 4096
        assert response.json()["token_strs"][-1] == "<|eot|>"
        back = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert back == text
        skipped = {"tokens": tokens, "skip_special_tokens": True}
        assert client.post("/detokenize", json=skipped).json()["prompt"] == "Grüße "
        messages = [{"role": "user", "content": "hi"}]
        response = client.post("/tokenize", json={"messages": messages})
        assert response.json()["tokens"] == chat_format().prompt_token_ids(messages)
        assert "token_strs" not in response.json()
        for body in ({}, {"prompt": "x", "messages": messages}):
            response = client.post("/tokenize", json=body)
            assert response.status_code == 400
            assert "either" in response.json()["error"]["message"]
        # Ids that no vocabulary has come to nothing.
        assert client.post("/detokenize", json={"tokens": [10**6, 97]}).json()["prompt"] == "a"
