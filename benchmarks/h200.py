"""Checks and times every operation, and whole decoder layers, at the released model's sizes.

    python -m benchmarks.h200 --output results.json            # all
    python -m benchmarks.h200 --only boundary finalize         # some operations
    python -m benchmarks.h200 --layers nvfp4                   # which layers; bare: no layer
    python -m benchmarks.h200 --tokens 1 16                    # at some sizes
    python -m benchmarks.h200 --slice 8                        # and decode with so many layers
    python -m benchmarks.h200 --warm-up 0/4                    # compile a quarter of the kernels

Each time is the median over replays of a CUDA graph that calls the operation several times, on
inputs that change from call to call where they would otherwise stay in the cache. `floor` is the
time to move the bytes that must move, at the read bandwidth measured in the same run, or to do the
products at the measured rate, whichever is longer. A check compares with the PyTorch reference in
float64 and prints ||out - ref|| / ||ref||.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from musespark.config.model import DecoderConfig
from musespark.config.quantization import QuantizationConfig
from musespark.config.sampling import SamplingParams
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.executor import InProcessExecutor
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.runner import ModelRunner
from musespark.model.decoder import Decoder
from musespark.model.kv_cache import KVCacheSpec, LayerCache
from musespark.model.layer import DecoderLayer
from musespark.moe.block import CompressedMoE
from musespark.ops.attention_decode import attention_decode_triton
from musespark.ops.attention_paged import PagedSequences, sequences_on_device
from musespark.ops.attention_prefill import attention_prefill_reference
from musespark.ops.attention_prefill_hopper import prefill_kernel
from musespark.ops.expert_finalize import expert_finalize_reference, expert_finalize_triton
from musespark.ops.expert_permute import group_by_expert_triton
from musespark.ops.graph_recorder import padded_size
from musespark.ops.linear import linear
from musespark.ops.output_gate import output_gate_reference, output_gate_triton
from musespark.ops.qk_norm_rope import qk_norm_rope_write_triton
from musespark.ops.residual_boundary import (
    blend_triton,
    residual_boundary_reference,
    residual_boundary_triton,
)
from musespark.ops.rms_norm import rms_norm_triton
from musespark.ops.rotary import rotary_angles
from musespark.ops.route_topk import route_topk_triton, route_triton
from musespark.ops.router_gemm import router_gemm_triton, split_weight
from musespark.ops.silu_mul import silu_mul_triton
from musespark.ops.soft_cap import soft_cap_triton
from musespark.parallel.layout import ONE_PROCESS, Layout
from musespark.parallel.placement import StepPlaces

D, HEADS, KV_HEADS, HEAD_DIM = 8192, 128, 16, 64
E, K, H, INNER, V, WINDOW = 256, 8, 4096, 4096, 202048, 2048
SIZES = (1, 4, 16, 64, 256, 1024, 4096)
BLOCK_SIZE, CONTEXT = 16, 4096
L2_BYTES = 60 * 2**20
GATE_OF_A_TENTH = -0.66  # sigmoid(gate / 0.3)
DEVICE = torch.device("cuda")
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """An operation at one size."""

    name: str
    tokens: int
    num_bytes: float
    """The fewest bytes that must move."""
    flops: float
    make: Callable[[], Callable[[], Any]]
    """Draws inputs and returns the call on them."""
    check: Callable[[], float] | None = None
    """Relative error against the reference."""


@dataclass(frozen=True)
class Result:
    name: str
    tokens: int
    us: float
    num_bytes: float
    flops: float
    floor_us: float
    ratio: float
    error: float | None


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def widened(args: tuple[Any, ...]) -> Any:
    """The same arguments, real tensors in float64."""
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def median_us(calls: list[Callable[[], Any]], repeats: int = 9) -> float:
    """Median time of one call, in a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return statistics.median(times)


