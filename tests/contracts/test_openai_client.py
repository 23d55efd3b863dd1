"""OpenAI's own Python client, against the real model and against a scripted one.

The client parses every response into its own types, so a field of the wrong shape shows here.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.server.live import PATIENCE, answer, call, chat_format, fresh, wire
from tests.server.process import serving
from tests.server.test_tool_calls import BOTH, TWO_CALLS

MODEL = "spark-mini"
QUESTION: Any = [{"role": "user", "content": "What is 12 + 30?"}]
LIMIT = 256


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The packaged model, served as people serve it."""
    arguments = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16")
    with serving(*arguments, MUSESPARK_API_KEY="sesame") as (_process, url):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0, timeout=PATIENCE) as client:
        yield client


def ask(client: OpenAI, **options: Any) -> Any:
    settings = {"max_completion_tokens": LIMIT, "temperature": 0, "messages": QUESTION}
    return client.chat.completions.create(model=MODEL, **{**settings, **options})


# --- the real model


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: OpenAI) -> None:
    completion = ask(client)
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    assert "42" in choice.message.content
    assert choice.message.reasoning_content
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_streaming_gives_the_same(client: OpenAI) -> None:
    whole = ask(client)
    content = reasoning = ""
    usage = None
    for chunk in ask(client, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        usage = chunk.usage or usage
    assert content == whole.choices[0].message.content
    assert reasoning == whole.choices[0].message.reasoning_content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_stream_helper(client: OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    with client.chat.completions.stream(**settings, max_completion_tokens=LIMIT) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == ask(client).choices[0].message.content


def test_leaving_a_stream_early(client: OpenAI) -> None:
    stream = ask(client, stream=True)
    next(iter(stream))
    stream.close()
    assert ask(client).choices[0].finish_reason == "stop"


def test_n(client: OpenAI) -> None:
    completion = ask(client, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in completion.choices}) == 1  # greedy
    seeded = [
        [choice.message.content for choice in ask(client, n=2, temperature=1.5, seed=7).choices]
        for _ in range(2)
    ]
    assert seeded[0] == seeded[1]


def test_stop(client: OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    cut = ask(client, stop=["2"]).choices[0]
    assert cut.message.content == whole.split("2")[0]
    assert cut.finish_reason == "stop"


def test_max_tokens(client: OpenAI) -> None:
    completion = ask(client, max_completion_tokens=5)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 5


def test_logprobs(client: OpenAI) -> None:
    (choice,) = ask(client, logprobs=True, top_logprobs=3).choices
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        # Greedy: what was chosen is the most likely.
        assert entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes).decode() == entry.token


def test_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"parity": {"enum": ["even", "odd"]}, "sure": {"type": "boolean"}},
        "required": ["parity", "sure"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    (choice,) = ask(client, response_format=response_format, max_completion_tokens=400).choices
    assert choice.message.reasoning_content  # the reasoning is free
    found = json.loads(choice.message.content)
    assert found["parity"] in ("even", "odd")
    assert isinstance(found["sure"], bool)


def test_tools_with_the_real_model(client: OpenAI) -> None:
    weather = {
        "name": "weather.get",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    tools = [{"type": "function", "function": weather}, *BOTH]
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    (choice,) = ask(client, messages=question, tools=tools).choices
    assert choice.finish_reason == "tool_calls"
    (made,) = choice.message.tool_calls
    assert made.function.name == "weather.get"
    assert json.loads(made.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": made.id, "content": "21 C, sunny"}
    final = ask(client, messages=[*question, choice.message, result], tools=tools).choices[0]
    assert final.finish_reason == "stop"
    assert "21" in final.message.content


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "say"}}]
)
def test_a_call_can_be_demanded(client: OpenAI, tool_choice: Any) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    (choice,) = ask(client, messages=hello, tools=BOTH, tool_choice=tool_choice).choices
    assert not choice.message.content
    made = [one.function.name for one in choice.message.tool_calls or []]
    # The call is opened for the model; its arguments are its own, and may not be of their type.
    broken = (choice.message.model_extra or {}).get("broken_tool_calls", [])
    made += [one["recipient"] for one in broken]
    assert made
    assert set(made) <= ({"say"} if isinstance(tool_choice, dict) else {"add", "say"})


class Parity(pydantic.BaseModel):
    parity: Literal["even", "odd"]


