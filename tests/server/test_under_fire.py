"""Clients that are slow, leave, or come in crowds; engines that die; servers that must end."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.server.fake_engine import FakeEngine
from tests.server.live import PATIENCE, LiveServer, answer, eventually, fresh, says, wire

from musespark.engine.client import EngineRequest, EngineState
from musespark.errors import CapacityError
from musespark.server import stream

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}


def endless(_request: EngineRequest, _index: int) -> list[int]:
    return wire(" to=user<|message|>" + "word " * 800)


def open_stream(server: LiveServer, body: dict[str, object], buffer: int = 4096) -> socket.socket:
    """A client that has sent its request and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: " + str(len(data)).encode() + b"\r\n\r\n" + data
    )
    return connection


# --- clients that leave


@pytest.mark.parametrize("body", [STREAM, BODY, {**STREAM, "n": 3}])
def test_a_client_that_leaves_is_aborted_at_once(body: dict[str, object]) -> None:
    with fresh(endless, engine={"delay": 0.005}) as (server, client):
        connection = open_stream(server, body)
        assert eventually(lambda: server.engine.num_running == 1)
        time.sleep(0.05)
        connection.close()
        assert eventually(lambda: server.engine.num_running == 0)
        assert server.engine.aborted
        assert server.engine.num_tokens < len(endless(server.engine.requests[0], 0))
        assert "musespark_clients_gone_total 1.0" in client.get("/metrics").text


def test_a_client_that_leaves_during_a_forced_call_is_aborted() -> None:
    def script(request: EngineRequest, index: int) -> list[int]:
        if request.request_id.endswith("+"):
            return endless(request, index)
        return wire(answer("no"))

    tool = {"type": "function", "function": {"name": "f"}}
    body = {**STREAM, "tools": [tool], "tool_choice": "required"}
    with fresh(script, engine={"delay": 0.005}) as (server, _client):
        connection = open_stream(server, body)
        assert eventually(lambda: len(server.engine.requests) == 2)
        connection.close()
        assert eventually(lambda: server.engine.num_running == 0)


def test_half_of_many_clients_leave() -> None:
    with fresh(endless, engine={"delay": 0.002}) as (server, client):
        connections = [open_stream(server, STREAM) for _ in range(60)]
        assert eventually(lambda: server.engine.num_running == 60)
        for connection in connections[::2]:
            connection.close()
        assert eventually(lambda: server.engine.num_running == 30)
        for connection in connections[1::2]:
            connection.close()
        assert eventually(lambda: server.engine.num_running == 0)
        assert client.get("/health/ready").status_code == 200


# --- slow readers


def test_a_reader_that_takes_nothing_holds_up_nobody_and_is_cut_off() -> None:
    long = says(" to=user<|message|>" + "a stone that nobody lifts " * 9000 + "<|eot|>")

    def script(request: EngineRequest, index: int) -> list[int]:
        return list(long(request, index)) if request.params.seed == 1 else wire(answer("quick"))

    settings = {"max_model_len": 10**6}
    with fresh(script, stream_stall_seconds=1.0, engine=settings) as (server, client):
        with open_stream(server, {**STREAM, "seed": 1, "logprobs": True, "top_logprobs": 20}):
            started = time.monotonic()
            for _ in range(10):
                response = client.post(CHAT, json=BODY)
                assert response.json()["choices"][0]["message"]["content"] == "quick"
            assert time.monotonic() - started < 200
            metrics = "musespark_clients_gone_total 1.0"
            assert eventually(lambda: metrics in client.get("/metrics").text)
        assert server.engine.num_running == 0


def test_a_stream_that_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PING_SECONDS", 0.1)
    with fresh(answer("x"), engine={"delay": 0.5}) as (server, client):
        with client.stream("POST", CHAT, json={**STREAM, "max_tokens": 2}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert ": still there" in lines
        assert lines[0].startswith("data: {")
        assert lines[-1] == "data: [DONE]"
        assert server.engine.aborted == []


# --- crowds


def test_five_hundred_at_once() -> None:
    def script(request: EngineRequest, _index: int) -> list[int]:
        return wire(answer(f"number {request.params.seed}", "x" * ((request.params.seed or 0) % 7)))

    with fresh(script, engine={"delay": 0.01}) as (server, _client):
        limits = httpx.Limits(max_connections=500)
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE, limits=limits) as client,
            ThreadPoolExecutor(100) as pool,
        ):

            def one(number: int) -> str:
                body = {**BODY, "seed": number}
                if number % 2:
                    response = client.post(CHAT, json=body)
                    return str(response.json()["choices"][0]["message"]["content"])
                text = ""
                with client.stream("POST", CHAT, json={**body, "stream": True}) as stream:
                    for line in stream.iter_lines():
                        if line.startswith("data: {"):
                            for choice in json.loads(line[6:])["choices"]:
                                text += choice["delta"].get("content") or ""
                return text

            results = list(pool.map(one, range(500)))
        assert results == [f"number {number}" for number in range(500)]
        assert server.engine.num_running == 0


def test_a_limited_queue_turns_the_rest_away() -> None:
    with fresh(endless, engine={"delay": 0.005, "max_queue_len": 5}) as (server, client):
        connections = [open_stream(server, STREAM) for _ in range(5)]
        assert eventually(lambda: server.engine.num_running == 5)
        response = client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        # A request of several prompts runs whole or not at all.
        response = client.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert response.status_code == 503
        assert server.engine.num_running == 5
        for connection in connections:
            connection.close()


