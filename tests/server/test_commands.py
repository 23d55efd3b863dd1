"""`musespark serve` and `musespark chat` as processes, with the packaged model."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import IO

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tests.server.live import PATIENCE, eventually
from tests.server.process import serving

BODY = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "musespark", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_what_cannot_be_served_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port)
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr


def test_settings_are_checked_before_anything_is_loaded() -> None:
    result = run("serve", "--max-num-seqs", "0")
    assert result.returncode == 1
    assert "max_num_seqs" in result.stderr
    assert "Loading" not in result.stdout


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def expert_routes(client: httpx.Client) -> dict[str, float]:
    """Layer -> routes to all its experts."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        if family.name == "musespark_expert_routes":
            for sample in family.samples:
                layer = sample.labels["layer"]
                sums[layer] = sums.get(layer, 0) + sample.value
    return sums


def test_the_engines_process_dies_and_comes_back() -> None:
    arguments = ("--dtype", "float32", "--restart-engine", "--expert-load-metrics")
    with (
        serving(*arguments) as (process, url),
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        first = client.post("/v1/chat/completions", json=BODY).json()

        # The last token is not run: nothing is to follow it.
        tokens_run = first["usage"]["total_tokens"] - 1
        assert set(expert_routes(client).values()) == {4 * tokens_run}

        # A client that leaves: what it held is free again.
        endless = {**BODY, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=endless) as response:
            lines = response.iter_lines()  # to be kept: the client leaves when it goes
            next(lines)
        aborted = 'musespark_outputs_finished_total{reason="abort"}'
        assert eventually(lambda: metric(client, aborted) == 1)
        assert eventually(lambda: metric(client, "musespark_kv_blocks_full_used") == 0)
        assert eventually(lambda: metric(client, "musespark_requests_running") == 0)

        engine = _engine_of(process.pid)
        with client.stream("POST", "/v1/chat/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            engine.kill()
            rest = list(lines)
        assert any('"engine_dead"' in line for line in rest)
        assert "data: [DONE]" not in rest
        assert eventually(lambda: client.get("/health/ready").status_code == 503)
        assert eventually(lambda: client.get("/health/ready").status_code == 200)
        again = client.post("/v1/chat/completions", json=BODY).json()
        assert again["choices"] == first["choices"]
        engine = _engine_of(process.pid)
    assert eventually(lambda: not engine.is_running())


def _engine_of(pid: int) -> psutil.Process:
    children = psutil.Process(pid).children()
    return next(child for child in children if "spawn_main" in " ".join(child.cmdline()))


def test_a_conversation_in_the_terminal() -> None:
    command = [sys.executable, "-u", "-m", "musespark", "chat", "--dtype", "float32"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        read = _reader(process.stdout)
        read(lambda text: "> " in text)
        process.stdin.write("What is 12 + 30?\n")
        assert "42" in read(lambda text: " tokens" in text)
        # Ctrl-C stops the answer and not the program.
        process.stdin.write("Sort these numbers: 45, 12, 78, 30, 77, 91\n")
        read(lambda text: len(text) > 20)
        process.send_signal(signal.SIGINT)
        assert "stopped" in read(lambda text: "stopped" in text)
        process.stdin.write("/system Be kind.\n/effort low\n/nonsense\n")
        assert "/effort LEVEL" in read(lambda text: "Ctrl-C" in text)
        process.stdin.write("/new\nWhat is 12 + 30?\n")
        assert "42" in read(lambda text: " tokens" in text)
        process.stdin.write("/quit\n")
        assert process.wait(PATIENCE) == 0


def _reader(stream: IO[str]) -> Callable[[Callable[[str], bool]], str]:
    def read(is_enough: Callable[[str], bool]) -> str:
        text = ""
        while not is_enough(text):
            character = stream.read(1)
            assert character, text
            text += character
        return text

    return read


def test_a_rank_that_is_killed_ends_all_and_clients_are_told() -> None:
    arguments = ("--dtype", "float32", "--tensor-parallel-size", "2", "--max-model-len", "512")
    with (
        serving(*arguments, exit_code=1) as (process, url),
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        assert metric(client, "musespark_ranks") == 2
        answer = client.post("/v1/chat/completions", json=BODY).json()
        assert answer["choices"][0]["message"]["content"].strip() == "42"
        ranks = _ranks_of(process.pid)
        endless = {**BODY, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            ranks[1].kill()
            rest = list(lines)
        (error,) = [line for line in rest if '"engine_dead"' in line]
        assert "Rank 1 (tensor 1, stage 0, replica 0) has ended by signal 9" in error
        assert eventually(lambda: not any(_is_alive(rank) for rank in ranks), 5)
        assert client.post("/v1/chat/completions", json=BODY).status_code == 503
        assert client.get("/health/live").status_code == 503


def _ranks_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return sorted(ranks, key=lambda rank: rank.create_time())


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
