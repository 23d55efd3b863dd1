"""`musespark quantize`: write a checkpoint again with its experts in NVFP4."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from musespark.cli.arguments import Revision

if TYPE_CHECKING:
    from musespark.checkpoint.calibrate import InputScales
    from musespark.checkpoint.quantize import QuantizeReport

# Text is calibrated in sequences of so many tokens.
_SEQUENCE = 2048


def quantize(
    source: Annotated[
        str, typer.Argument(help="A folder, a packaged model's name, or a Hugging Face id.")
    ],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist, or be empty.")],
    *,
    format: Annotated[Literal["nvfp4"], typer.Option(help="How experts are stored.")] = "nvfp4",
    exclude_layers: Annotated[
        str,
        typer.Option(help="Layers whose experts stay as they are: 3,5-7,first,last or none."),
    ] = "first,last",
    scales: Annotated[
        Literal["mse", "max"],
        typer.Option(help="Block scales by least squared error, or by the largest weight."),
    ] = "mse",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text to run through the model first, to measure input scales."),
    ] = None,
    revision: Revision = None,
) -> None:
    """Quantize the experts to NVFP4, in ModelOpt's layout; everything else is copied as it is.

    Layers are read one by one, so memory stays small; only --calibrate loads the whole model.
    """
    from musespark.checkpoint.progress import terminal_progress
    from musespark.checkpoint.quantize import parse_layers, quantize_checkpoint
    from musespark.checkpoint.source import resolve_checkpoint
    from musespark.config.model import DecoderConfig

    assert format == "nvfp4"  # noqa: S101
    folder = resolve_checkpoint(source, revision)
    excluded = parse_layers(exclude_layers, DecoderConfig.from_folder(folder).num_hidden_layers)
    input_scales = None if calibrate is None else _calibrated(folder, calibrate)
    with terminal_progress("Quantizing") as progress:
        report = quantize_checkpoint(
            folder,
            target,
            exclude_layers=excluded,
            scale_choice=scales,
            input_scales=input_scales,
            progress=progress,
        )
    _print_report(report, target)


def _calibrated(folder: Path, text_file: Path) -> "dict[int, InputScales]":
    from musespark.chat.tokenizer import Tokenizer
    from musespark.checkpoint.calibrate import calibrate
    from musespark.checkpoint.progress import terminal_progress

    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--calibrate {text_file}: {error}") from None
    token_ids = Tokenizer.from_folder(folder).encode_prompt(text)
    sequences = [
        token_ids[start : start + _SEQUENCE] for start in range(0, len(token_ids), _SEQUENCE)
    ]
    with terminal_progress("Calibrating") as progress:
        return calibrate(
            folder,
            sequences,
            progress=None if progress is None else lambda done: progress(done, len(token_ids)),
        )


def _print_report(report: "QuantizeReport", target: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", title="Relative error")
    for name in ("gate and up", "down"):
        table.add_column(name, justify="right")
    for layer in report.layers:
        table.add_row(str(layer.layer), f"{layer.gate_up:.2%}", f"{layer.down:.2%}")
    console = Console()
    console.print(table)
    print(
        f"{target}: {report.target_bytes / 1e9:.3g} GB of weights, "
        f"from {report.source_bytes / 1e9:.3g} GB."
    )
