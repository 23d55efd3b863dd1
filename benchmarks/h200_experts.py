"""Experts of one layer at the released size on one H200: right first, then how fast.

    python -m benchmarks.h200_experts [--variants] [--skip-bf16] [--out results.json]

E = 256 experts of H = I = 4096, top 8. Every tiling is checked against float64 at the very shape
that is timed: rows of several experts, outputs poisoned with NaN. Times are of CUDA graph replays
with routing lists and input permutation inside, medians, with pauses between them. Small batches
rotate over several routings, so that the cache does not serve one batch's experts to the next.
`--variants` times other tilings beside the chosen ones.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from musespark.ops.bf16_grouped_gemm_hopper import TILINGS as BF16_TILINGS
from musespark.ops.bf16_grouped_gemm_hopper import BF16Tiling, HopperBF16Experts
from musespark.ops.nvfp4 import dequantize
from musespark.ops.nvfp4_hopper.experts import (
    TILINGS,
    HopperNVFP4Experts,
    Tiling,
    WarpTiling,
    tilings_for,
)
from musespark.ops.nvfp4_hopper.work_list import choose_tiling

E, H, I, K = 256, 4096, 4096, 8  # noqa: E741
Case = tuple[int, str]
"""(tokens, routing)."""
CASES: list[Case] = [(t, "uniform") for t in (1, 4, 16, 64, 256, 1024, 4096)] + [
    (t, "zipf") for t in (1024, 4096)
]
Run = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x, ids) -> (rows, route index)."""
WeightsOf = Callable[[int], tuple[Tensor, Tensor]]
"""An expert's gate_up and down in float64."""
TARGETS = {
    **dict(zip(CASES, (64, 215, 705, 1475, 1725, 2150, 5200), strict=False)),
    (1024, "zipf"): 2900,
    (4096, "zipf"): 6500,
}
ROTATIONS = {1: 8, 4: 4, 16: 2}
NARROW, WIDE = ((16,), (0,)), ((16, 32, 32), (0, 0, 16))
LARGE, CLASSES = ((128, 128), (0, 32)), ((32, 64, 128, 128), (0, 0, 0, 32))
HALF = ((64, 128, 128, 128), (0, 0, 16, 32))
FEW_TOKENS = [
    Tiling(4, 2, *NARROW, stages=3, unroll=2),
    Tiling(4, 2, *NARROW, stages=3, settle=True),
    Tiling(4, 2, *NARROW, stages=4, settle=True),
    Tiling(4, 2, *NARROW, stages=5, settle=True),
]
ONE_GROUP = [
    Tiling(4, 1, *NARROW, stages=3, unroll=2),
    Tiling(4, 1, *NARROW, stages=4, settle=True),
]
VARIANTS = {
    1: [*ONE_GROUP, *FEW_TOKENS],
    4: [*ONE_GROUP, *FEW_TOKENS],
    16: FEW_TOKENS,
    64: FEW_TOKENS,
    256: [*FEW_TOKENS, Tiling(4, 2, (16, 16), (0, 16), stages=4, settle=True)],
    1024: [
        Tiling(4, 2, *WIDE, stages=3),
        Tiling(4, 2, *WIDE, stages=3, settle=True),
        Tiling(8, 2, *WIDE, stages=3, settle=True),
        Tiling(8, 2, *WIDE, stages=4, settle=True),
    ],
    4096: [
        Tiling(8, 2, *LARGE, stages=4),
        Tiling(8, 2, *LARGE, stages=4, settle=True),
        Tiling(8, 2, *CLASSES, stages=4),
        Tiling(8, 2, *HALF, stages=4),
    ],
}


def chosen(tokens: int) -> Tiling | WarpTiling:
    return choose_tiling(tokens * K, E, tilings_for(H, I))


def variants_of(tokens: int) -> list[Tiling | WarpTiling]:
    """The chosen one first; the one of kernels without roles is among them."""
    plain = choose_tiling(tokens * K, E, TILINGS)
    return list(dict.fromkeys([chosen(tokens), plain, *VARIANTS[tokens]]))


