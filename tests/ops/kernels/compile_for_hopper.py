"""Compiles the kernels for sm_90 at the released model's sizes, without a GPU.

Run as a program, because under pytest the kernels are defined for the interpreter. Launches go to
the compiler instead of a device; a line of JSON per compiled kernel says what became of it.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info
from triton.runtime.jit import JITFunction

from musespark.ops import (
    attention_decode,
    attention_prefill,
    expert_finalize,
    rank_sums,
    residual_boundary,
    skinny_linear,
)
from musespark.ops.expert_permute import group_by_expert_triton
from musespark.ops.output_gate import output_gate_triton
from musespark.ops.qk_norm_rope import qk_norm_rope_write_triton
from musespark.ops.rms_norm import rms_norm_triton
from musespark.ops.route_topk import route_topk_triton
from musespark.ops.routed_experts import RoutedExperts
from musespark.ops.router_gemm import router_gemm_triton
from musespark.ops.sample_filter import filter_logits_triton
from musespark.ops.silu_mul import silu_mul_triton
from musespark.ops.soft_cap import soft_cap_triton

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
KINDS = {
    BF16: "bf16",
    F32: "fp32",
    FP8: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
HOPPER = GPUTarget("cuda", 90, 32)
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
seen: set[tuple[str, ...]] = set()


def compile_launch(kernel: Any, bound: dict[str, Any], options: dict[str, int]) -> None:
    """Compile a kernel as this launch would, unless one like it was."""
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        name, value = parameter.name, bound[parameter.name]
        aligned = [["tt.divisibility", 16]]
        if isinstance(value, Tensor):
            signature[name] = "*" + KINDS[value.dtype]
            attributes[(position,)] = aligned
        elif isinstance(value, float) and not parameter.is_constexpr:
            signature[name] = "fp32"
        elif parameter.is_constexpr or value is None:
            signature[name], constants[(position,)] = "constexpr", value
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[(position,)] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(position,)] = aligned
    key = (kernel.__name__, str(signature), str(constants), str(options))
    if key in seen:
        return
    seen.add(key)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=HOPPER, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [OBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None
    ptx = compiled.asm["ptx"]
    report = {
        "kernel": kernel.__name__,
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "shared_bytes": compiled.metadata.shared,
        "uses_wgmma": "wgmma.mma_async" in ptx,
        "uses_mma": "mma.sync" in ptx,
        "uses_async_copies": "cp.async" in ptx,
        "waits_for_inputs": "griddepcontrol.wait" in ptx,
    }
    print(json.dumps(report), flush=True)


def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
    """In place of a launch."""
    options = dict[str, int]()
    for name in ("num_warps", "num_stages"):
        if name in kwargs:
            options[name] = kwargs.pop(name)
    for name in ("grid", "warmup"):
        kwargs.pop(name, None)
    compile_launch(kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs, options)


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def compile_rows(tokens: int) -> None:
    vector, narrow = empty(8192, dtype=F32), empty(4096, dtype=F32)
    stream, branch = empty(tokens, 8192, dtype=F32), empty(tokens, 8192)
    residual_boundary.residual_boundary_triton(
        stream, branch, vector, vector, vector, 1e-8, vector, 1e-5
    )
    residual_boundary.residual_boundary_triton(
        stream, branch, vector, vector, None, 1e-8, vector, 1e-5
    )
    residual_boundary.blend_triton(stream, branch, vector, vector, vector, 1e-8)
    index = torch.zeros((tokens, 8), dtype=torch.int64)
    expert_finalize.expert_finalize_triton(
        empty(tokens * 8, 4096), empty(tokens, 8, dtype=F32), index, narrow, 1e-8
    )
    rms_norm_triton(empty(tokens, 4096), narrow, 1e-5)
    silu_mul_triton(empty(tokens, 8192))
    logits, numbers = empty(2, 202048, dtype=F32), empty(2, dtype=F32)
    soft_cap_triton(logits, 0.5, 20.0)
    filter_logits_triton(logits, torch.zeros(2, dtype=torch.int64), numbers, numbers)


def compile_rank_sums(tokens: int, ranks: int) -> None:
    addresses = torch.zeros(ranks, dtype=torch.int64)
    memory = rank_sums.PeerMemory(0, addresses, addresses, 256 * 8 * 4096)
    vector, narrow = empty(8192, dtype=F32), empty(4096, dtype=F32)
    stream, branch = empty(tokens, 8192, dtype=F32), empty(tokens, 8192)
    for post_gain in (vector, None):
        rank_sums.boundary_over_ranks(
            stream, branch, vector, vector, post_gain, 1e-8, vector, 1e-5, memory
        )
    columns = branch[:, : 8192 // ranks].contiguous()
    rank_sums.boundary_over_ranks(
        stream, columns, vector, vector, vector, 1e-8, vector, 1e-5, memory
    )
    rank_sums.norm_over_ranks(empty(tokens, 4096 // ranks), narrow, 1e-5, memory)
    index = torch.zeros((tokens, 8), dtype=torch.int64)
    for finalize in (rank_sums.finalize_over_ranks, rank_sums.finalize_summed_rows):
        weights = empty(tokens, 8, dtype=F32)
        finalize(empty(tokens * 8, 4096), weights, index, narrow, 1e-8, memory)


def compile_routing(tokens: int) -> None:
    parts = router_gemm_triton(empty(tokens, 8192), empty(256, 8192, dtype=F32))
    route_topk_triton(parts, empty(256, dtype=F32), 8, 1.0)
    group_by_expert_triton(torch.zeros((tokens, 8), dtype=torch.int64), 256)


def compile_products() -> None:
    for rows, width in ((18432, 8192), (8192, 4096)):
        skinny_linear.skinny_linear_triton(empty(16, width), empty(rows, width))
    ids = torch.zeros((4, 2), dtype=torch.int64)
    for dtype in (BF16, F32):
        RoutedExperts(empty(4, 192, 128, dtype=dtype), empty(4, 128, 96, dtype=dtype))(
            empty(4, 128, dtype=dtype), ids
        )
    codes = (empty(4, 192, 64, dtype=torch.uint8), empty(4, 128, 48, dtype=torch.uint8))
    scales = (empty(4, 192, 8, dtype=FP8), empty(4, 128, 6, dtype=FP8))
    factors = (empty(4, 2, dtype=F32), empty(4, dtype=F32))
    RoutedExperts(*codes, scales, factors)(empty(4, 128), ids)


def compile_heads(head_dim: int, cache_dtype: torch.dtype) -> None:
    cache = empty(4, 16, 16, head_dim, dtype=cache_dtype)
    qkvg = empty(16, 288, head_dim)
    angles = (empty(16, head_dim // 2, dtype=F32), empty(16, head_dim // 2, dtype=F32))
    slots = torch.zeros(16, dtype=torch.int64)
    qk_norm_rope_write_triton(qkvg[:, :160], 128, 1e-5, angles, cache, cache, slots)
    output_gate_triton(qkvg[:, :128], qkvg[:, 160:], 1e-5)
    table, starts = torch.zeros((16, 8), dtype=torch.int32), torch.zeros(17, dtype=torch.int32)
    for window in (None, 2048):
        query, gate = qkvg[:, :128], qkvg[:, 160:]
        attention_decode.attention_decode_triton(
            query, cache, cache, table, starts[:16], starts[:16], 0.1, window, gate=gate
        )
        for first in (0, starts[:1]):
            attention_prefill.attention_prefill_triton(
                query, cache, cache, table, starts, starts[:16], starts[:16], 0.1, window,
                first_sequence=first,
            )  # fmt: skip


def hopper() -> GPUTarget:
    """In place of asking the driver."""
    return HOPPER


def main() -> None:
    for module in (
        attention_decode,
        expert_finalize,
        rank_sums,
        residual_boundary,
        skinny_linear,
    ):
        vars(module)["num_multiprocessors"] = lambda _device: 132
    vars(hopper)["__triton_builtin__"] = True  # the compiler calls it
    vars(target_info)["current_target"] = hopper
    JITFunction.run = run
    for tokens in (4, 300, 2048):
        compile_rows(tokens)
    compile_rank_sums(tokens=4, ranks=8)
    for tokens in (1, 32, 256, 4096):
        compile_routing(tokens)
    compile_products()
    for head_dim in (64, 128):
        for cache_dtype in (BF16, FP8):
            compile_heads(head_dim, cache_dtype)


if __name__ == "__main__":
    main()