def time_case(case: Case, budget_us: float = 8_000) -> float:
    """Median over calls on enough inputs to overflow the cache, in a graph of some twenty."""
    copies = max(1, min(16, int(2 * L2_BYTES // max(case.num_bytes, 1)) + 1))
    made = [case.make() for _ in range(copies)]
    once = median_us(made, repeats=1)
    total = max(len(made), min(20, int(budget_us // max(once, 1))))
    return median_us([made[i % copies] for i in range(total)])


def measure_ceilings() -> tuple[float, float]:
    """(bytes per us, FLOP per us): a large read, and a large matrix product."""
    source = randn(2**31 // 2)
    sums = torch.empty((), device=DEVICE, dtype=F32)
    reading = 2**31 / median_us([lambda: torch.amax(source, 0, out=sums.to(BF16))] * 3)
    target = torch.empty_like(source)
    copying = 2 * 2**31 / median_us([lambda: torch.neg(source, out=target)] * 3)
    left, right = randn(8192, 8192), randn(8192, 8192)
    rate = 2 * 8192**3 / median_us([lambda: left @ right] * 3)
    print(f"read {reading / 1e6:.2f}, copy {copying / 1e6:.2f} TB/s, bf16 {rate / 1e6:.0f} TFLOP/s")
    return max(reading, copying), rate


def row_cases(T: int) -> Iterator[Case]:
    """Everything that works on rows."""
    alpha, beta, post, pre = (torch.rand(D, device=DEVICE) + 0.5 for _ in range(4))

    def boundary_inputs() -> tuple[Any, ...]:
        return randn(T, D, dtype=F32), randn(T, D), alpha, beta, post, 1e-8, pre, 1e-5

    def check_boundary() -> float:
        args = boundary_inputs()
        exact = residual_boundary_reference(*widened(args))
        normed, stream = residual_boundary_triton(*args)
        assert relative_error(stream, exact[1]) < 1e-6
        return relative_error(normed, exact[0])

    def make(op: Callable[..., Any], inputs: Callable[[], tuple[Any, ...]]) -> Callable[[], Any]:
        args = inputs()
        return lambda: op(*args)

    vectors = 4 * D * 4
    yield Case(
        "boundary", T, T * D * 12 + vectors, 0,
        lambda: make(residual_boundary_triton, boundary_inputs), check_boundary,
    )  # fmt: skip
    yield Case(
        "blend", T, T * D * 10 + vectors * 3 / 4, 0,
        lambda: make(blend_triton, lambda: boundary_inputs()[:6]),
    )  # fmt: skip
    gain = torch.rand(H, device=DEVICE) + 0.5
    yield Case(
        "rms_norm", T, T * H * 4 + H * 4, 0,
        lambda: make(rms_norm_triton, lambda: (randn(T, H), gain, 1e-5)),
    )  # fmt: skip

    def finalize_inputs() -> tuple[Any, ...]:
        index = torch.randperm(T * K, device=DEVICE).view(T, K)
        return randn(T * K, H), torch.rand(T, K, device=DEVICE), index, gain, 1e-8

    def check_finalize() -> float:
        args = finalize_inputs()
        exact = expert_finalize_reference(*widened(args))
        return relative_error(expert_finalize_triton(*args), exact)

    yield Case(
        "finalize", T, T * (K + 1) * H * 2 + T * K * 12 + H * 4, 0,
        lambda: make(expert_finalize_triton, finalize_inputs), check_finalize,
    )  # fmt: skip
    yield Case(
        "silu_mul", T, T * 3 * INNER * 2, 0,
        lambda: make(silu_mul_triton, lambda: (randn(T, 2 * INNER),)),
    )  # fmt: skip
    if T <= 256:
        yield Case(
            "soft_cap", T, T * V * 8, 0,
            lambda: make(soft_cap_triton, lambda: (randn(T, V, dtype=F32), 0.5, 20.0)),
        )  # fmt: skip


def routing_cases(T: int) -> Iterator[Case]:
    """The router's product, choice and sort."""
    bias = 0.1 * torch.randn(E, device=DEVICE)

    def router_inputs() -> tuple[Tensor, Tensor, Tensor]:
        weight = randn(E, D, dtype=F32) / 90
        return randn(T, D), weight, split_weight(weight)

    def check_product() -> float:
        x, weight, planes = router_inputs()
        exact = x.double() @ weight.double().T
        return relative_error(router_gemm_triton(x, weight, planes).sum(0), exact)

    def make_product() -> Callable[[], Any]:
        args = router_inputs()
        return lambda: router_gemm_triton(*args)

    def make_cublas() -> Callable[[], Any]:
        x, weight, _ = router_inputs()
        return lambda: x.to(F32) @ weight.T

    def make_topk() -> Callable[[], Any]:
        logits = randn(1, T, E, dtype=F32)
        return lambda: route_topk_triton(logits, bias, K, 1.0)

    def make_route() -> Callable[[], Any]:
        x, weight, planes = router_inputs()
        return lambda: route_triton(x, weight, bias, K, 1.0, planes=planes)

    def make_sort() -> Callable[[], Any]:
        ids = torch.rand(T, E, device=DEVICE).topk(K, dim=1).indices
        return lambda: group_by_expert_triton(ids, E)

    weight_bytes = E * D * 4
    product = T * D * 2 + weight_bytes + T * E * 4
    flops = 3 * 2 * T * D * E
    yield Case("router_gemm", T, product, flops, make_product, check_product)
    yield Case("router_cublas", T, product, flops, make_cublas)
    yield Case("topk", T, T * (E * 4 + K * 12) + E * 4, 0, make_topk)
    yield Case("route", T, T * D * 2 + weight_bytes + T * K * 12, flops, make_route)
    yield Case("sort", T, T * K * 24 + E * 4, 0, make_sort)


def paged(
    T: int, context: int, queries: int, kv_heads: int = KV_HEADS
) -> tuple[PagedSequences, LayerCache]:
    """T // queries sequences of `context` keys, in scattered blocks of one layer's cache."""
    count = T // queries
    blocks = -(-context // BLOCK_SIZE)
    shape = (count * blocks, BLOCK_SIZE, kv_heads, HEAD_DIM)
    cache = LayerCache(randn(*shape), randn(*shape))
    table = torch.randperm(count * blocks, device=DEVICE).view(count, blocks)
    starts, lengths = tuple(range(0, T + 1, queries)), (context,) * count
    on_device = sequences_on_device(starts, lengths, (0,) * count, DEVICE)
    position = torch.arange(context - queries, context, device=DEVICE)
    slots = table[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    sequences = PagedSequences(
        num_decodes=count if queries == 1 else 0,
        query_start=starts,
        seq_lens=lengths,
        key_start=(0,) * count,
        block_table=table.to(torch.int32),
        decode_table=table[:0],
        decode_mask=table[:0],
        slot_mapping=slots.flatten(),
        on_device=on_device,
    )
    return sequences, cache


def head_cases(T: int) -> Iterator[Case]:
    """QK-norm with RoPE and cache insert, the output gate, and attention."""
    width = (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM
    angles = rotary_angles(torch.arange(T, device=DEVICE), 5e5, HEAD_DIM)

    def make_insert() -> Callable[[], Any]:
        qkvg = randn(T, width).unflatten(1, (-1, HEAD_DIM))
        shape = (-(-T // BLOCK_SIZE) + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        keys, values = randn(*shape), randn(*shape)
        slots = torch.randperm(T, device=DEVICE)
        qkv = qkvg[:, : HEADS + 2 * KV_HEADS]
        return lambda: qk_norm_rope_write_triton(qkv, HEADS, 1e-5, angles, keys, values, slots)

    def gate_inputs() -> tuple[Tensor, Tensor]:
        qkvg = randn(T, width).unflatten(1, (-1, HEAD_DIM))
        return randn(T, HEADS, HEAD_DIM), qkvg[:, HEADS + 2 * KV_HEADS :]

    def make_gate() -> Callable[[], Any]:
        attended, gate = gate_inputs()
        return lambda: output_gate_triton(attended, gate, 1e-5)

    def check_gate() -> float:
        attended, gate = gate_inputs()
        exact = output_gate_reference(attended.double(), gate.double(), 1e-5)
        return relative_error(output_gate_triton(attended, gate, 1e-5), exact)

    heads = HEADS * HEAD_DIM
    yield Case("qk_rope_kv", T, T * 2 * (2 * heads + 4 * KV_HEADS * HEAD_DIM), 0, make_insert)
    yield Case("output_gate", T, T * heads * 6, 0, make_gate, check_gate)
    yield from attention_cases(T)


def attention_cases(T: int) -> Iterator[Case]:
    """Decoding T sequences, and reading a prompt of T tokens, full and sliding."""
    key_bytes = 4 * KV_HEADS * HEAD_DIM
    for name, window in (("full", None), ("sliding", WINDOW)):
        if T <= 256:
            keys = min(CONTEXT, window or CONTEXT)

            def make_decode(window: int | None = window) -> Callable[[], Any]:
                sequences, cache = paged(T, CONTEXT, 1)
                query, on_device = randn(T, HEADS, HEAD_DIM), sequences.on_device
                assert on_device is not None
                return lambda: attention_decode_triton(
                    query, cache.key, cache.value, sequences.block_table,
                    on_device.key_start, on_device.seq_lens, 0.1, window,
                )  # fmt: skip

            yield Case(
                f"decode_{name}", T, T * (keys * key_bytes + 4 * HEADS * HEAD_DIM),
                4 * T * keys * HEADS * HEAD_DIM, make_decode,
            )  # fmt: skip
        if T >= 256:
            reach = min(T, window or T)
            pairs = T * reach - reach * (reach - 1) / 2

            def prefill(window: int | None) -> tuple[Callable[[], Tensor], Tensor, LayerCache]:
                sequences, cache = paged(T, T, T)
                query, on_device = randn(T, HEADS, HEAD_DIM), sequences.on_device
                assert on_device is not None
                table = sequences.block_table
                cache_in_order = LayerCache(
                    cache.key[table[0]].flatten(0, 1), cache.value[table[0]].flatten(0, 1)
                )
                return (
                    lambda: prefill_kernel(query, cache.key)(
                        query, cache.key, cache.value, table, on_device.query_start,
                        on_device.key_start, on_device.seq_lens, 0.1, window,
                    ),
                    query, cache_in_order,
                )  # fmt: skip

            def make(window: int | None = window) -> Callable[[], Tensor]:
                return prefill(window)[0]

            def check(window: int | None = window) -> float:
                call, query, cache = prefill(window)
                kept = slice(max(0, T - 64), T)
                exact = attention_prefill_reference(
                    query[kept, :16].double(), cache.key[:, :2].double(),
                    cache.value[:, :2].double(), 0.1, window,
                )  # fmt: skip
                return relative_error(call()[kept, :16], exact)

            yield Case(
                f"prefill_{name}", T, T * (key_bytes + 4 * HEADS * HEAD_DIM),
                4 * pairs * HEADS * HEAD_DIM, make, check,
            )  # fmt: skip


def product_cases(T: int) -> Iterator[Case]:
    """The plain products: few tokens by our kernel, more by the matrix library."""
    shapes = {
        "qkvg_proj": (D, (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM),
        "o_proj": (HEADS * HEAD_DIM, D),
        "pooler": (D, H),
        "unpooler": (H, D),
    }
    for name, (inner, outer) in shapes.items():

        def make(inner: int = inner, outer: int = outer) -> Callable[[], Any]:
            x, weight = randn(T, inner), randn(outer, inner)
            multiply = linear(weight)
            return lambda: multiply(x)

        moved = 2 * (inner * outer + T * (inner + outer))
        yield Case(name, T, moved, 2 * T * inner * outer, make)


GROUPS = {
    "rows": row_cases,
    "routing": routing_cases,
    "heads": head_cases,
    "products": product_cases,
}


def released_config(quantized: bool, num_layers: int = 1) -> DecoderConfig:
    """The first layers of the released model; without the weights' files, RoPE on sliding ones."""
    kinds = ["full" if i % 4 == 1 else "sliding" for i in range(num_layers)]
    config = DecoderConfig.from_dict(
        {
            "model_type": "muse_spark_text", "vocab_size": V, "hidden_size": D,
            "intermediate_size": 16384, "num_hidden_layers": num_layers,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "moe_hidden_size": H, "moe_intermediate_size": INNER, "num_local_experts": E,
            "num_experts_per_tok": K, "sliding_window": WINDOW,
            "max_position_embeddings": 2**20, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8,
            "qk_scale_factor": 5.4730064863875, "output_multiplier": 0.5,
            "final_logit_softcapping": 20.0, "residual_gate_temperature": 0.3,
            "routed_scaling_factor": 1.0, "bos_token_id": 0, "eos_token_id": None,
            "layer_types": [f"{kind}_attention" for kind in kinds],
            "mlp_layer_types": ["sparse"] * num_layers,
            "layer_rope_theta": [0.0 if kind == "full" else 500_000.0 for kind in kinds],
        },
        where="benchmark",
    )  # fmt: skip
    return replace(config, quantization=QuantizationConfig()) if quantized else config


def draw(name: str, weight: Tensor) -> None:
    """Fill a weight with random numbers of a fitting size."""
    if weight.dtype == torch.uint8:
        weight.random_(0, 256)
    elif weight.dtype == torch.float8_e4m3fn:
        weight.view(torch.uint8).random_(40, 60)
    elif name.endswith("scale_2"):
        weight.fill_(0.02)
    elif name.startswith("embed_tokens"):
        weight.normal_()
    elif name.endswith("residual_gate.gate"):
        # A branch changes the stream by a tenth. With more of it, a prompt's average over its keys,
        # which is alike for all tokens, would send all of them to the same experts.
        weight.fill_(GATE_OF_A_TENTH)
    elif name.endswith("e_score_correction_bias"):
        weight.zero_()
    else:
        weight.normal_(std=1 / 64 if weight.dim() > 1 else 0.1)


def fill_randomly(model: torch.nn.Module) -> None:
    """Random weights, then all that follows loading."""
    for name, weight in model.named_parameters():
        draw(name, weight.data)
    for method in ("finish_loading", "pack"):
        for module in model.modules():
            kind: Any = type(module)
            if module is not model and hasattr(kind, method):
                getattr(kind, method)(module)


def layer_step(
    T: int, context: int, queries: int = 1, layout: Layout = ONE_PROCESS
) -> Callable[[DecoderLayer], Tensor]:
    """Draw a step's inputs; what it returns runs a layer with its boundaries on them.

    Args:
        T: tokens.
        context: keys of each sequence, the new ones included.
        queries: new tokens of each sequence.
        layout: of the layer; this rank gets the rows that belong to it.
    """
    sequences, cache = paged(T, context, queries, kv_heads=KV_HEADS // layout.tensor.size)
    place = StepPlaces.of(layout, T, None, DEVICE).cut
    stream, normed = place.shard(randn(T, D, dtype=F32)), place.shard(randn(T, D))
    positions = torch.arange(context - queries, context, device=DEVICE).repeat(T // queries)
    angles = rotary_angles(positions, 5e5, HEAD_DIM)

    def run(layer: DecoderLayer) -> Tensor:
        residual = layer(normed, stream, sequences, cache, angles, place, place)
        return residual.boundary(layer.input_layernorm)[1]

    return run


def decode_or_prompt(T: int) -> tuple[int, int]:
    """(context, queries): T sequences that decode, or one prompt of T tokens."""
    return (CONTEXT, 1) if T <= 256 else (T, T)


def time_layers(kind: str, sizes: list[int], bandwidth: float, rate: float) -> list[Result]:
    """A whole decoder layer with its boundaries: T sequences decode, or one prompt of T tokens."""
    layer = DecoderLayer(released_config(kind == "nvfp4"), 0, dtype=BF16, device=DEVICE)
    fill_randomly(layer)
    expert_bytes = 3 * H * INNER * (9 / 16 if kind == "nvfp4" else 2)
    other_bytes = 2 * D * ((2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM + 2 * H)
    results = []
    for T in sizes:
        context, queries = decode_or_prompt(T)
        run = partial(layer_step(T, context, queries), layer)
        chosen: list[Tensor] = []
        gate = cast("CompressedMoE", layer.mlp).gate
        hook = gate.register_forward_hook(lambda *args: chosen.append(args[2].ids))  # noqa: B023
        with torch.inference_mode():
            assert bool(run().isfinite().all())
            hook.remove()
            # In a graph of several, as in a model; each reads more than the cache holds.
            us = median_us([run] * (4 if queries == 1 else 1))
        busy = chosen[0].unique().numel()
        keys = min(context, WINDOW) if queries == 1 else T
        num_bytes = busy * expert_bytes + other_bytes + E * D * 4 + T // queries * keys * 4096
        flops = 2 * T * (other_bytes / 2 + K * 3 * H * INNER)
        floor = max(num_bytes / bandwidth, flops / rate)
        results.append(
            Result(f"layer_{kind}", T, us, num_bytes, flops, floor, us / floor, error=None)
        )
        print_result(results[-1])
    return results


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding with the first layers of the model, NVFP4 experts and random weights."""

    num_layers: int
    num_sequences: int
    tokens_per_second: float
    step_us: float
    graph_us: float
    """Of these steps' graphs."""
    parts_us: float
    """The layers, each timed by itself, and the logits, added up."""
    share_off_gpu: float
    """Of the step's time, outside of its graph."""


def time_decoding(num_layers: int, num_steps: int = 40) -> list[Decoding]:
    """Batches of several sizes through the engine, after prompts of 64 tokens."""
    decoder = Decoder(released_config(True, num_layers), dtype=BF16, device=DEVICE)
    fill_randomly(decoder)
    results = []
    for count in (1, 16, 64):
        blocks = count * (64 + num_steps + 40) // BLOCK_SIZE + count
        runner = ModelRunner(decoder, KVCacheSpec(BLOCK_SIZE, blocks, blocks))
        layout = CacheLayout(BLOCK_SIZE, blocks, blocks, WINDOW)
        limits = EngineLimits(V, 1024, count, 64 * count, frozenset(), prefix_caching=False)
        executor = InProcessExecutor(runner, layout, count, with_masks=False, runs_ahead=True)
        engine = Engine(executor, layout, limits)
        params = SamplingParams(temperature=0, max_tokens=num_steps + 20)
        for number in range(count):
            engine.add_request([(7 * number + i) % V for i in range(64)], params)
        for _ in range(12):
            engine.step()
        assert runner._graphs is not None
        graphs, kind = runner._graphs._graphs, (padded_size(count), True)
        timed = TimedReplay(graphs[kind].replay)
        graphs[kind] = replace(graphs[kind], replay=timed)
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        step_us = (time.perf_counter() - started) / num_steps * 1e6
        graph_us = timed.mean_us()
        parts_us = time_parts(decoder, count)
        share = 1 - graph_us / step_us
        results.append(
            Decoding(num_layers, count, count / step_us * 1e6, step_us, graph_us, parts_us, share)
        )
        print(results[-1], flush=True)
    return results


class TimedReplay:
    """A graph's replay that notes on the device when it begins and ends."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self._replay = replay
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self) -> None:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._replay()
        stop.record()
        self._events.append((start, stop))

    def mean_us(self) -> float:
        """Of all replays so far."""
        torch.cuda.synchronize()
        return statistics.mean(start.elapsed_time(stop) for start, stop in self._events) * 1000


@torch.inference_mode()
def time_parts(decoder: Decoder, count: int) -> float:
    """Time in us of all layers and the logits, none of which waits for another's result."""
    run, normed = layer_step(count, 128), randn(count, D)
    layers = [cast("DecoderLayer", layer) for layer in decoder.layers]
    layers_us = median_us([partial(run, layer) for layer in layers]) * len(layers)
    return layers_us + median_us([lambda: decoder._logits(normed)])


def print_result(r: Result) -> None:
    error = "" if r.error is None else f"{r.error:.1e}"
    print(
        f"{r.name:16}{r.tokens:6}{r.us:10.2f} us{r.num_bytes / 1e6:11.2f} MB"
        f"{r.num_bytes / r.us / 1e6:7.2f} TB/s{r.floor_us:10.2f}{r.ratio:7.2f}  {error}",
        flush=True,
    )


def all_cases(only: list[str] | None, sizes: list[int]) -> Iterator[Case]:
    """Every operation at every size, 2048 tokens among them where all sizes are asked for."""
    for cases in GROUPS.values():
        for T in sorted({*sizes, 2048} if sizes == list(SIZES) else sizes):
            yield from (case for case in cases(T) if not only or case.name in only)


def warm_up(cases: Iterator[Case], index: int, count: int) -> None:
    """Run every count-th case once, which leaves its kernels in Triton's cache."""
    for number, case in enumerate(cases):
        if number % count == index:
            case.make()()


def run_cases(cases: Iterator[Case], bandwidth: float, rate: float) -> list[Result]:
    results = []
    for case in cases:
        error = case.check() if case.check else None
        us = time_case(case)
        floor = max(case.num_bytes / bandwidth, case.flops / rate)
        results.append(
            Result(
                name=case.name,
                tokens=case.tokens,
                us=us,
                num_bytes=case.num_bytes,
                flops=case.flops,
                floor_us=floor,
                ratio=us / floor,
                error=error,
            )
        )
        gc.collect()
    for result in sorted(results, key=lambda r: r.name):
        print_result(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="write the results here, as JSON")
    parser.add_argument("--only", nargs="*", help="names of operations")
    kinds = ["nvfp4", "bf16"]
    parser.add_argument("--layers", nargs="*", choices=kinds, default=kinds)
    parser.add_argument("--tokens", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--slice", type=int, help="decode with so many layers")
    parser.add_argument("--warm-up", help="only compile part I of N: I/N, for processes at once")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.warm_up:
        index, count = (int(n) for n in arguments.warm_up.split("/"))
        warm_up(all_cases(arguments.only, arguments.tokens), index, count)
        return
    bandwidth, rate = measure_ceilings()
    print("name                 T      time          bytes     rate      floor  ratio  error")
    results = run_cases(all_cases(arguments.only, arguments.tokens), bandwidth, rate)
    for kind in arguments.layers:
        gc.collect()
        torch.cuda.empty_cache()
        results += time_layers(kind, arguments.tokens, bandwidth, rate)
    gc.collect()
    torch.cuda.empty_cache()
    decoding = time_decoding(arguments.slice) if arguments.slice else []
    if arguments.output:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        report = {
            "commit": commit,
            "command": sys.argv,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "bytes_per_us": bandwidth,
            "flop_per_us": rate,
            "results": [asdict(result) for result in results],
            "decoding": [asdict(result) for result in decoding],
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
