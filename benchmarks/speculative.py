"""What a draft brings on Spark-Mini's tasks, and that it changes no token.

    python -m benchmarks.speculative [--draft auto|random|FOLDER] [--prompts 1000] [--output FILE]

1. Tokens: greedy replies to held-out questions of all tasks, in float32, with and without the
   draft; how many are equal, tokens per cycle, and how often each position of a guess is right.
2. Speed: the same requests with and without the draft in one process, in turn, at several batch
   sizes, each request to its end. Each side has them twice in a round, one first and last, the
   other in between, since whoever comes first with new sizes of steps sets them up for both. A
   round's figure is the ratio of the two rates; a batch size's, the median over rounds. With
   `--width fixed` all guesses are verified; with `pays`, as many as pay by the times that are
   measured at the start.

A random draft knows nothing: it shows that tokens stay the same and what guessing costs.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from musespark import LLM, SamplingParams
from musespark.chat import parse_tools
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.model import DecoderConfig
from musespark.evals.generate import NEW_QUESTIONS, evaluation_conversations
from musespark.evals.run import TASKS
from musespark.testing import make_draft


def questions(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Prompts of all tasks in turn."""
    each = -(-count // len(TASKS))
    by_task = [evaluation_conversations(task, NEW_QUESTIONS, each, seed) for task in TASKS]
    chat = llm.chat_format
    mixed = [one for group in zip(*by_task, strict=True) for one in group][:count]
    return [
        list(
            chat.prompt(
                one.request(), parse_tools(one.openai_tools()), reasoning_effort=one.effort
            ).token_ids
        )
        for one in mixed
    ]


def params_for(llm: LLM) -> SamplingParams:
    """Greedy, to the end of the turn."""
    stops = tuple(sorted(llm.chat_format.tokenizer.stop_ids))
    return SamplingParams(temperature=0, max_tokens=192, stop_token_ids=stops)


def compare_tokens(plain: LLM, guessing: LLM, count: int) -> dict[str, Any]:
    """Replies with and without the draft."""
    prompts, params = questions(plain, count, seed=1), params_for(plain)
    one, other = (
        [completion.token_ids for completion in llm.generate(prompts, params)]
        for llm in (plain, guessing)
    )
    stats = guessing.stats().speculation
    assert stats is not None
    return {
        "prompts": count,
        "equal": sum(a == b for a, b in zip(one, other, strict=True)),
        "output_tokens": sum(map(len, one)),
        **stats.summary(),
    }


def compare_speed(plain: LLM, guessing: LLM, size: int, rounds: int) -> dict[str, Any]:
    """Output tokens per second of both, in turn."""
    params = params_for(plain)
    rates: dict[str, list[float]] = {"plain": [], "draft": []}
    sides = {"plain": plain, "draft": guessing}
    for turn in range(rounds + 1):
        prompts = questions(plain, size, seed=100 + turn)
        outer, inner = ("plain", "draft") if turn % 2 else ("draft", "plain")
        tokens, seconds = dict.fromkeys(sides, 0), dict.fromkeys(sides, 0.0)
        for name in (outer, inner, inner, outer):
            started = time.perf_counter()
            outputs = sides[name].generate(prompts, params)
            seconds[name] += time.perf_counter() - started
            tokens[name] += sum(len(each.token_ids) for each in outputs)
        if turn:  # the first round warms up
            for name in sides:
                rates[name].append(tokens[name] / seconds[name])
    ratios = [draft / plain for plain, draft in zip(rates["plain"], rates["draft"], strict=True)]
    return {
        "batch_size": size,
        "rounds": rounds,
        "plain_tokens_per_second": statistics.median(rates["plain"]),
        "draft_tokens_per_second": statistics.median(rates["draft"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    """Measure, print, and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", default="auto", help="auto, random, or a draft")
    parser.add_argument("--tokens", type=int, default=5, help="guessed at a time")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--batch-sizes", default="1,4,32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", choices=("pays", "fixed"), default="pays")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draft = arguments.draft
        if draft == "random":
            target = DecoderConfig.from_folder(resolve_checkpoint("spark-mini"))
            draft = str(make_draft(Path(folder) / "draft", target, block_size=arguments.tokens))
        where: dict[str, Any] = {
            "dtype": arguments.dtype,
            "device": arguments.device,
            "warms_up": True,
        }
        plain = LLM("spark-mini", enable_prefix_caching=False, **where)
        fixed = LLM(
            "spark-mini",
            draft=draft,
            num_speculative_tokens=arguments.tokens,
            enable_prefix_caching=False,
            **where,
        )
        assert fixed.stats().speculation is not None, "spark-mini has no draft"
        report: dict[str, Any] = {
            "draft": arguments.draft,
            "tokens": arguments.tokens,
            "dtype": arguments.dtype,
            "device": plain.info.device,
            "width": arguments.width,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        if arguments.prompts:
            report["answers"] = compare_tokens(plain, fixed, arguments.prompts)
            print(json.dumps(report["answers"]), flush=True)
        guessing = fixed
        if arguments.width == "pays":
            guessing = LLM("spark-mini", draft=draft, enable_prefix_caching=False, **where)
        report["speed"] = []
        for size in filter(None, arguments.batch_sizes.split(",")):
            report["speed"].append(compare_speed(plain, guessing, int(size), arguments.rounds))
            print(json.dumps(report["speed"][-1]), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
