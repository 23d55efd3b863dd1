"""`musespark serve` as people start it, in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def serving(
    *arguments: str, exit_code: int = 0, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its URL. It is told to end, and must do so with this code."""
    command = [sys.executable, "-m", "musespark", "serve", "--port", "0", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("Serving "):
                    break
            else:
                raise AssertionError(f"the server did not start: {lines}")
            yield process, lines[-1].split(" at ")[1].split(" ")[0]
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            assert code == exit_code, f"ended with {code}: {process.stdout.read()}"
        finally:
            if process.poll() is None:
                process.kill()
