"""Which experts a layer gets: by how the checkpoint stores them, and by the backend asked for."""

import torch

from musespark.config.model import DecoderConfig
from musespark.moe.experts.bf16 import GroupedExperts
from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.nvfp4_w4a4 import NVFP4W4A4Experts
from musespark.moe.experts.part import ExpertPart
from musespark.ops.nvfp4 import GROUP_SIZE
from musespark.parallel.layout import ONE_PROCESS, Layout


def has_nvfp4_experts(config: DecoderConfig, layer_index: int) -> bool:
    """Whether the checkpoint's experts of this layer are NVFP4."""
    quantization = config.quantization
    return quantization is not None and not quantization.excludes_experts(
        layer_index, config.num_local_experts
    )


def build_experts(
    config: DecoderConfig,
    layer_index: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout = ONE_PROCESS,
) -> GroupedExperts | NVFP4Experts:
    """The experts of one layer, their weights uninitialized.

    Args:
        config: the model; its quantization says which layers' experts are NVFP4.
        layer_index: which layer.
        dtype: of the activations.
        device: where the weights live.
        layout: how the model is spread, and this rank's share with it. Of the backends, "w4a4"
            quantizes the activations of NVFP4 experts too; "reference" keeps the weights as the
            checkpoint stores them.

    Raises:
        ConfigError: experts that cannot be cut in equal shares.
    """
    backend = layout.parallelism.moe_backend
    kind: type[GroupedExperts | NVFP4Experts] = GroupedExperts
    granularity = 1
    if has_nvfp4_experts(config, layer_index):
        kind = NVFP4W4A4Experts if backend == "w4a4" else NVFP4Experts
        granularity = GROUP_SIZE
    part = ExpertPart.of(config, layout.mesh, granularity)
    experts = kind(config, dtype=dtype, device=device, part=part)
    experts.keeps_plain_weights = backend == "reference"
    return experts
