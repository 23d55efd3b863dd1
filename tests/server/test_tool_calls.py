"""Tool calls over HTTP: made by the model, forbidden, and brought about."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.server.live import answer, call, chat_format, last_request, live, wire
from tests.server.test_chat_endpoint import chat, chunks, joined

from musespark.config.structured_output import GrammarKind
from musespark.engine.client import EngineRequest


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = tool("add", a="integer", b="integer")
SAY = tool("say", text="string")
BOTH = [ADD, SAY]

TWO_CALLS = (
    " to=self<|message|>both<|eom|><|start|>assistant"
    + call("add", a="1", b="2")
    + "<|eom|><|start|>assistant"
    + call("say", text="12")
    + "<|eot|>"
)


@pytest.mark.parametrize("streams", [False, True])
def test_parallel_calls_with_typed_arguments(streams: bool) -> None:
    with live(TWO_CALLS, engine={"delay": 0.0005}) as (_server, client):
        if streams:
            parts = chunks(client, tools=BOTH)
            calls = [
                one
                for part in parts
                for choice in part["choices"]
                for one in choice["delta"].get("tool_calls", [])
            ]
            assert [one["index"] for one in calls] == [0, 1]
            reason = parts[-1]["choices"][0]["finish_reason"]
            assert joined(parts, "reasoning_content") == "both"
        else:
            (choice,) = chat(client, tools=BOTH)["choices"]
            calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
            assert choice["message"]["content"] is None
    assert reason == "tool_calls"
    assert [one["type"] for one in calls] == ["function", "function"]
    assert len({one["id"] for one in calls}) == 2
    assert [one["function"]["name"] for one in calls] == ["add", "say"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert json.loads(calls[1]["function"]["arguments"]) == {"text": "12"}


def test_one_call_only_when_parallel_calls_are_off() -> None:
    with live(TWO_CALLS, engine={"delay": 0.0005}) as (server, client):
        (choice,) = chat(client, tools=BOTH, parallel_tool_calls=False)["choices"]
        assert server.engine.aborted
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["add"]
    assert choice["finish_reason"] == "tool_calls"


def test_results_go_back_to_the_model() -> None:
    with live(call("add", a="1", b="2") + "<|eot|>") as (server, client):
        message = chat(client, tools=BOTH)["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        chat(
            client,
            tools=BOTH,
            messages=[{"role": "user", "content": "1 + 2?"}, message, result],
        )
        prompt = chat_format().tokenizer.decode(last_request(server).prompt_token_ids)
    assert '<tool_output name="add">\n3\n</tool_output>' in prompt


def test_tools_are_not_shown_when_none_may_be_called() -> None:
    with live(call("add", a="1") + "<|eot|>") as (server, client):
        (choice,) = chat(client, tools=BOTH, tool_choice="none")["choices"]
        prompt = chat_format().tokenizer.decode(last_request(server).prompt_token_ids)
    assert "add(" not in prompt
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["broken_tool_calls"][0]["recipient"] == "add"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("text", "limit", "reason", "truncated"),
    [
        (call("add", a="not a number") + "<|eot|>", None, "stop", False),
        (call("add", a="1"), 14, "length", True),
    ],
)
def test_what_is_no_call_is_told_and_not_guessed(
    text: str, limit: int | None, reason: str, truncated: bool
) -> None:
    with live(text, engine={"delay": 0.0005}) as (_server, client):
        (choice,) = chat(client, tools=BOTH, max_tokens=limit)["choices"]
        parts = chunks(client, tools=BOTH, max_tokens=limit)
    message = choice["message"]
    assert "tool_calls" not in message
    assert choice["finish_reason"] == reason
    (broken,) = message["broken_tool_calls"]
    assert broken["is_truncated"] is truncated
    assert broken["reason"]
    assert [
        one
        for part in parts
        for entry in part["choices"]
        for one in entry["delta"].get("broken_tool_calls", [])
    ] == [broken]


class Stubborn:
    """A model that answers, unless its prompt already begins a call."""

    def __init__(self, reasoning: str | None = "I know this", pick: str = "say") -> None:
        self._reasoning, self._pick = reasoning, pick

    def __call__(self, request: EngineRequest, _index: int) -> Sequence[int]:
        prompt = chat_format().tokenizer.decode(request.prompt_token_ids, keep_special=True)
        if request.structured_output is not None:
            return wire(f" to={self._pick}<|eot|>")
        if prompt.endswith('<atem:invoke name="add">'):
            return wire('<atem:parameter name="a">5</atem:parameter>\n' + CLOSE)
        if prompt.endswith('<atem:invoke name="say">'):
            return wire('<atem:parameter name="text">x</atem:parameter>\n' + CLOSE)
        if self._reasoning is None:
            return wire(" to=user<|message|>No.<|eot|>")
        return wire(answer("No.", self._reasoning))


CLOSE = "</atem:invoke>\n</atem:function_calls><|eot|>"
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("delay", [0.0, 0.0005])
@pytest.mark.parametrize("reasoning", ["I know this", None])
def test_a_named_tool_is_called_after_the_reasoning(delay: float, reasoning: str | None) -> None:
    with live(Stubborn(reasoning), engine={"delay": delay}) as (server, client):
        response = chat(client, tools=BOTH, tool_choice=NAMED)
        (choice,) = response["choices"]
        prompts = [
            chat_format().tokenizer.decode(request.prompt_token_ids, keep_special=True)
            for request in server.engine.requests
        ]
        assert server.engine.num_running == 0
    message = choice["message"]
    assert message.get("reasoning_content") == reasoning
    assert message["content"] is None
    (made,) = message["tool_calls"]
    assert made["function"]["name"] == "add"
    assert json.loads(made["function"]["arguments"]) == {"a": 5}
    assert choice["finish_reason"] == "tool_calls"
    between = f" to=self<|message|>{reasoning}<|eom|><|start|>assistant" if reasoning else ""
    assert prompts[1].startswith(f"{prompts[0]}{between} to=add<|message|><atem:function_calls>")
    assert response["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("streams", [False, True])
def test_a_required_call_lets_the_model_choose(streams: bool) -> None:
    with live(Stubborn(), engine={"delay": 0.0005}) as (server, client):
        fields = {"tools": BOTH, "tool_choice": "required"}
        if streams:
            parts = chunks(client, **fields)
            calls = [
                one
                for part in parts
                for choice in part["choices"]
                for one in choice["delta"].get("tool_calls", [])
            ]
            assert joined(parts, "content") == ""
        else:
            calls = chat(client, **fields)["choices"][0]["message"]["tool_calls"]
        rule = server.engine.requests[1].structured_output
    assert rule is not None
    assert (rule.kind, json.loads(rule.body)) == (GrammarKind.CHOICE, [" to=add", " to=say"])
    assert [one["function"]["name"] for one in calls] == ["say"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"text": "x"}


def test_a_call_the_model_makes_by_itself_is_left_alone() -> None:
    with live(TWO_CALLS, engine={"delay": 0.0005}) as (server, client):
        (choice,) = chat(client, tools=BOTH, tool_choice="required")["choices"]
        assert len(server.engine.requests) == 1
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["message"]["reasoning_content"] == "both"


def test_several_forced_answers_each_make_their_call() -> None:
    with live(Stubborn(), engine={"delay": 0.0005}) as (server, client):
        choices = chat(client, tools=BOTH, tool_choice=NAMED, n=3, seed=7)["choices"]
        assert [request.params.seed for request in server.engine.requests[:3]] == [7, 8, 9]
        assert {request.params.n for request in server.engine.requests} == {1}
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_a_forced_call_keeps_to_the_token_limit() -> None:
    with live(Stubborn(), engine={"delay": 0.0005}) as (server, client):
        used = len(wire(" to=self<|message|>I know this"))
        (choice,) = chat(client, tools=BOTH, tool_choice=NAMED, max_tokens=used + 3)["choices"]
        assert choice["finish_reason"] == "length"
        assert "tool_calls" not in choice["message"]
        (choice,) = chat(client, tools=BOTH, tool_choice=NAMED, max_tokens=300)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        first, second = server.engine.requests[-2:]
        assert first.params.max_tokens == 300
        written = len(second.prompt_token_ids) - len(first.prompt_token_ids)
        assert second.params.max_tokens == 300 - written


def test_running_out_while_reasoning_forces_nothing() -> None:
    with live(Stubborn(), engine={"delay": 0.0005}) as (server, client):
        (choice,) = chat(client, tools=BOTH, tool_choice=NAMED, max_tokens=5)["choices"]
        assert len(server.engine.requests) == 1
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": BOTH, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tools": BOTH, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD, ADD]}, "'add'"),
        ({"tools": [{"type": "function", "function": {"name": "self"}}]}, "self"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        (
            {"tools": BOTH, "tool_choice": "required", "add_generation_prompt": False},
            "new turn",
        ),
    ],
)
def test_impossible_choices_are_refused(fields: dict[str, Any], words: str) -> None:
    with live(answer("x")) as (server, client):
        response = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}], **fields},
        )
        assert server.engine.requests == []
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_choosing_between_tools_needs_grammars() -> None:
    with live(Stubborn(), engine={"structured_output": False}) as (server, client):
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": BOTH}
        response = client.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
        assert response.status_code == 400
        assert "structured output" in response.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json={**body, "tool_choice": NAMED}).is_success
        assert server.engine.num_running == 0
