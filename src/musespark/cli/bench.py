"""`musespark bench`: prefill and decode speed of a model on this machine."""

import json
import platform
import random
import resource
import statistics
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from musespark.cli.arguments import (
    Device,
    Draft,
    Dtype,
    Executor,
    Model,
    NumSpeculativeTokens,
    Revision,
)
from musespark.cli.options import finish, pick, with_fields
from musespark.config.parallel import Parallelism

if TYPE_CHECKING:
    from musespark.llm.llm import LLM

_SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One batch size, over all rounds; times in seconds."""

    batch_size: int
    input_len: int
    output_len: int
    rounds: int
    prefill_tokens_per_second: float
    """Median over rounds: prompt tokens over the time until every prompt has its first token."""
    decode_tokens_per_second: float | None
    """The batch over the median step, or with a draft all tokens after the first ones over the time
    they took; None for a single output token."""
    first_token: dict[str, float]
    """Percentile -> time until a prompt's first token."""
    step: dict[str, float]
    """Percentile -> time between two steps that bring each prompt a token."""


@finish
@with_fields(Parallelism)
def bench(
    model: Model = "spark-mini",
    *,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    batch_sizes: Annotated[
        str, typer.Option(help="Prompts that run together, such as 1,8,32.")
    ] = "1,8,32",
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens generated for each.")] = 32,
    rounds: Annotated[int, typer.Option(help="Measured rounds, after one that is not.")] = 3,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 2048,
    draft: Draft = "none",
    num_speculative_tokens: NumSpeculativeTokens = None,
    executor: Executor = "multiprocess",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="How keys and values are stored: auto, bf16 or fp8_e4m3.")
    ] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg).")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON object here as well.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    **settings: Any,
) -> None:
    """Measure prefill and decode on random prompts, greedy, without the prefix cache.

    Threads follow OMP_NUM_THREADS; other programs that use the same cores spoil the figures. A
    draft is no better than chance at random prompts: benchmarks/speculative.py measures real ones.
    """
    sizes = _parse_sizes(batch_sizes)
    for name, value in (("input-len", input_len), ("output-len", output_len), ("rounds", rounds)):
        if value < 1:
            raise typer.BadParameter(f"--{name} must be 1 or more, found {value}.")
    from musespark.cli.generate import load_with_progress

    llm = load_with_progress(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        max_model_len=input_len + output_len,
        max_num_seqs=max(sizes),
        max_num_batched_tokens=max(max_num_batched_tokens, 2 * max(sizes)),
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=False,
        draft=draft,
        num_speculative_tokens=num_speculative_tokens,
        executor=executor,
        **pick(Parallelism, settings),
    )
    results = []
    for size in sizes:
        _tell(f"batch size {size}: {rounds} rounds")
        results.append(_measure(llm, size, input_len, output_len, rounds))
    report = _report(llm, model, results)
    if output is not None:
        try:
            output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"--output {output}: {error}") from None
    if as_json:
        print(json.dumps(report))
    else:
        _print_table(report, results)
    if plot is not None:
        _plot(report, results, plot)


def _parse_sizes(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"--batch-sizes: numbers above 0, such as 1,8; found {text!r}.")
    return [int(word) for word in words]