def routing(tokens: int, kind: str, seed: int) -> Tensor:
    """[T, K] distinct experts a token: uniform, or Zipf with exponent 0.7."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weights = torch.ones(E, device="cuda")
    if kind == "zipf":
        weights = torch.arange(1, E + 1, device="cuda").float() ** -0.7
        weights = weights[torch.randperm(E, device="cuda", generator=generator)]
    return torch.multinomial(weights.expand(tokens, E), K, generator=generator)


def random_nvfp4() -> tuple[Tensor, ...]:
    """Checkpoint tensors; scales are every e4m3 number up to 2, subnormals and zeros included."""

    def weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (E, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(65, (E, rows, columns // 16), dtype=torch.uint8, device="cuda")
        return codes, scales.view(torch.float8_e4m3fn)

    noise = torch.rand(E, 3, device="cuda") + 0.5
    gate_up_global = noise[:, :2] * torch.tensor([0.02, 0.002], device="cuda")
    return *weight(2 * I, H), gate_up_global, *weight(H, I), noise[:, 2] * 0.02


def expected_rows(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, expert: int) -> Tensor:
    """One expert's rows in float64, from float64 weights that include global scales."""
    tokens = (ids == expert).any(dim=1)
    gate, up = (x[tokens].double() @ gate_up.T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).bfloat16().double() @ down.T


def worst_error(run: Run, x: Tensor, ids: Tensor, weights_of: WeightsOf) -> float:
    """The largest relative error over the busiest, the least busy and two more experts."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    rows, _ = run(x, ids)
    torch.use_deterministic_algorithms(False)
    counts = torch.bincount(ids.flatten(), minlength=E)
    occupied = counts.nonzero().flatten()
    order = occupied[counts[occupied].argsort()]
    errors = []
    for expert in {int(order[i]) for i in (0, len(order) // 3, len(order) // 2, -1)}:
        expected = expected_rows(x, ids, *weights_of(expert), expert)
        found = rows.view(*ids.shape, H)[ids == expert].double()
        errors.append(float((found - expected).norm() / expected.norm()))
    finite = bool(rows.isfinite().all())
    return max(errors) if finite else float("nan")


def graph_us(run: Callable[..., Any], inputs: Sequence[tuple[Any, Any]], launches: int) -> float:
    """Median microseconds of a launch, over nine replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x, ids in inputs:
            run(x, ids)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(*inputs[i % len(inputs)])
    graph.replay()
    torch.cuda.synchronize()
    time.sleep(0.08)
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[4]


def ceilings() -> dict[str, float]:
    """Read bandwidth and the rate of a large bfloat16 product, of this card."""
    x = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    us = graph_us(lambda *_: x.view(torch.int64).sum(), [(x, x)], 1)
    tflops = 2 * 8192**3 / graph_us(lambda *_: a @ a, [(a, a)], 5) / 1e6
    return {"read_tbps": x.numel() * 2 / us / 1e6, "bf16_tflops": tflops}


def measure(
    run: Run, case: Case, weights_of: WeightsOf, bytes_per_weight: float, launches: int
) -> dict[str, Any]:
    """Check and time one case."""
    tokens, kind = case
    rotations = ROTATIONS.get(tokens, 1)
    inputs = [
        (torch.randn(tokens, H, device="cuda").bfloat16(), routing(tokens, kind, seed))
        for seed in range(rotations)
    ]
    error = worst_error(run, *inputs[0], weights_of)
    us = graph_us(run, inputs, launches * rotations if tokens <= 64 else launches)
    experts = sum(len(ids.unique()) for _, ids in inputs) / len(inputs)
    size = experts * 3 * H * I * bytes_per_weight
    flops = 2 * tokens * K * 3 * H * I
    return {
        "tokens": tokens, "routing": kind, "us": round(us, 1), "error": error,
        "experts": experts, "tbps": size / us / 1e6, "tflops": flops / us / 1e6,
    }  # fmt: skip


def show(name: str, result: dict[str, Any], target: float | None) -> None:
    goal = f"{result['us'] / target:5.2f} of {target}" if target else ""
    print(
        f"{name:5} T={result['tokens']:<5}{result['routing']:8}{result['us']:9.1f} us "
        f"{result['tbps']:5.2f} TB/s {result['tflops']:6.1f} TFLOP/s error {result['error']:.1e} "
        f"{goal} {result.get('tiling', '')}",
        flush=True,
    )


