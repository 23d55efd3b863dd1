"""Machines that plans are made for: one table, with where each figure comes from.

Peak figures are the vendors' (dense, without sparsity); shares are what programs reach of them.
The shares were measured on one H200 and are assumed of the other GPUs.
"""

import difflib
from dataclasses import dataclass

from musespark.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator and how it is tied to others."""

    name: str
    memory_bytes: int
    """What a program can allocate before anything runs."""
    memory_bandwidth: float
    """Peak, bytes per second."""
    bf16_flops: float
    """Peak of dense bfloat16 products, operations per second."""
    link_bandwidth: float
    """Peak within a node (NVLink), bytes per second and direction."""
    network_bandwidth: float
    """Peak between nodes (InfiniBand, one adapter a GPU), bytes per second and direction."""
    source: str
    memory_share: float = 0.92
    """H200: 4.4 of 4.8 TB/s read."""
    flops_share: float = 0.69
    """H200: 680 of 989 TFLOP/s in a bfloat16 product of 8192^3; up to 795 on a cool card."""
    link_share: float = 0.5
    """Exchanges of 1024 to 4096 tokens over two H200 (NCCL) reach 0.3 to 0.67; sums above 0.45."""
    small_op_seconds: float = 3e-6
    """One small kernel within a CUDA graph; H200: 2 to 4 us for boundary, routing, finalize."""
    link_latency: float = 10e-6
    """A collective of few bytes within a node: 9 to 11 us over two H200."""
    network_latency: float = 30e-6
    """The same between nodes. Assumed: not measured here."""

    @property
    def read_rate(self) -> float:
        """Bytes per second that programs reach."""
        return self.memory_bandwidth * self.memory_share

    @property
    def product_rate(self) -> float:
        """bfloat16 operations per second that programs reach."""
        return self.bf16_flops * self.flops_share


DEVICES = {
    device.name: device
    for device in (
        Device(
            "h200", 139 * _GIB, 4.8e12, 989e12, 450e9, 50e9,
            "NVIDIA H200 SXM datasheet (141 GB, 4.8 TB/s, 989 TFLOPS, NVLink 900 GB/s both ways); "
            "memory and shares measured on an H200; network: 400 Gb/s a GPU, as in DGX H200",
        ),
        Device(
            "h100-80g", 79 * _GIB, 3.35e12, 989e12, 450e9, 50e9,
            "NVIDIA H100 SXM datasheet (80 GB, 3.35 TB/s, 989 TFLOPS, NVLink 900 GB/s both ways); "
            "memory: 80 GiB less about 1 that the driver keeps; network as in DGX H100",
        ),
        Device(
            "b200", 167 * _GIB, 8.0e12, 2250e12, 900e9, 50e9,
            "NVIDIA DGX B200 datasheet (8 GPUs: 1,440 GB, 64 TB/s, 18 PFLOPS bf16 dense, NVLink "
            "1.8 TB/s a GPU both ways); memory: 180 GB taken as decimal",
        ),
        Device(
            "a100-80g", 79 * _GIB, 2.039e12, 312e12, 300e9, 25e9,
            "NVIDIA A100 80GB SXM datasheet (2,039 GB/s, 312 TFLOPS, NVLink 600 GB/s both ways); "
            "memory as for h100-80g; network: 200 Gb/s a GPU, as in DGX A100",
        ),
        Device(
            "cpu", 16 * _GIB, 32e9, 0.4e12, 8e9, 1e9,
            "two cores with AVX512-BF16, measured: 25 to 39 GB/s, 386 GFLOP/s in packed products",
            memory_share=1.0, flops_share=1.0, small_op_seconds=10e-6,
        ),
    )
}  # fmt: skip
"""By name, as on the command line."""

_ALIASES = {"h100": "h100-80g", "a100": "a100-80g"}


def find_device(name: str) -> Device:
    """The device of this name.

    Raises:
        ConfigError: not in the table; names those that are.
    """
    key = name.lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in DEVICES:
        return DEVICES[key]
    similar = difflib.get_close_matches(key, [*DEVICES, *_ALIASES], n=1)
    hint = f" Did you mean {similar[0]}?" if similar else ""
    raise ConfigError(f"gpu: {name!r} is none of {', '.join(DEVICES)}.{hint}")
