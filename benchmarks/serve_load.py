"""Load on a server, as people bring it: requests come when they come, not when others are done.

    python -m benchmarks.serve_load --rate 4 --requests 100             # starts a server itself
    python -m benchmarks.serve_load --url http://127.0.0.1:8000 --rate 4 --requests 100

Arrivals are a Poisson process of `--rate` requests a second. Prompt and output lengths are drawn
from mixtures such as `16:3,128:1` (three short ones for each long one). Prompts are random
printable characters, sent as token ids; outputs always have the length drawn (`ignore_eos`). It is
all drawn from `--seed`, so two runs ask the same at the same times.

What is reported, as p50 and p99 over requests:
- first token: from the moment a request was due to its first token, so a generator that falls
  behind counts against the server and not for it;
- per token: time from first to last token over their number less one;
- whole: from due to last token;
and the tokens of all requests over the time from the first arrival to the last token.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Mixture = list[tuple[int, float]]


@dataclass
class Request:
    """One request: what it asks for and when, and what came of it."""

    due: float
    prompt: list[int]
    max_tokens: int
    seed: int
    arrivals: list[float] = field(default_factory=list)
    """When each event with text came, in seconds after the start."""
    num_tokens: int = 0
    problem: str | None = None


def mixture(text: str) -> Mixture:
    """`16:3,128:1` as (length, weight) pairs."""
    pairs = [part.partition(":") for part in text.split(",")]
    return [(int(length), float(weight or 1)) for length, _, weight in pairs]


def draw_requests(
    rng: random.Random, rate: float, count: int, prompts: Mixture, outputs: Mixture
) -> list[Request]:
    """What will be asked, and when."""
    requests, due = [], 0.0
    for seed in range(count):
        length, max_tokens = (_draw(rng, lengths) for lengths in (prompts, outputs))
        prompt = [rng.randint(32, 126) for _ in range(length)]
        requests.append(Request(due, prompt, max_tokens, seed))
        due += rng.expovariate(rate)
    return requests


def _draw(rng: random.Random, lengths: Mixture) -> int:
    values, weights = zip(*lengths, strict=True)
    return int(rng.choices(values, weights)[0])


async def send(request: Request, url: str, key: str | None, started: float) -> None:
    """Send one request when it is due and note what comes.

    By hand, because an HTTP library would take more of the processor than the server does.
    """
    await asyncio.sleep(started + request.due - time.perf_counter())
    place = urlsplit(url)
    body = {
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {place.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Connection: close",
        *([f"Authorization: Bearer {key}"] if key else []),
    ]
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        await _read(request, reader, started)
        writer.close()
    except OSError as error:
        request.problem = type(error).__name__


async def _read(request: Request, reader: asyncio.StreamReader, started: float) -> None:
    status = (await reader.readline()).split()
    if len(status) < 2 or status[1] != b"200":
        request.problem = b" ".join(status[1:2]).decode() or "no answer"
        return
    async for line in reader:
        if line.startswith(b'data: {"id"'):
            if b'"choices":[]' in line:
                request.num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                return
            request.arrivals.append(time.perf_counter() - started)
        elif line.startswith(b"data: {"):
            break
    request.problem = "broken stream"


async def bring(requests: list[Request], url: str, key: str | None, max_seconds: float) -> float:
    """Send all requests; returns how long it took."""
    started = time.perf_counter()
    sending = asyncio.gather(*(send(request, url, key, started) for request in requests))
    try:
        await asyncio.wait_for(sending, max_seconds)
    except TimeoutError:
        for request in requests:
            if not request.num_tokens and request.problem is None:
                request.problem = "not done in time"
    return time.perf_counter() - started


def quantiles(values: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    if len(values) < 2:
        return {name: round(1000 * value, 1) for name in ("p50", "p99") for value in values[:1]}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(1000 * cuts[49], 1), "p99": round(1000 * cuts[98], 1)}


def report(requests: list[Request], seconds: float) -> dict[str, Any]:
    """The figures of one run."""
    done = [request for request in requests if request.problem is None and request.arrivals]
    several = [request for request in done if request.num_tokens > 1]
    problems = Counter(request.problem for request in requests if request.problem)
    end = max((request.arrivals[-1] for request in done), default=seconds)
    return {
        "requests": len(requests),
        "completed": len(done),
        "problems": dict(problems),
        "seconds": round(end, 2),
        "prompt_tokens": sum(len(request.prompt) for request in done),
        "output_tokens": sum(request.num_tokens for request in done),
        "requests_per_second": round(len(done) / end, 3),
        "output_tokens_per_second": round(sum(r.num_tokens for r in done) / end, 1),
        "first_token_ms": quantiles([r.arrivals[0] - r.due for r in done]),
        "per_token_ms": quantiles(
            [(r.arrivals[-1] - r.arrivals[0]) / (r.num_tokens - 1) for r in several]
        ),
        "whole_ms": quantiles([r.arrivals[-1] - r.due for r in done]),
    }


def print_table(figures: dict[str, Any], settings: dict[str, Any]) -> None:
    """The same for people."""
    print(f"{figures['completed']} of {figures['requests']} requests", end="")
    print(f", {settings['rate']:g} a second, {figures['seconds']:g} s", end="")
    print(f", problems: {figures['problems']}" if figures["problems"] else "")
    print(f"{'output tokens a second':26}{figures['output_tokens_per_second']:>10}")
    print(f"{'requests a second':26}{figures['requests_per_second']:>10}")
    print(f"{'milliseconds':26}{'p50':>10}{'p99':>10}")
    for name, label in (
        ("first_token_ms", "first token"),
        ("per_token_ms", "per token"),
        ("whole_ms", "whole"),
    ):
        row = figures[name]
        print(f"{label:26}{row.get('p50', '-'):>10}{row.get('p99', '-'):>10}")


@contextlib.contextmanager
def own_server(arguments: list[str]) -> Iterator[str]:
    """A server that lives as long as the benchmark; its URL."""
    command = [sys.executable, "-m", "musespark", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("Serving "):
                    yield line.split(" at ")[1].split(" ")[0]
                    break
            else:
                raise SystemExit("The server did not start.")
        finally:
            process.terminate()


def main() -> None:
    """Parse the command line, bring the load, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a server that runs; without it, one is started")
    parser.add_argument("--api-key")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=mixture, default="16:3,64:2,256:1")
    parser.add_argument("--output-tokens", type=mixture, default="16:2,64:2,128:1")
    parser.add_argument("--max-seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="append a line of JSON to this file")
    parser.add_argument("serve", nargs="*", help="after --: arguments for the server it starts")
    options = parser.parse_args()

    rng = random.Random(options.seed)
    requests = draw_requests(
        rng, options.rate, options.requests, options.prompt_tokens, options.output_tokens
    )
    server = contextlib.nullcontext(options.url) if options.url else own_server(options.serve)
    with server as url:
        seconds = asyncio.run(bring(requests, url, options.api_key, options.max_seconds))
    figures = report(requests, seconds)
    settings = {
        "rate": options.rate,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "seed": options.seed,
        "serve": options.serve,
        "cpus": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "date": time.strftime("%Y-%m-%d"),
    }
    print_table(figures, settings)
    line = json.dumps({"benchmark": "serve_load", "settings": settings, **figures})
    print(line)
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
