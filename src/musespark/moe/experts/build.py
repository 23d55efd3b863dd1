"""Which experts a layer gets: by how the checkpoint stores them, and by the backend asked for."""

import torch

from musespark.config.model import DecoderConfig
from musespark.config.parallel import MoEBackend
from musespark.errors import ConfigError
from musespark.moe.experts.bf16 import GroupedExperts
from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.experts.nvfp4_w4a4 import NVFP4W4A4Experts
from musespark.moe.experts.part import ExpertPart


def build_experts(
    config: DecoderConfig,
    layer_index: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    part: ExpertPart | None = None,
    backend: MoEBackend = "auto",
) -> GroupedExperts | NVFP4Experts:
    """The experts of one layer, their weights uninitialized.

    Args:
        config: the model; its quantization says which layers' experts are NVFP4.
        layer_index: which layer.
        dtype: of the activations.
        device: where the weights live.
        part: this rank's share; None: all.
        backend: "w4a4" quantizes the activations of NVFP4 experts too; "reference" keeps the
            weights as the checkpoint stores them.

    Raises:
        ConfigError: a backend that needs more than one process.
    """
    if backend == "all_to_all":
        raise ConfigError(
            "moe_backend: all_to_all exchanges rows between processes, and this model is built for "
            "one. Set moe_backend to auto."
        )
    quantization = config.quantization
    if quantization is None or quantization.excludes_experts(layer_index, config.num_local_experts):
        kind: type[GroupedExperts | NVFP4Experts] = GroupedExperts
    else:
        kind = NVFP4W4A4Experts if backend == "w4a4" else NVFP4Experts
    experts = kind(config, dtype=dtype, device=device, part=part)
    experts.keeps_plain_weights = backend == "reference"
    return experts
