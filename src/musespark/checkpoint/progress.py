"""A bar on the terminal that shows how far a load has come, in bytes and bytes per second."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from musespark.checkpoint.load import Progress


@contextmanager
def terminal_progress(label: str = "Loading weights") -> Iterator[Progress | None]:
    """A `Progress` that draws a bar on standard error, or None where that is no terminal.

    with terminal_progress() as progress:
        load_weights(slots, reader, progress=progress)
    """
    if not sys.stderr.isatty():
        yield None
        return
    # Here, not at the top: a server or a test draws no bar and should not pay for it.
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def show(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield show
