"""`musespark`: collects the commands, and turns our own errors into one line for people."""

import sys
from typing import Annotated

import typer

from musespark.cli.bench import bench
from musespark.cli.chat import chat
from musespark.cli.demo import demo
from musespark.cli.evaluate import evaluate
from musespark.cli.generate import generate
from musespark.cli.inspect import inspect
from musespark.cli.plan import plan
from musespark.cli.quantize import quantize
from musespark.cli.routes import routes
from musespark.cli.serve import serve
from musespark.errors import MuseSparkError

app = typer.Typer(
    name="musespark",
    help="Run Muse Spark language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(generate)
app.command()(chat)
app.command()(demo)
app.command("eval")(evaluate)
app.command()(quantize)
app.command()(inspect)
app.command()(plan)
app.command()(bench)
app.command()(routes)
app.command()(serve)


def _show_version(value: bool) -> None:
    if value:
        import musespark

        print(musespark.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 our own error, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except MuseSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        sys.exit(0)
