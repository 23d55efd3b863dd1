"""`musespark eval`: how many held-out questions a model answers rightly, task by task."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from musespark.cli.arguments import (
    Device,
    Draft,
    Dtype,
    Executor,
    Model,
    NumSpeculativeTokens,
)
from musespark.cli.options import finish, pick, with_fields
from musespark.config.parallel import Parallelism

if TYPE_CHECKING:
    from musespark.evals.reference import LogitReport
    from musespark.evals.run import EvalReport, Progress
    from musespark.llm.llm import LLM

# Conversations that the comparison with a reference runs over.
_REFERENCE_SAMPLES = 32


@finish
@with_fields(Parallelism)
def evaluate(
    model: Model = "spark-mini",
    *,
    tasks: Annotated[
        str | None, typer.Option(help="Names separated by commas; default: every task.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Questions per task.")] = 200,
    seed: Annotated[int, typer.Option(help="Chooses the questions.")] = 0,
    reference: Annotated[
        str | None,
        typer.Option(help="Compare logits with this model's, run in float32."),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    draft: Draft = "none",
    num_speculative_tokens: NumSpeculativeTokens = None,
    executor: Executor = "multiprocess",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    show_misses: Annotated[bool, typer.Option(help="List the questions answered wrongly.")] = False,
    **settings: Any,
) -> None:
    """Ask Spark-Mini's tasks and count right answers; the same seed asks the same questions."""
    from musespark.cli.generate import load_with_progress
    from musespark.evals.run import TASKS
    from musespark.evals.run import evaluate as ask

    llm = load_with_progress(
        model,
        device=device,
        dtype=dtype,
        draft=draft,
        num_speculative_tokens=num_speculative_tokens,
        executor=executor,
        **pick(Parallelism, settings),
    )
    names = TASKS if tasks is None else tuple(name.strip() for name in tasks.split(","))
    with _progress(len(names), quiet=as_json) as progress:
        report = ask(
            _generate_with(llm),
            llm.chat_format,
            tasks=names,
            samples=samples,
            seed=seed,
            progress=progress,
        )
    damage = None if reference is None else _compare(model, reference, llm, device, dtype, seed)
    if as_json:
        fields: dict[str, Any] = report.to_json(model)
        if (speculation := llm.stats().speculation) is not None:
            fields["speculation"] = speculation.summary()
        if damage is not None:
            fields["reference"] = {"model": reference, **dataclasses.asdict(damage)}
        print(json.dumps(fields))
    else:
        _print_tables(model, report, reference, damage, show_misses=show_misses)


def _generate_with(llm: "LLM") -> Any:
    """`llm` as the greedy continuation that the evaluation asks for."""
    from musespark.config.sampling import SamplingParams

    def generate(
        prompts: list[list[int]], max_tokens: int, stop_ids: Sequence[int]
    ) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, stop_token_ids=tuple(stop_ids)
        )
        return [completion.token_ids for completion in llm.generate(prompts, params)]

    return generate


def _compare(
    model: str, reference: str, llm: "LLM", device: str | None, dtype: str | None, seed: int
) -> "LogitReport":
    """Logits of the model against the reference's in float32, over right conversations."""
    from musespark.evals.reference import compare_logits, reference_sequences
    from musespark.llm.loading import default_device, load_decoder

    device = device or default_device()
    decoder = load_decoder(model, device=device, dtype=dtype)
    decoder.pack()
    exact = load_decoder(reference, device=device, dtype="float32")
    return compare_logits(
        lambda ids: decoder.compute_logits(ids).cpu().numpy(),
        lambda ids: exact.compute_logits(ids).cpu().numpy(),
        reference_sequences(llm.chat_format, samples=_REFERENCE_SAMPLES, seed=seed),
    )


@contextmanager
def _progress(num_tasks: int, *, quiet: bool) -> "Iterator[Progress | None]":
    """A bar over all tasks on a terminal; None elsewhere, or when `quiet`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        row = bar.add_task("", total=None)
        finished: dict[str, int] = {}

        def show(task: str, done: int, samples: int) -> None:
            finished[task] = done
            bar.update(
                row,
                description=task,
                completed=sum(finished.values()),
                total=samples * num_tasks,
            )

        yield show


def _print_tables(
    model: str,
    report: "EvalReport",
    reference: str | None,
    damage: "LogitReport | None",
    *,
    show_misses: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("task", title=f"{model}, seed {report.seed}")
    table.add_column("right", justify="right")
    table.add_column("samples", justify="right")
    for row in report.rows():
        table.add_row(*row)
    console.print(table)
    if damage is not None:
        console.print(
            f"against {reference} in float32, over {damage.positions} positions: "
            f"mean KL {damage.mean_kl:.3g} nats, worst logit error "
            f"{damage.worst_logit_error:.3g}, same top token {damage.top1_agreement:.2%}"
        )
    for miss in report.misses if show_misses else ():
        console.print(f"\n{miss.task} ({miss.phrasing})", style="bold")
        console.print(f"  asked    {miss.question}\n  expected {miss.expected}", markup=False)
        console.print(f"  replied  {miss.reply}", markup=False)
