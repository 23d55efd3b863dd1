"""NVFP4 experts for Hopper GPUs: layout, routing lists and kernel; see docs/nvfp4-hopper.md."""

from musespark.ops.nvfp4_hopper.experts import HopperNVFP4Experts, Tiling, runs_on
from musespark.ops.nvfp4_hopper.layout import permuted_columns
from musespark.ops.nvfp4_hopper.work_list import WorkList

__all__ = ["HopperNVFP4Experts", "Tiling", "WorkList", "permuted_columns", "runs_on"]
