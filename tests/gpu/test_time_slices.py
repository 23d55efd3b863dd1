"""Kernels whose warps wait for each other, while another process has the GPU by turns.

Between turns the hardware saves shared memory and puts it back, barriers by the last state it knows
of each; so one whose memory has become another's would write into that.
"""

import subprocess
import sys
import time

import pytest
import torch
from tests.gpu.hopper import needs_hopper
from tests.ops.accuracy import BF16
from tests.ops.test_nvfp4_hopper import random_experts

from musespark.ops.attention_prefill_hopper import attention_prefill_hopper
from musespark.ops.nvfp4_hopper import HopperNVFP4Experts
from musespark.ops.nvfp4_hopper.experts import WARP_TILING

pytestmark = needs_hopper
SECONDS = 3.0
OTHER = """
import torch
x = torch.randn(4096, 4096, device="cuda")
x @ x
torch.cuda.synchronize()
print("running", flush=True)
while True:
    for _ in range(50):
        x @ x
    torch.cuda.synchronize()
"""


def attention():
    """A prompt of 16384 tokens within a window: about 3 ms."""
    tokens, heads, kv_heads, block = 16384, 128, 16, 16
    query = torch.randn(tokens, heads, 64, device="cuda", dtype=BF16)
    shape = (tokens // block, block, kv_heads, 64)
    key, value = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(2))
    table = torch.randperm(tokens // block, device="cuda").int()[None]
    start, none, length = (
        torch.tensor(v, device="cuda", dtype=torch.int32) for v in ([0, tokens], [0], [tokens])
    )
    return lambda: attention_prefill_hopper(
        query, key, value, table, start, none, length, 0.125, 2048
    )


def experts():
    """Tiles of all sizes: about 4 ms."""
    num_experts, width, inner, tokens, top_k = 16, 2048, 2048, 16384, 4
    weights = random_experts(num_experts, width, inner)
    packed = HopperNVFP4Experts(*(w.cuda() for w in weights))
    x = torch.randn(tokens, width, device="cuda", dtype=BF16)
    ids = torch.rand(tokens, num_experts, device="cuda").topk(top_k).indices
    return lambda: packed(x, ids, tiling=WARP_TILING)[0]


@pytest.mark.parametrize("make", [attention, experts])
def test_the_same_bits_beside_another_process(make):
    run = make()
    alone = run()
    assert bool(alone.isfinite().all())
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"running\n"
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                assert torch.equal(run(), alone)
        finally:
            other.kill()
