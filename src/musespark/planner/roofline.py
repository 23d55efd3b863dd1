"""Seconds of one step, by what they are spent on: a sum of floors, corrected where measured.

Every product takes the longer of reading its bytes and doing its operations, at the rates that
programs reach on the device; NVFP4 experts are slowed by what was measured on an H200. Collectives
are not overlapped with anything, and the pipeline's stages work one after the other.
"""

import bisect
import math
from collections import defaultdict
from dataclasses import dataclass

from musespark.config.model import DecoderConfig
from musespark.planner.devices import Device
from musespark.planner.layout import Layout, Stage
from musespark.planner.memory import Workload, expert_bytes, stage_weights

WEIGHTS, CACHE = "reading weights", "reading the KV cache"
PRODUCTS, SMALL = "products", "small operations"
COLLECTIVES, HOST = "collectives", "waiting for the host"

EXPERTS_MEASURED: dict[int, float] = {
    1: 68.5, 4: 217.6, 16: 666.0, 64: 1482.8, 256: 1763.2, 1024: 2398.0, 4096: 5117.1,
}  # fmt: skip
"""Tokens -> microseconds of one layer's NVFP4 experts (256 of 4096 x 4096, top 8, uniform routing)
on one H200 (docs/nvfp4-hopper.md, benchmarks/results/h200_experts.json)."""
_MEASURED_EXPERTS, _MEASURED_K, _MEASURED_WIDTH = 256, 8, 4096

