"""NVFP4 experts for Hopper GPUs: layout, routing lists and kernel; see docs/nvfp4-hopper.md."""

from musespark.ops.nvfp4_hopper.experts import HopperNVFP4Experts, Tiling, runs_on
from musespark.ops.nvfp4_hopper.layout import permuted_columns

__all__ = ["HopperNVFP4Experts", "Tiling", "permuted_columns", "runs_on"]
