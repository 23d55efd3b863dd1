"""Times the parallel layouts on the GPUs of one machine; tests/gpu/test_layouts.py checks them.

    python -m benchmarks.h200_parallel --output results.json            # all GPUs there are
    python -m benchmarks.h200_parallel --gpus 2 --parts layers

- collectives: what ranks exchange at the released model's sizes, beside the time that NVLink needs
  for the bytes that one rank sends; a boundary after a sum and with the sum inside; the pooler
  whole and in blocks of columns.
- layers: one decoder layer of the released model with its boundaries; T sequences that decode, or
  one prompt of T tokens. `efficiency` is one GPU's time over the ranks' number times theirs: what
  one GPU computes, by what all of them together could have computed meanwhile.

Steps that no host waits in are timed as CUDA graphs, all-to-all layouts as they run. Times are
medians; of the ranks the slowest counts.
"""

import argparse
import gc
import json
import os
import socket
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.h200 import (
    BF16,
    DEVICE,
    F32,
    D,
    H,
    K,
    V,
    decode_or_prompt,
    fill_randomly,
    layer_step,
    median_us,
    randn,
    released_config,
)
from torch.multiprocessing.spawn import spawn

from musespark.config.parallel import Parallelism
from musespark.model.layer import DecoderLayer
from musespark.modules.rank_sums import connect_rank_sums
from musespark.moe.router import Router
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.linear import linear
from musespark.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    gather_columns,
    reduce_scatter,
)
from musespark.parallel.layout import Layout
from musespark.parallel.mesh import build_mesh

LINK_BYTES_PER_US = 450e3  # NVLink 4, one direction
SIZES = (1, 2, 4, 16, 64, 128, 256, 512, 1024, 4096)
FEW_TOKENS = 256  # up to so many are summed inside of kernels

UNFUSED = {"fuse_all_reduce": False}
EXPERTS = {"expert_parallel": True}
TRAVEL = {**EXPERTS, "moe_backend": "all_to_all"}


def layouts(world: int) -> dict[str, dict[str, Any]]:
    """The ways to spread a layer over `world` GPUs."""
    tp = {"tensor_parallel_size": world}
    found: dict[str, dict[str, Any]] = {
        f"tp{world}": tp,
        f"tp{world} ep{world}": {**tp, **EXPERTS},
        f"sp{world}": {**tp, **TRAVEL, "sequence_parallel": True},
        f"dp{world} ep{world}": {"data_parallel_size": world, **TRAVEL},
        f"tp{world} unfused": {**tp, **UNFUSED},
        f"tp{world} ep{world} unfused": {**tp, **EXPERTS, **UNFUSED},
    }
    if world in (4, 8):
        found["hybrid"] = {**found[f"sp{world}"], "hybrid_token_threshold": 256}
    return found


@dataclass(frozen=True)
class Timed:
    what: str
    layout: str
    tokens: int
    us: float
    floor_us: float | None = None
    efficiency: float | None = None


@cache
def layout_of(rank: int, settings: tuple[tuple[str, Any], ...]) -> Layout:
    """The settings, and this process's place; groups are made once."""
    parallelism = Parallelism(**dict(settings))
    mesh = build_mesh(parallelism, 0 if parallelism.world_size == 1 else rank)
    sums = connect_rank_sums(
        mesh.tensor, max(D, K * H), dtype=BF16, device=DEVICE, wanted=parallelism.fuse_all_reduce
    )
    return Layout(parallelism, mesh, sums)


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    everybody = torch.tensor([value], device=DEVICE, dtype=torch.float64)
    dist.all_reduce(everybody, op=dist.ReduceOp.MAX)
    return float(everybody)