def nvfp4(with_variants: bool, cases: list[Case]) -> list[dict[str, Any]]:
    weights = random_nvfp4()
    originals = [w.clone() for w in weights]
    torch.cuda.synchronize()
    start = time.perf_counter()
    experts = HopperNVFP4Experts(*weights)
    torch.cuda.synchronize()
    print(f"re-laid in {time.perf_counter() - start:.2f} s", flush=True)

    def weights_of(expert: int) -> tuple[Tensor, Tensor]:
        gate_up, gate_up_scales, gate_up_global, down, down_scales, down_global = originals
        w = dequantize(gate_up[expert], gate_up_scales[expert], torch.float64)
        w.view(2, I, H).mul_(gate_up_global[expert][:, None, None])
        return w, dequantize(down[expert], down_scales[expert], torch.float64) * down_global[expert]

    results = []
    for case in cases:
        tilings = variants_of(case[0]) if with_variants else [chosen(case[0])]
        for tiling in tilings:
            result = measure(partial(experts, tiling=tiling), case, weights_of, 0.5625, 2)
            result["tiling"] = short(tiling)
            show("nvfp4", result, TARGETS.get(case))
            results.append(result)
    return results


def bf16(cases: list[Case]) -> list[dict[str, Any]]:
    gate_up = torch.empty(E, 2 * I, H, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
    down = torch.empty(E, H, I, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
    experts = HopperBF16Experts(gate_up, down)

    def weights_of(expert: int) -> tuple[Tensor, Tensor]:
        return gate_up[expert].double(), down[expert].double()

    results = []
    for case in cases:
        result = measure(experts, case, weights_of, 2.0, 1)
        show("bf16", result, None)
        results.append(result)
    return results


def short(tiling: Tiling | WarpTiling | BF16Tiling) -> str:
    return ",".join(f"{key}={value}" for key, value in asdict(tiling).items()).replace(" ", "")


def compile_share(
    index: int, count: int, with_variants: bool, cases: list[Case], with_bf16: bool
) -> None:
    """Compile every count-th kernel into Triton's cache, on experts of the same widths."""
    tilings: list[Tiling | WarpTiling | BF16Tiling] = []
    for tokens, _ in cases:
        tilings += variants_of(tokens) if with_variants else [chosen(tokens)]
    if with_bf16:
        tilings += [tiling for _, tiling in BF16_TILINGS]
    x = torch.randn(1, H, device="cuda").bfloat16()
    ids = torch.arange(K, device="cuda")[None]
    for tiling in list(dict.fromkeys(tilings))[index::count]:
        if isinstance(tiling, BF16Tiling):
            zeros = torch.zeros(K, 2 * I, H, device="cuda", dtype=torch.bfloat16)
            HopperBF16Experts(zeros, zeros[:, :H].contiguous())(x, ids, tiling=tiling)
        else:
            codes = torch.zeros(K, 2 * I, H // 2, device="cuda", dtype=torch.uint8)
            scales = torch.zeros(K, 2 * I, H // 16, device="cuda", dtype=torch.uint8)
            scales = scales.view(torch.float8_e4m3fn)
            HopperNVFP4Experts(
                codes, scales, torch.ones(K, 2, device="cuda"),
                codes[:, :H].contiguous(), scales[:, :H].contiguous(), torch.ones(K, device="cuda"),
            )(x, ids, tiling=tiling)  # fmt: skip
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--skip-bf16", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--workers", type=int, default=10, help="processes that compile")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases = [case for t in args.tokens for case in CASES if case[0] == t] if args.tokens else CASES
    if args.compile is not None:
        compile_share(args.compile, args.workers, args.variants, cases, not args.skip_bf16)
        return
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.h200_experts", *sys.argv[1:], "--compile"]
    workers = [subprocess.Popen([*command, str(i)]) for i in range(args.workers)]
    codes = [worker.wait() for worker in workers]
    print(f"compiled in {time.perf_counter() - start:.1f} s, exit codes {codes}", flush=True)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ceilings": ceilings()}
    print(report, flush=True)
    report["nvfp4"] = nvfp4(args.variants, cases)
    torch.cuda.empty_cache()
    if not args.skip_bf16:
        report["bf16"] = bf16([case for case in cases if case[0] >= 16 and case[1] == "uniform"])
    print(report["ceilings"] | {"again": ceilings()})
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
