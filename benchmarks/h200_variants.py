"""Times the kernels' launch settings against each other, to choose the ones in the code.

python -m benchmarks.h200_variants --only boundary --output variants.json
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from benchmarks import h200
from benchmarks.h200 import BF16, DEVICE, F32, HEAD_DIM, HEADS, D, H, K, median_us, paged, randn
from torch import Tensor

from musespark.ops import (
    attention_decode,
    attention_prefill,
    attention_prefill_hopper,
    soft_cap,
)
from musespark.ops.expert_finalize import _finalize_kernel
from musespark.ops.residual_boundary import _boundary_kernel
from musespark.ops.router_gemm import _router_planes_kernel, split_weight

Variant = tuple[str, Callable[[], Any]]


def boundary(T: int) -> Iterator[Variant]:
    stream, branch = randn(T, D, dtype=F32), randn(T, D)
    alpha, beta, post, pre = (torch.rand(D, device=DEVICE) for _ in range(4))
    new_stream, normed = torch.empty_like(stream), torch.empty_like(branch)
    for warps, stages, programs, store in product(
        (8, 16, 32), (1, 2, 3, 4), (T, 132, 264), ("", ".cs")
    ):
        if (stages == 1) != (programs == T) or programs > T:
            continue

        def run(
            warps: int = warps, stages: int = stages, programs: int = programs, store: str = store
        ) -> None:
            _boundary_kernel[(programs,)](
                stream, branch, alpha, beta, post, pre, new_stream, normed, None, T, D, D,
                1e-8, 1e-5, HAS_POST_GAIN=True, HAS_PRE_NORM=True, HAS_WIDE_NORMED=False,
                BLOCK=D, STAGES=stages, STREAM_STORE=store, num_warps=warps,
            )  # fmt: skip

        yield f"warps {warps} stages {stages} programs {programs} store {store}", run


def finalize(T: int) -> Iterator[Variant]:
    rows, weights = randn(T * K, H), torch.rand(T, K, device=DEVICE)
    index = torch.randperm(T * K, device=DEVICE).view(T, K)
    gain, out = torch.rand(H, device=DEVICE), torch.empty(T, H, device=DEVICE, dtype=BF16)
    for warps, stages, programs, eviction in product(
        (4, 8, 16), (0, 2, 3, 4), (T, 132, 264), ("", "evict_first")
    ):
        if (stages == 0) != (programs == T) or programs > T:
            continue

        def run(
            warps: int = warps,
            stages: int = stages,
            programs: int = programs,
            eviction: str = eviction,
        ) -> None:
            _finalize_kernel[(programs,)](
                rows, weights, index, gain, out, T, H, H, 1e-8, TOP_K=K, BLOCK_K=8, BLOCK=H,
                STAGES=stages, EVICTION=eviction, num_warps=warps,
            )  # fmt: skip

        yield f"warps {warps} stages {stages} programs {programs} {eviction}", run


def router(T: int) -> Iterator[Variant]:
    x, planes = randn(T, D), split_weight(randn(h200.E, D, dtype=F32) / 90)
    for block, programs, stages in product((64, 128), (128, 256), (2, 3)):
        tiles = -(-h200.E // block), -(-T // block)
        parts = max(1, programs // (tiles[0] * tiles[1]))
        out = torch.empty((parts, T, h200.E), device=DEVICE, dtype=F32)

        def run(
            grid: tuple[int, int, int] = (*tiles, parts),
            out: Tensor = out,
            block: int = block,
            stages: int = stages,
        ) -> None:
            _router_planes_kernel[grid](
                x, planes, out, T, h200.E, D, D, D // grid[2], BLOCK=block, BLOCK_D=64,
                STAGES=stages, IN_FLOAT32=False, num_warps=block // 16,
            )  # fmt: skip

        yield f"block {block} parts {parts} stages {stages}", run


def decode(T: int) -> Iterator[Variant]:
    sequences, cache = paged(T, h200.CONTEXT, 1)
    query, on_device = randn(T, HEADS, HEAD_DIM), sequences.on_device
    assert on_device is not None
    for splits, block in product((2, 8, 16, 32, 64), (32, 64, 128)):

        def run(splits: int = splits, block: int = block) -> None:
            chosen = attention_decode._num_splits, attention_decode._BLOCK_S
            attention_decode._num_splits = lambda *_: splits
            attention_decode._BLOCK_S = block
            attention_decode.attention_decode_triton(
                query, cache.key, cache.value, sequences.block_table, on_device.key_start,
                on_device.seq_lens, 0.1,
            )  # fmt: skip
            attention_decode._num_splits, attention_decode._BLOCK_S = chosen

        yield f"splits {splits} keys {block}", run


def prefill(T: int) -> Iterator[Variant]:
    sequences, cache = paged(T, T, T)
    query, on_device = randn(T, HEADS, HEAD_DIM), sequences.on_device
    assert on_device is not None
    names = "_BLOCK_ROWS", "_BLOCK_S", "_WARPS", "_STAGES"
    for values in (
        (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 4, 2),
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 2),
        (256, 64, 8, 3), (256, 128, 8, 2), (256, 64, 8, 4), (128, 32, 4, 3),
    ):  # fmt: skip

        def run(values: tuple[int, ...] = values) -> None:
            chosen = [getattr(attention_prefill, name) for name in names]
            for name, value in zip(names, values, strict=True):
                setattr(attention_prefill, name, value)
            attention_prefill.attention_prefill_triton(
                query, cache.key, cache.value, sequences.block_table, on_device.query_start,
                on_device.key_start, on_device.seq_lens, 0.1,
            )  # fmt: skip
            for name, value in zip(names, chosen, strict=True):
                setattr(attention_prefill, name, value)

        yield "rows {} keys {} warps {} stages {}".format(*values), run

    def run_with_roles() -> None:
        attention_prefill_hopper.attention_prefill_hopper(
            query, cache.key, cache.value, sequences.block_table, on_device.query_start,
            on_device.key_start, on_device.seq_lens, 0.1,
        )  # fmt: skip

    yield "warps with roles", run_with_roles


def cap(T: int) -> Iterator[Variant]:
    x = randn(T, h200.V, dtype=F32)
    for block, warps in product((1024, 2048, 4096, 8192), (4, 8, 16)):

        def run(block: int = block, warps: int = warps) -> None:
            soft_cap._soft_cap_kernel[(-(-x.numel() // block),)](
                x, x.numel(), 0.5 / 20, 20.0, BLOCK=block, num_warps=warps
            )

        yield f"block {block} warps {warps}", run


KERNELS: dict[str, tuple[Callable[[int], Iterator[Variant]], tuple[int, ...]]] = {
    "boundary": (boundary, (1, 2048)),
    "finalize": (finalize, (64, 256, 2048)),
    "router": (router, (256, 1024, 4096)),
    "decode": (decode, (1, 16)),
    "prefill": (prefill, (4096,)),
    "soft_cap": (cap, (64,)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compile", help="only compile part I of N: I/N, for N processes at once")
    arguments = parser.parse_args()
    results = []
    share = [int(n) for n in arguments.compile.split("/")] if arguments.compile else None
    for name in arguments.only:
        variants, sizes = KERNELS[name]
        for T in sizes:
            timed = []
            for number, (label, run) in enumerate(variants(T)):
                try:
                    if share:
                        if number % share[1] == share[0]:
                            run()
                        continue
                    timed.append((median_us([run] * 8, repeats=5), label))
                except Exception as error:
                    print(f"{name:10} T={T:<5} {label}: {str(error)[:90]}", flush=True)
            for us, label in sorted(timed):
                results.append({"kernel": name, "tokens": T, "variant": label, "us": us})
            for us, label in sorted(timed)[:5]:
                print(f"{name:10} T={T:<5} {us:9.2f} us  {label}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
