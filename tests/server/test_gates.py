"""Who is let in."""

import socket
import time

import pytest
from tests.server.live import answer, live

from musespark.server.gates import LOCAL_NAMES

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Basic one",
        "one",
        "Bearer one two",
        "Bearer ö",
    ],
)
def test_without_the_key_nobody_gets_near_the_model(header: str | None) -> None:
    with live(answer("x"), api_keys=("one", "two")) as (server, client):
        headers = [] if header is None else [(b"Authorization", header.encode())]
        for method, path in (
            ("POST", CHAT),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("GET", "/nowhere"),
        ):
            response = client.request(method, path, json=BODY, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert server.engine.requests == []
        for path in ("/", "/health", "/health/live", "/health/ready", "/page/chat.js"):
            assert client.get(path, headers=headers).status_code == 200


def test_every_key_opens() -> None:
    with live(answer("x"), api_keys=("one", "zweiß")) as (_server, client):
        for key in ("one", "zweiß"):
            for scheme in ("Bearer", "bearer"):
                headers = [(b"Authorization", f"{scheme} {key}".encode())]
                assert client.post(CHAT, json=BODY, headers=headers).status_code == 200


def test_other_host_names_are_refused_on_a_private_server() -> None:
    with live(answer("x")) as (_server, client):
        port = client.base_url.port
        for name in ("evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example"):
            response = client.get("/v1/models", headers={"Host": name})
            assert response.status_code == 421
            assert "--allowed-host" in response.json()["error"]["message"]
        for name in LOCAL_NAMES:
            assert client.get("/v1/models", headers={"Host": f"{name}:{port}"}).is_success
    with live(answer("x"), allowed_host=("spark.example",)) as (_server, client):
        assert client.get("/v1/models", headers={"Host": "Spark.Example:80"}).is_success
        assert client.get("/v1/models", headers={"Host": "127.0.0.1"}).status_code == 421
    with live(answer("x"), api_keys=("k",)) as (_server, client):
        headers = {"Host": "any.example", "Authorization": "Bearer k"}
        assert client.get("/v1/models", headers=headers).is_success


def test_a_body_that_trickles_in_is_given_up() -> None:
    with live(answer("x"), body_seconds=0.2) as (server, client):
        assert client.base_url.port is not None
        with socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            connection.settimeout(60)
            started = time.monotonic()
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
        assert received.startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 30
        assert server.engine.requests == []
