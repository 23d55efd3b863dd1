"""What the compiler makes of the kernel for sm_90, read without a GPU.

The unpacking is right whatever registers it meets, but fast only if no number changes lanes.
"""

import os
import subprocess
import sys

import pytest

from musespark.ops.triton_import import HAS_TRITON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's compiler"),
]

# In a process of its own, since kernels here are defined for the interpreter.
SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from musespark.ops.nvfp4_hopper.experts import TILINGS
from musespark.ops.nvfp4_hopper.kernel import nvfp4_experts_kernel as kernel

tiling = TILINGS[int(sys.argv[1])][1]
constants = dict(
    WIDTH=4096, INNER=4096, WARPS=tiling.warps, GROUPS=tiling.groups, DOWN_GROUPS=tiling.groups,
    MAINS=tiling.mains, TAILS=tiling.tails, STAGES=tiling.stages, UNROLL=tiling.unroll,
    SETTLE=tiling.settle, EMULATE=False,
)
kinds = dict.fromkeys(("x", "hidden", "rows"), "*bf16")
kinds |= dict.fromkeys(("order", "tiles", "num_tiles"), "*i32")
kinds |= dict.fromkeys(("gate_up", "gate_up_scales", "down", "down_scales"), "*u32")
kinds |= dict.fromkeys(("gate_up_factors", "down_factors"), "*fp32")
kinds |= {"top_k": "i32"} | dict.fromkeys(constants, "constexpr")
names = kernel.arg_names
source = ASTSource(
    kernel,
    {name: kinds[name] for name in names},
    {(names.index(name),): value for name, value in constants.items()},
    {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n].startswith("*")},
)
compiled = triton.compile(
    source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiling.warps}
)
print(compiled.asm["ttgir"])
print("PTX", "wgmma.mma_async" in compiled.asm["ptx"], ".local" in compiled.asm["ptx"])
"""


@pytest.mark.parametrize("tiling", range(4))
def test_weights_reach_the_matrix_unit_in_their_lanes(tiling, tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiling)],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "PTX True False"
    # Layouts change in the epilogue alone: the loops with a matrix product hold no conversion.
    depth, loops = 0, 0
    current: list[str] = []
    for line in done.stdout.splitlines():
        if "scf.for" in line and depth == 0:
            depth, current = 1, []
            continue
        if depth:
            depth += line.count("{") - line.count("}")
            current.append(line)
            if depth <= 0:
                if any("warp_group_dot " in body for body in current):
                    loops += 1
                    assert not any("convert_layout" in body for body in current)
                depth = 0
    assert loops >= 2
