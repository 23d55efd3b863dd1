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


WARPS_SCRIPT = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from musespark.ops.nvfp4_hopper import warp_specialized as w
from musespark.ops.nvfp4_hopper.experts import WARP_TILING as tiling

constants = dict(
    WIDTH=4096, INNER=4096, MAINS=tiling.mains, TAILS=tiling.tails, STAGES=tiling.stages
)
kernel = w.warp_specialized_experts_kernel
kinds = dict.fromkeys(("x", "hidden", "rows"), "*bf16")
kinds |= dict.fromkeys(("order", "tiles", "num_tiles"), "*i32")
words = f"tensordesc<i32[{w.PROGRAM_TILES}, 1, 4, 256],{w.WORDS_BOX!r}>"
scales = f"tensordesc<i32[{w.PROGRAM_TILES}, 1, 128],{w.SCALES_BOX!r}>"
kinds |= {"gate_up": words, "down": words, "gate_up_scales": scales, "down_scales": scales}
kinds |= dict.fromkeys(("gate_up_factors", "down_factors"), "*fp32")
kinds |= {"top_k": "i32"} | dict.fromkeys(constants, "constexpr")
names = kernel.arg_names
source = GluonASTSource(
    kernel,
    {name: kinds[name] for name in names},
    {(names.index(name),): value for name, value in constants.items()},
    {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n].startswith("*")},
)
options = {"num_warps": 4, "maxnreg": w.START_REGISTERS}
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(compiled.asm["cubin"])
    file.flush()
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True).stdout
print(len(re.findall("HGMMA", sass)), len(re.findall("WARPGROUP.DEPBAR", sass)))
"""


def test_matrix_instructions_of_warps_with_roles_overlap(tmp_path):
    """Layouts are asserted where they are used; here: the assembler found registers enough."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WARPS_SCRIPT], capture_output=True, text=True, check=True, env=env
    )
    instructions, waits = map(int, done.stdout.split())
    assert instructions > 0
    assert waits < instructions / 4