# --- the engine dies


def read_events(server: LiveServer) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []

    def read() -> None:
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
            client.stream("POST", CHAT, json=STREAM) as response,
        ):
            lines.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, lines


def test_the_engine_dies() -> None:
    with fresh(endless, engine={"delay": 0.005}) as (server, client):
        thread, lines = read_events(server)
        waiting = ThreadPoolExecutor(1).submit(lambda: client.post(CHAT, json=BODY))
        assert eventually(lambda: server.engine.num_running == 2)
        time.sleep(0.05)
        server.in_loop(server.engine.die)
        thread.join(PATIENCE)
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        assert len(lines) > 2
        assert waiting.result(PATIENCE).status_code == 503
        assert waiting.result().json()["error"]["code"] == "engine_dead"
        for path in ("/health", "/health/ready", "/health/live"):
            response = client.get(path)
            assert response.status_code == 503
            assert response.json() == {"status": "dead"}
        response = client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert "restart" in response.json()["error"]["message"]
        assert "musespark_engine_ready 0.0" in client.get("/metrics").text
        assert client.get("/v1/models").status_code == 200


def test_the_engine_is_started_again() -> None:
    with fresh(answer("alive"), restart_engine=True) as (server, client):
        server.in_loop(server.engine.die)
        assert client.get("/health/live").status_code == 200
        assert eventually(lambda: len(server.engines) == 2)
        assert eventually(lambda: client.get("/health/ready").status_code == 200)
        assert client.post(CHAT, json=BODY).status_code == 200
        assert "musespark_engine_restarts_total 1.0" in client.get("/metrics").text
        assert server.engines[0].drain_seconds is None


def test_an_engine_that_cannot_come_back_is_tried_again_later() -> None:
    made: list[FakeEngine] = []

    def engine() -> FakeEngine:
        error = CapacityError("no memory") if made else None
        made.append(FakeEngine(says(answer("x")), load_error=error))
        return made[-1]

    with fresh(answer("x"), restart_engine=True, make_engine=engine) as (server, client):
        server.in_loop(server.engine.die)
        assert eventually(lambda: len(made) >= 2)
        assert eventually(lambda: client.get("/health/ready").status_code == 503)
        assert client.get("/health/live").status_code == 200
        assert eventually(lambda: len(made) >= 3)


# --- beginning and end


def test_while_the_model_loads() -> None:
    settings = {"load_seconds": 1.0}
    with fresh(answer("x"), engine=settings, wait=False) as (server, client):
        assert client.get("/health/live").status_code == 200
        response = client.get("/health/ready")
        assert (response.status_code, response.json()) == (503, {"status": "starting"})
        response = client.post(CHAT, json=BODY)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_not_ready"
        assert int(response.headers["retry-after"]) > 0
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] is None
        assert server.ready.wait(PATIENCE)
        assert client.get("/health/ready").status_code == 200


def test_a_model_that_cannot_load_ends_the_server() -> None:
    settings = {"load_error": CapacityError("does not fit")}
    with fresh(answer("x"), engine=settings, wait=False) as (server, _client):
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()
    assert isinstance(server.error, CapacityError)


def test_a_signal_while_the_model_loads() -> None:
    with fresh(answer("x"), engine={"load_seconds": 600}, wait=False) as (server, client):
        assert client.get("/health/live").status_code == 200
        server.signal()
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()
        assert server.engine.state is EngineState.DEAD


@pytest.fixture
def draining() -> Iterator[tuple[LiveServer, httpx.Client]]:
    with fresh(answer("x" * 100), engine={"delay": 0.01}, shutdown_seconds=PATIENCE) as both:
        yield both


def test_running_requests_may_finish(draining: tuple[LiveServer, httpx.Client]) -> None:
    server, client = draining
    assert client.get("/health/ready").status_code == 200
    thread, lines = read_events(server)
    assert eventually(lambda: server.engine.num_running == 1)
    started = time.monotonic()
    server.signal()
    assert eventually(lambda: server.engine.drain_seconds == PATIENCE)
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{server.url}{CHAT}", json=BODY)
    thread.join(PATIENCE)
    server.thread.join(PATIENCE)
    assert lines[-1] == "data: [DONE]"
    assert server.engine.aborted == []
    assert time.monotonic() - started < PATIENCE / 2


def test_requests_that_do_not_finish_are_aborted() -> None:
    with fresh(endless, engine={"delay": 0.01}, shutdown_seconds=0.3) as (server, _client):
        thread, lines = read_events(server)
        assert eventually(lambda: server.engine.num_running == 1)
        started = time.monotonic()
        server.signal()
        server.thread.join(PATIENCE)
        thread.join(PATIENCE)
        assert time.monotonic() - started < 20
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_not_ready"
        assert server.error is None


def test_a_second_signal_does_not_wait() -> None:
    with fresh(endless, engine={"delay": 0.01}, shutdown_seconds=600) as (server, _client):
        connection = open_stream(server, STREAM)
        assert eventually(lambda: server.engine.num_running == 1)
        server.signal()
        time.sleep(0.2)
        server.signal()
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()
        connection.close()
