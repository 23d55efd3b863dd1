import os
import pty
import subprocess
import sys

from musespark.checkpoint.progress import terminal_progress

SHOW = """
import sys, time
from musespark.checkpoint.progress import terminal_progress
assert "rich" not in sys.modules
with terminal_progress("Reading") as progress:
    for done in (0, 1_000_000, 2_000_000, 3_000_000):
        progress(done, 3_000_000)
        time.sleep(0.15)
"""


def test_no_bar_where_nobody_looks(capsys):
    with terminal_progress() as progress:
        assert progress is None
    assert capsys.readouterr().err == ""


def test_bar_with_bytes_and_rate_on_a_terminal():
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env=environment,
        timeout=60,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # Linux's way to say that the other end is closed.
        pass
    os.close(ours)
    text = shown.decode()
    assert done.returncode == 0, text
    assert done.stdout == b""
    assert "Reading" in text
    assert "3.0/3.0 MB" in text
    assert "MB/s" in text