def test_parsing_into_a_class(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        response_format=Parity,
        temperature=0,
        max_completion_tokens=400,
    )
    parsed = completion.choices[0].message.parsed
    assert parsed is not None
    assert parsed.parity in ("even", "odd")


def test_extra_settings_go_through(client: OpenAI) -> None:
    extra = {"top_k": 1, "structured_outputs": {"choice": ["yes", "no"]}}
    (choice,) = ask(client, temperature=1, extra_body=extra).choices
    assert choice.message.content in ("yes", "no")
    assert ask(client, reasoning_effort="low").choices[0].message.reasoning_content


def test_plain_completions(client: OpenAI) -> None:
    settings: Any = {"model": MODEL, "prompt": ["What is", "Sort these"], "temperature": 0}
    completion = client.completions.create(**settings, max_tokens=8, logprobs=1)
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) <= 8
    parts = ["", ""]
    for chunk in client.completions.create(**settings, max_tokens=8, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == [choice.text for choice in completion.choices]


def test_async_and_many_at_once(url: str) -> None:
    async def all_of_them() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="sesame", timeout=PATIENCE) as client:

            async def one(number: int) -> str | None:
                messages: Any = [{"role": "user", "content": f"What is {number} + 30?"}]
                completion = await client.chat.completions.create(
                    model=MODEL, messages=messages, temperature=0, max_completion_tokens=LIMIT
                )
                return completion.choices[0].message.content

            async def streamed(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"What is {number} + 30?"}]
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    temperature=0,
                    max_completion_tokens=LIMIT,
                    stream=True,
                )
                return "".join([part.choices[0].delta.content or "" async for part in stream])

            alone = [await one(number) for number in (12, 45)]
            together = await asyncio.gather(*(one(n) for n in (12, 45)), streamed(12), streamed(45))
            assert together == [*alone, *alone]
            return alone

    assert "42" in (asyncio.run(all_of_them())[0] or "")


def test_errors(client: OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, temperature=-1)
    assert refused.value.param == "temperature"
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    with pytest.raises(openai.BadRequestError, match="text model only"):
        ask(client, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(client, messages=[{"role": "user", "content": "x" * 2000}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):  # a pattern that is none
        ask(client, extra_body={"structured_outputs": {"regex": "("}})
    with (
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        ask(stranger)


# --- tools, with a model that does as it is told


@pytest.fixture(scope="module")
def scripted() -> Iterator[OpenAI]:
    def script(request: Any, _index: int) -> list[int]:
        prompt = chat_format().tokenizer.decode(request.prompt_token_ids)
        return wire(answer("It is 3.") if "tool_output" in prompt else TWO_CALLS)

    with (
        fresh(script, engine={"delay": 0.0005}) as (server, _),
        OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client


def test_tools_there_and_back(scripted: OpenAI) -> None:
    completion = ask(scripted, tools=BOTH)
    message = completion.choices[0].message
    assert completion.choices[0].finish_reason == "tool_calls"
    assert [one.function.name for one in message.tool_calls] == ["add", "say"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    results = [
        {"role": "tool", "tool_call_id": one.id, "content": "3"} for one in message.tool_calls
    ]
    final = ask(scripted, tools=BOTH, messages=[*QUESTION, message, *results])
    assert final.choices[0].message.content == "It is 3."


def test_streamed_tools(scripted: OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": QUESTION, "tools": BOTH}
    with scripted.chat.completions.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls or []
    assert [one.function.name for one in calls] == ["add", "say"]
    assert json.loads(calls[1].function.arguments) == {"text": "12"}
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_dying_engine_is_an_error_of_the_client() -> None:
    text = " to=user<|message|>" + "word " * 500
    with (
        fresh(text, engine={"delay": 0.005}) as (server, _),
        OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        stream = ask(client, stream=True, max_completion_tokens=4000)
        next(iter(stream))
        server.in_loop(server.engine.die)
        with pytest.raises(openai.APIError, match="died"):
            for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError):
            ask(client)


def test_a_call_that_is_none() -> None:
    with (
        fresh(call("add", a="x") + "<|eot|>") as (server, _),
        OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        message = ask(client, tools=BOTH).choices[0].message
    assert message.tool_calls is None
    assert message.model_extra["broken_tool_calls"][0]["recipient"] == "add"