# Those that are launched, and what attention and thin products lose: a layer takes 235 us at one
# token on an H200 (docs/benchmarks.md), of which reading its weights and cache takes 191.
_SMALL_OPS_A_LAYER = 16
# Attention over prompts, beside its products at full rate: 1.9 to 3 times as long from 1024 to 4096
# tokens.
_PREFILL_ATTENTION_SLOWDOWN = 2.0
# A layer whose rows travel is launched by the host, which waits for their counts: over two H200s it
# took no less than 3.3 to 4.9 ms for up to 1024 tokens.
_LAYER_OF_TRAVELLING_ROWS = 3.4e-3
# Up to so many tokens the pooler and unpooler are computed in blocks of columns and gathered.
_SHARDED_PROJECTION_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of the whole model."""

    seconds: dict[str, float]
    """What for -> how long."""
    collective_bytes: int
    """Sent by one GPU."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def decode_time(
    config: DecoderConfig, layout: Layout, device: Device, workload: Workload
) -> StepTime:
    """A step in which each of `concurrency` requests, `context` long, gets one token."""
    requests = -(-workload.concurrency // layout.dp)
    return step_time(
        config, layout, device, workload,
        tokens=requests, sequences=requests, context=workload.context,
    )  # fmt: skip


def prefill_time(
    config: DecoderConfig, layout: Layout, device: Device, workload: Workload, length: int
) -> StepTime:
    """Reading one prompt of `length` tokens, in chunks of `max_num_batched_tokens`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    sent, chunk = 0, workload.max_num_batched_tokens
    whole, rest = divmod(length, chunk)
    # Chunks differ only in what they look back on: the mean of the whole ones, then the last.
    for count, size, seen in (
        (whole, chunk, whole * chunk // 2),
        (min(rest, 1), rest, length - rest // 2),
    ):
        if count:
            step = step_time(
                config, layout, device, workload, tokens=size, sequences=1, context=max(seen, 1)
            )
            for name, value in step.seconds.items():
                seconds[name] += count * value
            sent += count * step.collective_bytes
    return StepTime(dict(seconds), sent)


def step_time(
    config: DecoderConfig,
    layout: Layout,
    device: Device,
    workload: Workload,
    *,
    tokens: int,
    sequences: int,
    context: int,
) -> StepTime:
    """A step of `tokens` new tokens on each replica of the attention layers.

    Args:
        config: the model.
        layout: how it is spread.
        device: on what.
        workload: how the cache and the weights are stored.
        tokens: new tokens of a replica.
        sequences: whose keys and values are read.
        context: of each sequence, in tokens.
    """
    step = _Step(config, layout, device, workload, tokens)
    for stage in layout.stages(config):
        before = sum(step.seconds.values())
        step.add_weights(stage)
        step.add_attention(stage, sequences, context)
        step.add_experts(stage)
        step.add_small(stage)
        step.add_collectives(stage, sequences)
        step.add_host(stage, sum(step.seconds.values()) - before)
    return StepTime(dict(step.seconds), int(step.sent))


class _Step:
    """Adds up one step; `T` is a replica's tokens."""

    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        device: Device,
        workload: Workload,
        tokens: int,
    ) -> None:
        self.config, self.layout, self.device = config, layout, device
        self.workload, self.T = workload, tokens
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.sent = 0.0
        self.shards_projections = (
            layout.tp > 1 and layout.dp == 1 and tokens <= _SHARDED_PROJECTION_TOKENS
        )

    def add(self, kind: str, num_bytes: float, operations: float, slowdown: float = 1.0) -> None:
        """The longer of both, booked where it belongs."""
        reading = num_bytes / self.device.read_rate
        computing = operations / self.device.product_rate
        self.seconds[kind if reading >= computing else PRODUCTS] += slowdown * max(
            reading, computing
        )

    def add_weights(self, stage: Stage) -> None:
        """Everything but the experts and the embedding, of which a step reads its rows only."""
        size = self.workload.weight_bytes
        for part, num_bytes in stage_weights(self.config, self.layout, stage, size).items():
            if part in ("experts", "embedding"):
                continue
            if part == "pooler and unpooler" and self.shards_projections:
                num_bytes //= self.layout.tp
            rows = self.workload.concurrency if part == "output projection" else self.T
            values = num_bytes / (4 if part == "router" else size)
            self.add(WEIGHTS, num_bytes, 2 * min(rows, self.T) * values)

    def add_attention(self, stage: Stage, sequences: int, context: int) -> None:
        config = self.config
        kv_heads, width = self.layout.kv_heads(config), config.head_dim
        heads = config.num_attention_heads // self.layout.tp
        for layer in stage.layers:
            seen = min(context, layer.sliding_window or context)
            num_bytes = sequences * seen * kv_heads * width * 2 * self.workload.kv_bytes
            slowdown = _PREFILL_ATTENTION_SLOWDOWN if sequences < self.T else 1.0
            self.add(CACHE, num_bytes, 4 * self.T * seen * heads * width, slowdown)

    def add_experts(self, stage: Stage) -> None:
        """The rank with most experts to read holds up the others."""
        config, layout = self.config, self.layout
        E, K, H = config.num_local_experts, config.num_experts_per_tok, config.moe_hidden_size
        inner = config.moe_intermediate_size // layout.parallelism.expert_tensor_size
        # All replicas' tokens meet at the experts that are handed out over them.
        routes = self.T * K * (layout.dp if layout.ep > 1 else 1)
        here = E // layout.ep
        touched = fullest_rank(E * (1 - (1 - K / E) ** (routes / K)), layout.ep, here)
        rows = fullest_rank(routes, layout.ep, routes)
        for index, layer in enumerate(stage.layers, start=stage.first_layer):
            if layer.mlp == "sparse":
                size = self.workload.weight_bytes
                num_bytes = expert_bytes(config, index, layout, size) * touched / here
                slowdown = experts_slowdown(routes / E)
                self.add(WEIGHTS, num_bytes, 6 * rows * H * inner, slowdown)

    def add_small(self, stage: Stage) -> None:
        """Norms, boundaries, routing, finalize: launches, and their traffic of activations."""
        config, device = self.config, self.device
        # Two boundaries on a float32 stream; projections in and out; routed rows, three times.
        per_token = 24 * config.hidden_size + 6 * config.moe_hidden_size * (
            config.num_experts_per_tok / self.layout.ep
        )
        launches = _SMALL_OPS_A_LAYER * device.small_op_seconds
        traffic = self.T * per_token / device.read_rate
        self.seconds[SMALL] += len(stage.layers) * (launches + traffic)

    def add_collectives(self, stage: Stage, sequences: int) -> None:
        D, H, layout = self.config.hidden_size, self.config.moe_hidden_size, self.layout
        size, K = self.workload.weight_bytes, self.config.num_experts_per_tok
        for layer in stage.layers:
            self.reduce(layout.tp, self.T * D * size)  # after o_proj
            if layer.mlp == "dense":
                self.reduce(layout.tp, self.T * D * size)
            elif layout.parallelism.moe_backend == "all_to_all":
                own = self.T / layout.tp  # there and back
                self.send(layout.ep, 2 * own * min(K, layout.ep) * H * size, times=2)
            elif layout.ep > 1:
                self.reduce(layout.ep, self.T * H * size)
            else:  # partial rows are summed before the norm of each route
                self.reduce(layout.tp, self.T * K * H * size)
            if layer.mlp == "sparse" and self.shards_projections:
                self.send(layout.tp, self.T * (D + H) * size, times=2)
        if stage.is_first:
            self.reduce(layout.tp, self.T * D * size)
        if stage.is_last:
            self.send(layout.tp, min(sequences, self.T) * self.config.vocab_size * 4)
        else:
            self.send(self.layout.gpus_per_node + 1 if layout.nodes > 1 else 2, 2 * self.T * D * 4)

    def add_host(self, stage: Stage, busy: float) -> None:
        """What the host takes longer than the device, which is busy for so many seconds."""
        if self.layout.parallelism.moe_backend == "all_to_all":
            layers = sum(layer.mlp == "sparse" for layer in stage.layers)
            self.seconds[HOST] += max(0.0, layers * _LAYER_OF_TRAVELLING_ROWS - busy)

    def reduce(self, group: int, num_bytes: float) -> None:
        """A sum over ranks: each sends nearly all bytes twice."""
        self.send(group, 2 * num_bytes)

    def send(self, group: int, num_bytes: float, times: int = 1) -> None:
        """A collective of `group` ranks, `times` of them that share `num_bytes`."""
        if group == 1:
            return
        device, crosses = self.device, self.layout.crosses_nodes(group)
        rate = device.network_bandwidth if crosses else device.link_bandwidth
        latency = device.network_latency if crosses else device.link_latency
        sent = num_bytes * (group - 1) / group
        self.sent += sent
        self.seconds[COLLECTIVES] += times * latency + sent / (rate * device.link_share)


