"""What the README shows runs, and does what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FIRST, DECODER = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_first_example_answers():
    lines = run(FIRST)
    assert "433" in lines
    assert sum("length" in line for line in lines) == 2


def test_the_decoder_gives_logits():
    assert run(DECODER + "\nprint(tuple(logits.shape), logits.dtype)") == ["(2, 384) torch.float32"]
