"""Kernels can be defined, and the reference runs, where Triton or its lower level is missing."""

import subprocess
import sys

import pytest

from musespark.ops.triton_import import HAS_TRITON

WITHOUT_TRITON = "import sys; sys.modules['triton'] = None"
WITHOUT_GLUON = "import sys; sys.modules['triton.experimental.gluon'] = None"
OTHER_GLUON = """
from triton.experimental.gluon import language
for name in ("barrier", "thread_barrier"):
    if hasattr(language, name):
        delattr(language, name)
"""
SCRIPT = """
import torch
from musespark.ops import attention_prefill_hopper
from musespark.ops.gluon_import import HAS_GLUON
from musespark.ops.nvfp4_hopper.experts import TILINGS, tilings_for

assert not HAS_GLUON
assert tilings_for(4096, 4096) == TILINGS
query, cache = torch.zeros(600, 8, 64).bfloat16(), torch.zeros(4, 16, 1, 64).bfloat16()
chosen = attention_prefill_hopper.prefill_kernel(query, cache)
assert chosen is attention_prefill_hopper.attention_prefill_triton
from musespark import LLM, SamplingParams
(completion,) = LLM("spark-mini", device="cpu").generate(["1, 2,"], SamplingParams(max_tokens=2))
print(len(completion.token_ids))
"""


@pytest.mark.parametrize(
    "missing",
    [
        WITHOUT_TRITON,
        pytest.param(
            WITHOUT_GLUON, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
        ),
        pytest.param(OTHER_GLUON, marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")),
    ],
    ids=["no Triton", "no Gluon", "another Gluon"],
)
def test_the_package_works_without(missing):
    done = subprocess.run(
        [sys.executable, "-c", missing + SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"]