def fullest_rank(total: float, ranks: int, limit: float) -> float:
    """What the fullest of `ranks` holds of `total` things that fall evenly at random.

    The mean, and the usual bound on the maximum of as many normal numbers above it.
    """
    mean = total / ranks
    return min(limit, mean + math.sqrt(2 * math.log(ranks) * mean)) if ranks > 1 else total


def experts_slowdown(rows_per_expert: float) -> float:
    """Measured time over the floor, by how many rows an expert gets on average."""
    points = sorted(_measured_slowdowns().items())
    at = bisect.bisect([rows for rows, _ in points], rows_per_expert)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (low, before), (high, after) = points[at - 1], points[at]
    share = math.log(rows_per_expert / low) / math.log(high / low)
    return before + share * (after - before)


def _measured_slowdowns() -> dict[float, float]:
    """Rows per expert -> slowdown, from `EXPERTS_MEASURED`; the H200 of that run read 4.4 TB/s."""
    E, K = _MEASURED_EXPERTS, _MEASURED_K
    weights = 3 * _MEASURED_WIDTH**2
    slowdowns = {}
    for tokens, microseconds in EXPERTS_MEASURED.items():
        touched = E * (1 - (1 - K / E) ** tokens)
        reading = touched * weights * (1 / 2 + 1 / 16) / 4.416e12
        computing = 2 * tokens * K * weights / 682e12
        slowdowns[tokens * K / E] = microseconds * 1e-6 / max(reading, computing)
    return slowdowns
