"""Bytes on one GPU: weights by part, KV cache, activations, and what the runtime takes.

Weights and cache are exact, from the same rules as the loader's and the engine's. Activations are
the largest tensors that live together in a step. What the runtime takes is assumed.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from musespark.checkpoint.modelopt import excluded_modules, quantization_config
from musespark.config.engine import EngineConfig
from musespark.config.model import DecoderConfig
from musespark.config.parallel import Parallelism
from musespark.config.quantization import NVFP4_GROUP_SIZE, QuantizationConfig, read_quantization
from musespark.errors import ConfigError
from musespark.planner.devices import Device
from musespark.planner.layout import Layout, Stage

RUNTIME_BYTES = 1.5 * 2**30
"""CUDA context, libraries and their workspaces. Assumed."""
GRAPH_BYTES = 0.5 * 2**30
"""Recorded decode steps. Assumed."""
COMMUNICATOR_BYTES = 0.5 * 2**30
"""Buffers of the collectives, where there is more than one process. Assumed."""

_KV_BYTES = {"bf16": 2, "fp8_e4m3": 1}
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be served."""

    context: int
    """Prompt and output tokens of one request."""
    concurrency: int
    """Requests at once, over all GPUs."""
    kv_dtype: str = "bf16"
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    """Of the memory left after loading, what the cache may take."""
    weight_bytes: int = 2
    """Of one weight outside NVFP4 experts: 2 as bfloat16, 4 as float32."""

    def __post_init__(self) -> None:
        if self.kv_dtype not in _KV_BYTES:
            raise ConfigError(
                f"kv_dtype: must be one of {', '.join(_KV_BYTES)}, found {self.kv_dtype!r}."
            )
        for name in ("context", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be 1 or more, found {getattr(self, name)}.")
        EngineConfig(
            max_num_seqs=1,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )

    @property
    def kv_bytes(self) -> int:
        """Of one key or value number."""
        return _KV_BYTES[self.kv_dtype]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One GPU's memory: of the GPU that holds most."""

    capacity: int
    weights: dict[str, int]
    """Part -> bytes; the parts are those of `musespark inspect`."""
    kv_full: int
    kv_sliding: int
    activations: int
    runtime: int
    graphs: int
    kv_budget: int
    """What the engine would give the cache."""
    total_weights: int
    """Over all GPUs, each tensor once."""

    @property
    def weight_bytes(self) -> int:
        """All parts."""
        return sum(self.weights.values())

    @property
    def kv_bytes(self) -> int:
        """Both kinds of layers."""
        return self.kv_full + self.kv_sliding

    @property
    def used(self) -> int:
        """All of it."""
        others = self.activations + self.runtime + self.graphs
        return self.weight_bytes + self.kv_bytes + others

    @property
    def margin(self) -> int:
        """Bytes of cache that could be had beyond those asked for; negative: that lack."""
        return self.kv_budget - self.kv_bytes

    @property
    def fits(self) -> bool:
        """Whether all of it has room, under the engine's own rules."""
        return self.margin >= 0


def with_format(config: DecoderConfig, weight_format: str) -> DecoderConfig:
    """The config with its experts stored otherwise.

    Args:
        config: the model.
        weight_format: "auto" (as the config says), "bf16", or "nvfp4": as `musespark quantize`
            stores them by default, the first and last layer left in BF16.
    """
    if weight_format == "bf16":
        return dataclasses.replace(config, quantization=None)
    if weight_format == "auto" or config.quantization is not None:
        return config
    excluded = excluded_modules(config, "model.", {0, config.num_hidden_layers - 1})
    quantization = read_quantization(quantization_config(excluded), "nvfp4")
    return dataclasses.replace(config, quantization=quantization)


def stage_weights(
    config: DecoderConfig, layout: Layout, stage: Stage, weight_bytes: int = 2
) -> Counter[str]:
    """Bytes of weights on one rank of a stage, by part."""
    D, H, tp = config.hidden_size, config.moe_hidden_size, layout.tp
    query = config.num_attention_heads // tp * config.head_dim
    key_value = layout.kv_heads(config) * config.head_dim
    parts: Counter[str] = Counter()
    for index, layer in enumerate(stage.layers, start=stage.first_layer):
        parts["attention"] += D * (3 * query + 2 * key_value) * weight_bytes
        parts["norms and gates"] += 3 * D * weight_bytes + 2 * D * _FLOAT32
        if layer.mlp == "dense":
            parts["dense FFN"] += 3 * D * -(-config.intermediate_size // tp) * weight_bytes
            continue
        parts["norms and gates"] += 2 * H * weight_bytes
        parts["router"] += config.num_local_experts * (D + 1) * _FLOAT32
        parts["pooler and unpooler"] += 2 * D * H * weight_bytes
        parts["experts"] += expert_bytes(config, index, layout, weight_bytes)
    rows = -(-config.vocab_size // tp)
    if stage.is_first:
        parts["embedding"] += rows * D * weight_bytes
    if stage.is_last:
        parts["output projection"] += rows * D * weight_bytes
        parts["norms and gates"] += D * weight_bytes
    return parts


def split_router_bytes(config: DecoderConfig, stage: Stage) -> int:
    """Bytes of the routers once more, as three bfloat16 planes (`ops/router_gemm.py`)."""
    sparse = sum(layer.mlp == "sparse" for layer in stage.layers)
    return 3 * 2 * sparse * config.num_local_experts * config.hidden_size


def total_weights(config: DecoderConfig, weight_bytes: int = 2) -> Counter[str]:
    """Bytes of the whole decoder's weights, by part."""
    layout = Layout(Parallelism())
    (stage,) = layout.stages(config)
    return stage_weights(config, layout, stage, weight_bytes)


def expert_bytes(
    config: DecoderConfig, layer_index: int, layout: Layout, weight_bytes: int = 2
) -> int:
    """Bytes of a layer's experts on one rank."""
    here = config.num_local_experts // layout.ep
    inner = config.moe_intermediate_size // layout.parallelism.expert_tensor_size
    values = here * 3 * config.moe_hidden_size * inner
    if not is_quantized(config, layer_index):
        return values * weight_bytes
    # Three global scales an expert here, three input scales of every expert.
    scalars = 3 * _FLOAT32 * (here + config.num_local_experts)
    return values // 2 + values // NVFP4_GROUP_SIZE + scalars


def is_quantized(config: DecoderConfig, layer_index: int) -> bool:
    """Whether this layer's experts are NVFP4."""
    quantization = config.quantization
    return quantization is not None and not _excludes(
        quantization, layer_index, config.num_local_experts
    )


@lru_cache(maxsize=4096)  # Matching a list of modules is slow, and searches ask again and again.
def _excludes(quantization: QuantizationConfig, layer_index: int, num_experts: int) -> bool:
    return quantization.excludes_experts(layer_index, num_experts)


def stage_cache(
    config: DecoderConfig, layout: Layout, stage: Stage, workload: Workload
) -> tuple[int, int]:
    """Bytes of cache on one rank of a stage, in full and in sliding layers.

    The engine's rule: one request reads a whole chunk, the others hold a window, and the scheduler
    keeps a block to spare for each of them.
    """
    block, window = workload.block_size, config.sliding_window
    requests = -(-workload.concurrency // layout.dp)
    full = -(-workload.context // block)
    reading = min(full, -(-(window + workload.max_num_batched_tokens) // block) + 1)
    resting = min(reading, -(-window // block) + 1)
    a_block = 2 * block * layout.kv_heads(config) * config.head_dim * workload.kv_bytes
    sliding_layers = sum(layer.sliding_window is not None for layer in stage.layers)
    full_layers = len(stage.layers) - sliding_layers
    others = requests - 1
    return (
        (full + (full + 1) * others) * a_block * full_layers,
        (reading + (resting + 1) * others) * a_block * sliding_layers,
    )


def activation_bytes(config: DecoderConfig, layout: Layout, workload: Workload) -> int:
    """The largest tensors that live together in a step of `max_num_batched_tokens`."""
    T, D, H = workload.max_num_batched_tokens, config.hidden_size, config.moe_hidden_size
    size = workload.weight_bytes
    # The stream before and after a boundary, the normed input, a branch.
    stream = T * D * (2 * _FLOAT32 + 2 * size)
    heads = (2 * config.num_attention_heads) // layout.tp + 2 * layout.kv_heads(config)
    attention = T * heads * config.head_dim * 2 * size
    # Routes here: their share, doubled for uneven routing. Input, gate and up, hidden, output.
    routes = T * config.num_experts_per_tok * min(1.0, 2 / layout.ep)
    inner = config.moe_intermediate_size // layout.parallelism.expert_tensor_size
    experts = int(routes * (2 * H + 3 * inner) * size) if config.has_sparse_layers else 0
    dense = 3 * T * config.intermediate_size // layout.tp * size
    has_dense = any(layer.mlp == "dense" for layer in config.layers)
    # Logits, and a copy to sample from.
    logits = 2 * min(workload.concurrency, T) * config.vocab_size * _FLOAT32
    return stream + max(attention, experts, dense if has_dense else 0, logits)


def plan_memory(
    config: DecoderConfig, layout: Layout, device: Device, workload: Workload
) -> MemoryPlan:
    """Memory of the GPU that holds most, for `workload`."""
    activations = activation_bytes(config, layout, workload)
    on_gpu = device.name != "cpu"
    several = COMMUNICATOR_BYTES if layout.parallelism.world_size > 1 else 0
    runtime = int(RUNTIME_BYTES * on_gpu + several)
    graphs = int(GRAPH_BYTES * on_gpu)
    whole = total_weights(config, workload.weight_bytes).total()
    plans = []
    for stage in layout.stages(config):
        weights = stage_weights(config, layout, stage, workload.weight_bytes)
        if on_gpu and workload.weight_bytes == 2:
            weights["router, split"] = split_router_bytes(config, stage)
        kv_full, kv_sliding = stage_cache(config, layout, stage, workload)
        free = device.memory_bytes - runtime - weights.total()
        budget = min(int(free * workload.gpu_memory_utilization), free - activations - graphs)
        plans.append(
            MemoryPlan(
                capacity=device.memory_bytes,
                weights=dict(weights),
                kv_full=kv_full,
                kv_sliding=kv_sliding,
                activations=activations,
                runtime=runtime,
                graphs=graphs,
                kv_budget=budget,
                total_weights=whole,
            )
        )
    return min(plans, key=lambda plan: plan.margin)


def largest_context(
    config: DecoderConfig, layout: Layout, device: Device, workload: Workload
) -> int:
    """The longest requests of which `concurrency` fit; 0 if none."""

    def fits(context: int) -> bool:
        asked = dataclasses.replace(workload, context=context)
        return plan_memory(config, layout, device, asked).fits

    return _largest(fits, config.max_position_embeddings)


def largest_concurrency(
    config: DecoderConfig, layout: Layout, device: Device, workload: Workload
) -> int:
    """How many requests of `context` tokens fit; 0 if none."""

    def fits(concurrency: int) -> bool:
        asked = dataclasses.replace(workload, concurrency=concurrency)
        return plan_memory(config, layout, device, asked).fits

    return _largest(fits, 2**16)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
