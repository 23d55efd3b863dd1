"""Other engines' kernels beside ours on one H200: the same sizes, in turn, in one process.

    python -m benchmarks.h200_peers --output results.json

NVFP4 experts beside SGLang's Marlin kernel (W4A16, both products; its figures leave out routing
lists, activation and the order of columns, ours have them), residual boundary, finalize and routing
beside vLLM's Triton kernels. What is not installed is left out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.h200 import BF16, DEVICE, F32, Case, D, H, all_cases, randn, time_case
from benchmarks.h200_experts import (
    CASES,
    ROTATIONS,
    E,
    I,
    K,
    ceilings,
    graph_us,
    random_nvfp4,
    routing,
)
from torch import Tensor

from musespark.ops.nvfp4_hopper.experts import HopperNVFP4Experts

ROUNDS = 3
SMALL_SIZES = (1, 16, 64, 256, 2048)
Weight = tuple[Tensor, Tensor]
"""Codes and scales."""
Time = Callable[[], float]
"""Takes a time, us."""


class MarlinExperts:
    """Random weights in the peer's layout; its launches as its own MoE layer makes them."""

    def __init__(self) -> None:
        from sgl_kernel.scalar_type import scalar_types
        from sglang.kernels.ops.moe.moe_wna16_marlin import moe_wna16_marlin_gemm

        self._product, self._kind = moe_wna16_marlin_gemm, scalar_types.float4_e2m1f
        self._gate_up = self._weight(H, 2 * I)
        self._down = self._weight(I, H)
        self._factors = torch.full((E,), 1e-4, device=DEVICE, dtype=BF16)
        self._locks = torch.zeros(132 * 4, device=DEVICE, dtype=torch.int32)

    @staticmethod
    def _weight(width: int, rows: int) -> Weight:
        codes = torch.randint(
            -(2**31), 2**31 - 1, (E, width // 16, 2 * rows), device=DEVICE, dtype=torch.int32
        )
        return codes, torch.ones(E, width // 16, rows, device=DEVICE).to(torch.float8_e4m3fn)

    def prepare(self, x: Tensor, ids: Tensor) -> Callable[[], None]:
        """Lists the routes ahead; what is returned multiplies them."""
        tokens = len(x)
        # Its own choice: the first block that an expert's rows fill to 0.9.
        block = next((b for b in (8, 16, 32, 48) if tokens * K / E / b < 0.9), 64)
        counts = torch.bincount(ids.flatten(), minlength=E)
        blocks = (counts + block - 1) // block
        order = ids.flatten().argsort(stable=True)
        expert = ids.flatten()[order]
        start = (blocks * block).cumsum(0) - blocks * block - (counts.cumsum(0) - counts)
        places = torch.full(
            (int(blocks.sum()) * block,), tokens * K, device=DEVICE, dtype=torch.int32
        )
        places[start[expert] + torch.arange(tokens * K, device=DEVICE)] = order.int()
        lists = (
            places,
            torch.arange(E, device=DEVICE, dtype=torch.int32).repeat_interleave(blocks),
            torch.tensor([len(places)], device=DEVICE, dtype=torch.int32),
            torch.rand(tokens, K, device=DEVICE),
        )
        both, hidden, rows = (randn(tokens * K, width) for width in (2 * I, I, H))

        def multiply(source: Tensor, out: Tensor, weight: Weight, top_k: int) -> None:
            self._product(
                source, out, weight[0], None, weight[1], self._factors, None, None, None,
                self._locks, *lists, moe_block_size=block, top_k=top_k, mul_topk_weights=False,
                is_ep=False, b_q_type=self._kind, size_m=len(source), size_n=out.shape[1],
                size_k=source.shape[1], is_k_full=True, use_atomic_add=False,
                use_fp32_reduce=True, is_zp_float=False,
            )  # fmt: skip

        def run() -> None:
            multiply(x, both, self._gate_up, K)
            multiply(hidden, rows, self._down, 1)

        return run


def compare_experts() -> Iterator[dict[str, Any]]:
    """Every size."""
    marlin = MarlinExperts()
    experts = HopperNVFP4Experts(*random_nvfp4())
    for tokens, kind in CASES:
        inputs = [
            (randn(tokens, H), routing(tokens, kind, seed))
            for seed in range(ROTATIONS.get(tokens, 1))
        ]
        theirs = [(marlin.prepare(*each), None) for each in inputs]
        launches = 2 * len(inputs) if tokens <= 64 else 2
        yield compared(
            f"experts, {kind}", tokens, "Marlin",
            partial(graph_us, experts, inputs, launches),
            partial(graph_us, lambda run, _: run(), theirs, launches),
        )  # fmt: skip


def small_cases(tokens: int) -> dict[str, Callable[[], Callable[[], Any]]]:
    """What draws inputs for each of vLLM's kernels, and returns the call on them."""
    from vllm.models.muse_spark.common.ops.fused_finalize import fused_post_expert_finalize
    from vllm.models.muse_spark.common.ops.fused_rmsnorm import fused_norm_residual_norm_fwd
    from vllm.models.muse_spark.common.ops.fused_routing import fused_musespark1x_routing

    gain, pre = randn(H), randn(D)
    alpha, beta = (torch.rand(D, device=DEVICE) for _ in range(2))
    bias = 0.1 * torch.randn(E, device=DEVICE)

    def boundary() -> Callable[[], Any]:
        branch, stream = randn(tokens, D), randn(tokens, D, dtype=F32)
        return lambda: fused_norm_residual_norm_fwd(
            branch, stream, None, pre, 1e-8, 1e-5,
            alpha=alpha, beta=beta, pre_gain_center=1.0, out_dtype=BF16,
        )  # fmt: skip

    def finalize() -> Callable[[], Any]:
        rows, weights = randn(tokens, K, H), torch.rand(tokens, K, device=DEVICE)
        out = randn(tokens, H)
        return lambda: fused_post_expert_finalize(rows, gain, weights, 1e-8, 1.0, True, out)

    def topk() -> Callable[[], Any]:
        logits = randn(tokens, E, dtype=F32)
        return lambda: fused_musespark1x_routing(logits, bias, K, 1.0, None, "sigmoid", 1e-15)

    return {"boundary": boundary, "finalize": finalize, "topk": topk}


def compare_small() -> Iterator[dict[str, Any]]:
    """Every size; inputs change from call to call on both sides."""
    for tokens in SMALL_SIZES:
        makers = small_cases(tokens)
        for ours in all_cases(list(makers), [tokens]):
            theirs = Case(ours.name, tokens, ours.num_bytes, ours.flops, makers[ours.name])
            yield compared(
                ours.name, tokens, "vLLM", partial(time_case, ours), partial(time_case, theirs)
            )


def compared(
    name: str, tokens: int, peer: str, time_ours: Time, time_theirs: Time
) -> dict[str, Any]:
    """One line of the table: both in turn, several rounds, medians over rounds."""
    us, peer_us = zip(*((time_ours(), time_theirs()) for _ in range(ROUNDS)), strict=True)
    ours, theirs = statistics.median(us), statistics.median(peer_us)
    print(f"{name:18}{tokens:6}{ours:10.2f} us   {peer:7}{theirs:10.2f} us{ours / theirs:7.2f}")
    return {
        "name": name, "tokens": tokens, "peer": peer, "us": us, "peer_us": peer_us,
        "ratio": ours / theirs,
    }  # fmt: skip


def main() -> None:
    """Compare with what is installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "ceilings": ceilings()}
    print(report)
    print("name              tokens      ours      peer          time      ratio", flush=True)
    report["results"] = []
    for compare in (compare_small, compare_experts):
        try:
            report["results"] += compare()
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
