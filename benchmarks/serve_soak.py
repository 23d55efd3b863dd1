"""Many clients at once, some of which leave: does everyone else get what they would get alone?

    python -m benchmarks.serve_soak --clients 200 --seconds 180

Every client asks one question after another: chats and plain completions, whole and streamed, one
output and several. A share of them closes the connection at a random moment. All of it is greedy
and in float32, so a request that is not cut off must return exactly the text that it returned when
the server was idle. At the end, no block of the cache may be in use, and the memory of the server
and of its engine must not have grown. Exits with 1 if any of this fails.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
from benchmarks.serve_load import own_server

SERVE = ["--dtype", "float32", "--max-model-len", "1024"]


@dataclass(frozen=True)
class Question:
    """One kind of request."""

    path: str
    body: str
    """JSON."""

    @property
    def streams(self) -> bool:
        """Whether the response is a stream."""
        return '"stream": true' in self.body


@dataclass
class Tally:
    """What has happened so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """MiB of the server and of its engine, from time to time."""


def questions(rng: random.Random, count: int) -> list[Question]:
    """A mixture of everything."""
    made = []
    for i in range(count):
        numbers = [rng.randint(10, 99) for _ in range(6)]
        text = rng.choice(
            [
                f"What is {numbers[0]} + {numbers[1]}?",
                f"Sort these numbers: {', '.join(map(str, numbers))}",
                f"Reverse the word {rng.choice(['planet', 'garden', 'silver', 'window'])}",
                "Remember: " + " ".join(map(str, numbers * rng.randint(1, 12))),
            ]
        )
        body: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": rng.choice([8, 64, 160]),
            "n": rng.choice([1, 1, 1, 3]),
            "stream": i % 3 > 0,
        }
        if i % 4:
            body["messages"] = [{"role": "user", "content": text}]
            body["reasoning_effort"] = rng.choice(["low", "high", "xhigh"])
            made.append(Question("/v1/chat/completions", json.dumps(body)))
        else:
            body["prompt"] = text
            made.append(Question("/v1/completions", json.dumps(body)))
    return made


class LeftError(Exception):
    """This client has closed the connection on purpose."""


async def ask(url: str, question: Question, leave_after: float | None = None) -> str:
    """The texts of all outputs, as one string; LeftError if the client was to leave before that."""
    place = urlsplit(url)
    data = question.body.encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(
            f"POST {question.path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        async with asyncio.timeout(leave_after):
            received = await reader.read(-1)
    except TimeoutError:
        raise LeftError from None
    finally:
        writer.close()
    head, _, rest = received.partition(b"\r\n\r\n")
    status = head.split()[1].decode()
    if status != "200":
        return f"status {status}"
    return _texts_of_stream(rest) if question.streams else _texts(json.loads(rest)["choices"])


def _texts(choices: list[dict[str, Any]]) -> str:
    texts: dict[int, list[str]] = {}
    for choice in choices:
        said = choice.get("message") or choice.get("delta") or {}
        kinds = (said.get("reasoning_content"), said.get("content"), choice.get("text"))
        texts.setdefault(choice["index"], []).extend(text or "" for text in kinds)
    return repr(["".join(parts) for _, parts in sorted(texts.items())])


def _texts_of_stream(received: bytes) -> str:
    lines = [line for line in received.splitlines() if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"data: [DONE]":
        return "broken stream"
    return _texts([choice for line in lines[:-1] for choice in json.loads(line[6:])["choices"]])


async def metric(url: str, name: str) -> float:
    """One of the server's own numbers."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    request = f"GET /metrics HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n"
    writer.write(request.encode())
    received = (await reader.read(-1)).decode()
    writer.close()
    return next(
        float(line.split()[1])
        for line in received.splitlines()
        if line.startswith(f"musespark_{name} ")
    )


async def client(
    rng: random.Random,
    url: str,
    expected: dict[Question, str],
    leaving: float,
    until: float,
    tally: Tally,
) -> None:
    """Ask until time is over."""
    while time.monotonic() < until:
        question = rng.choice(list(expected))
        leave_after = rng.expovariate(1.0) if rng.random() < leaving else None
        try:
            answer = await ask(url, question, leave_after)
        except LeftError:
            tally.outcomes["left"] += 1
        except OSError as error:
            tally.outcomes[type(error).__name__] += 1
        else:
            is_right = answer == expected[question]
            tally.outcomes["right" if is_right else "wrong"] += 1
            if not is_right and len(tally.wrong) < 5:
                tally.wrong.append(f"{question}\n  {answer}\n  {expected[question]}")


async def watch_memory(pid: int, until: float, tally: Tally) -> None:
    """Note the memory of the server and its engine every few seconds."""
    server = psutil.Process(pid)
    while time.monotonic() < until:
        await asyncio.sleep(3)
        engine = max(server.children(), key=lambda child: child.memory_info().rss)
        sizes = (process.memory_info().rss / 2**20 for process in (server, engine))
        tally.memory.append(next(zip(sizes, sizes, strict=True)))


async def soak(
    url: str,
    *,
    clients: int,
    seconds: float,
    leaving: float,
    kinds: int = 48,
    seed: int = 0,
    pid: int | None = None,
) -> tuple[Tally, dict[str, float]]:
    """Run it all; the tally, and what is left in use at the end."""
    rng, tally = random.Random(seed), Tally()
    expected = {question: await ask(url, question) for question in questions(rng, kinds)}
    until = time.monotonic() + seconds
    running = [
        client(random.Random(f"{seed} {i}"), url, expected, leaving, until, tally)
        for i in range(clients)
    ]
    if pid is not None:
        running.append(watch_memory(pid, until, tally))
    await asyncio.gather(*running)
    names = (
        "requests_running",
        "requests_waiting",
        "kv_blocks_full_used",
        "kv_blocks_sliding_used",
    )
    for _ in range(50):
        left = {name: await metric(url, name) for name in names}
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return tally, left


def main() -> None:
    """Parse the command line, run, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--leaving", type=float, default=0.2, help="share of requests cut off")
    options = parser.parse_args()
    with own_server(SERVE) as url:
        (server,) = psutil.Process().children()
        tally, left = asyncio.run(
            soak(
                url,
                clients=options.clients,
                seconds=options.seconds,
                leaving=options.leaving,
                pid=server.pid,
            )
        )
    print(dict(tally.outcomes), "left in use:", left)
    for wrong in tally.wrong:
        print("WRONG", wrong)
    third = max(len(tally.memory) // 3, 1)
    growth = [
        max(sizes[-third:]) - max(sizes[third : 2 * third], default=0.0)
        for sizes in zip(*tally.memory, strict=True)
    ]
    print("memory, MiB, server and engine:", [tuple(map(round, m)) for m in tally.memory[::10]])
    print("grown by", [round(size, 1) for size in growth], "MiB from the middle to the last third")
    strange = set(tally.outcomes) - {"right", "left"}
    sys.exit(1 if strange or any(left.values()) or max(growth, default=0) > 50 else 0)


if __name__ == "__main__":
    main()