def time_eagerly(call: Callable[[], Any], repeats: int = 9, calls: int = 4) -> float:
    """Median time of one call, launched by the host."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return statistics.median(times)


def time_collectives(world: int, rank: int) -> Iterator[Timed]:
    """Each alone, in a graph of twenty."""
    layout = layout_of(rank, (("tensor_parallel_size", world),))
    axis, sums, kernels = layout.tensor, layout.sums, choose_kernels(DEVICE, BF16)
    share = (world - 1) / world
    pooler = randn(H, D)
    multiply, multiply_block = linear(pooler), linear(pooler[: H // world].contiguous())
    vectors = [torch.rand(D, device=DEVICE) + 0.5 for _ in range(4)]

    def cases(T: int) -> Iterator[tuple[str, Callable[[], Any], float | None]]:
        branch, rows = randn(T, D), randn(T * K, H)
        yield "all-reduce [T, D]", lambda: all_reduce(branch, axis), 2 * share * T * D * 2
        yield "all-reduce [T, H]", lambda: all_reduce(rows[:T], axis), 2 * share * T * H * 2
        yield "all-reduce [T K, H]", lambda: all_reduce(rows, axis), 2 * share * T * K * H * 2
        block = randn(T, D // world)
        yield "gather columns [T, D]", lambda: gather_columns(block, axis), share * T * D * 2
        vocabulary = randn(min(T, 64), V // world, dtype=F32)
        name = "gather logits [min(T, 64), V]"
        yield name, lambda: gather_columns(vocabulary, axis), share * vocabulary.numel() * world * 4
        x = randn(T, D)
        yield "pooler, whole", lambda: multiply(x), None
        yield "pooler, in blocks", lambda: gather_columns(multiply_block(x), axis), None
        if sums is not None and sums.max_tokens >= T:
            stream, (alpha, beta, post, pre) = randn(T, D, dtype=F32), vectors
            rest = (alpha, beta, post, 1e-8, pre, 1e-5)
            plain, fused = kernels.residual_boundary, sums.boundary
            yield "sum, then boundary", lambda: plain(stream, all_reduce(branch, axis), *rest), None
            yield "sum in boundary", lambda: fused(stream, branch, *rest), None
        if world <= T:
            local = randn(T // world, D)
            yield "all-gather [T, D]", lambda: all_gather(local, axis), share * T * D * 2
            yield "reduce-scatter [T, D]", lambda: reduce_scatter(branch, axis), share * T * D * 2
            counts = [T // world] * world
            sent = share * T * H * 2
            exchanged = rows[: T // world * world]
            yield "all-to-all [T, H]", lambda: all_to_all(exchanged, counts, counts, axis), sent

    for T in SIZES:
        for name, call, num_bytes in cases(T):
            us = slowest(median_us([call] * 20))
            floor = None if num_bytes is None else num_bytes / LINK_BYTES_PER_US
            yield Timed(name, f"{world} GPUs", T, us, floor)


def time_layers(world: int, rank: int, kind: str) -> Iterator[Timed]:
    """One layer in every layout, and on one GPU."""
    alone: dict[int, float] = {}
    for name, settings in {"one GPU": {}, **layouts(world)}.items():
        layout = layout_of(rank, tuple(settings.items()))
        parallelism, is_one = layout.parallelism, layout.parallelism.world_size == 1
        gc.collect()
        torch.cuda.empty_cache()
        config = released_config(kind == "nvfp4")
        layer = DecoderLayer(config, 0, dtype=BF16, device=DEVICE, layout=layout)
        fill_randomly(layer)
        for module in layer.modules():
            if isinstance(module, Router):  # alike on all ranks
                dist.broadcast(module.weight.data, 0)
                dist.broadcast(module.e_score_correction_bias.data, 0)
                module.pack()
        for T in SIZES:
            # Replicas have requests of their own: so many tokens are all of theirs together.
            here = T // parallelism.data_parallel_size
            if here == 0 or ("unfused" in name and here > FEW_TOKENS):
                continue
            us = slowest(time_layer(layer, layout, here))
            if is_one:
                alone[T] = us
            efficiency = None if is_one else alone[T] / us / world
            yield Timed(f"layer {kind}", name, T, us, efficiency=efficiency)


def time_layer(layer: DecoderLayer, layout: Layout, T: int) -> float:
    """Microseconds of the layer, its collectives and its boundaries, on this rank."""
    torch.manual_seed(T)  # alike on all ranks
    run = partial(layer_step(T, *decode_or_prompt(T), layout), layer)
    waits = layout.cuts(T) or any(getattr(m, "waits_for_device", False) for m in layer.modules())
    with torch.inference_mode():
        assert bool(run().isfinite().all())
        return time_eagerly(run) if waits else median_us([run] * 3)


def work(rank: int, world: int, port: int, arguments: Any) -> None:
    """One process, on one GPU."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {"collectives": [], "layers": []}
    runs: dict[str, list[Iterator[Any]]] = {
        "collectives": [time_collectives(world, rank)],
        "layers": [time_layers(world, rank, kind) for kind in arguments.layers],
    }
    for part in arguments.parts:
        for results in runs[part]:
            for result in results:
                found[part].append(asdict(result))
                if rank == 0:
                    print(result, flush=True)
                    if arguments.output:
                        arguments.output.write_text(json.dumps(report(world, found), indent=1))
    dist.barrier()
    dist.destroy_process_group()


def report(world: int, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "gpus": world,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parts = ["collectives", "layers"]
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--layers", nargs="*", default=["nvfp4"], choices=["nvfp4", "bf16"])
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    arguments = parser.parse_args()
    # Processes that share one host must not multiply threads by cores.
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawn(work, (arguments.gpus, port, arguments), nprocs=arguments.gpus)


if __name__ == "__main__":
    main()