def _tell(text: str) -> None:
    """Progress, for people who watch."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def _measure(llm: "LLM", size: int, input_len: int, output_len: int, rounds: int) -> BenchResult:
    # Here, not at the top: it takes PyTorch along.
    from musespark.llm.timing import time_generation

    generator = random.Random(size)
    first_tokens: list[float] = []
    steps: list[float] = []
    prefills: list[float] = []
    rates: list[float] = []
    for number in range(rounds + 1):
        vocabulary = range(llm.config.vocab_size)
        prompts = [generator.choices(vocabulary, k=input_len) for _ in range(size)]
        times = time_generation(llm, prompts, output_len)
        if number:  # the first round warms up
            first_tokens += times.first_tokens
            steps += times.steps
            prefills.append(size * input_len / max(times.first_tokens))
            if times.rest_seconds:
                rates.append(size * (output_len - 1) / times.rest_seconds)
    rate = size / statistics.median(steps) if steps else None
    if rates and llm.stats().speculation is not None:
        rate = statistics.median(rates)
    return BenchResult(
        batch_size=size,
        input_len=input_len,
        output_len=output_len,
        rounds=rounds,
        prefill_tokens_per_second=statistics.median(prefills),
        decode_tokens_per_second=rate,
        first_token=percentiles(first_tokens),
        step=percentiles(steps),
    )


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99; empty for no values."""
    ordered = sorted(values)
    return {
        f"p{int(share * 100)}": ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for share in _SHARES
        if ordered
    }


def _report(llm: "LLM", model: str, results: list[BenchResult]) -> dict[str, Any]:
    import torch

    on_gpu = llm.info.device.startswith("cuda")
    speculation = llm.stats().speculation
    # Linux counts kilobytes, macOS bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024
    if llm.info.memory_bytes:  # in other processes, which tell what they hold once loaded
        peak = max(llm.info.memory_bytes)
    elif on_gpu:
        peak = torch.cuda.max_memory_allocated()
    return {
        "model": model,
        "device": torch.cuda.get_device_name() if on_gpu else llm.info.device,
        "dtype": llm.info.dtype,
        "kv_cache_dtype": llm.info.kv_cache_dtype,
        "threads": torch.get_num_threads(),
        "layout": llm.info.layout,
        "peak_memory_bytes": peak,
        "speculation": None if speculation is None else speculation.summary(),
        "software": f"musespark {version('musespark')}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "results": [asdict(result) for result in results],
    }


def _print_table(report: dict[str, Any], results: list[BenchResult]) -> None:
    print(
        f"{report['model']} on {report['device']}, {report['layout']}, {report['dtype']}, "
        f"{report['threads']} threads, "
        f"peak memory {report['peak_memory_bytes'] / 2**20:,.0f} MiB\n"
        f"prompts of {results[0].input_len} tokens, {results[0].output_len} tokens generated, "
        f"{results[0].rounds} rounds\n\n"
        f"{'':>6}{'prefill':>12}{'decode':>12}{'first token, ms':>22}{'step, ms':>22}\n"
        f"{'batch':>6}{'tokens/s':>12}{'tokens/s':>12}{'p50':>12}{'p99':>10}{'p50':>12}{'p99':>10}"
    )
    for each in results:
        rate = each.decode_tokens_per_second
        times = [
            f"{1e3 * table[name]:.2f}" if table else "-"
            for table in (each.first_token, each.step)
            for name in ("p50", "p99")
        ]
        print(
            f"{each.batch_size:>6}{each.prefill_tokens_per_second:>12,.0f}"
            f"{'-' if rate is None else f'{rate:,.0f}':>12}"
            f"{times[0]:>12}{times[1]:>10}{times[2]:>12}{times[3]:>10}"
        )


def _plot(report: dict[str, Any], results: list[BenchResult], path: Path) -> None:
    from musespark.errors import ConfigError

    # Here, not at the top: nothing else needs matplotlib.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "plot: needs matplotlib. Install it with `pip install 'musespark[plot]'`."
        ) from None
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    figure.suptitle(f"{report['model']} on {report['device']}, {report['dtype']}", fontsize=11)
    labels = [str(each.batch_size) for each in results]
    rates = {
        "prefill": [each.prefill_tokens_per_second for each in results],
        "decode": [each.decode_tokens_per_second or 0.0 for each in results],
    }
    for axes, (name, values) in zip(figure.subplots(1, 2), rates.items(), strict=True):
        bars = axes.bar(labels, values, color="tab:blue" if name == "prefill" else "tab:orange")
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=9)
        axes.set(xlabel="batch size", ylabel=f"{name}, tokens/s")
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path} cannot be written: {error}.") from None
