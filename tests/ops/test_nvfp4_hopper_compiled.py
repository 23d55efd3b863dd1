"""What the compiler makes of the kernel for sm_90, read without a GPU.

The unpacking is right whatever registers it meets, but fast only if no number changes lanes.
"""

import pytest
from tests.ops.assembly import run_compiler

from musespark.ops.triton_import import HAS_TRITON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's compiler"),
]

# In a process of its own, since kernels here are defined for the interpreter.
SCRIPT = """
import sys
from triton.compiler import ASTSource
from tests.ops.assembly import compile_for_hopper, experts_source
from musespark.ops.nvfp4_hopper.experts import TILINGS
from musespark.ops.nvfp4_hopper.kernel import nvfp4_experts_kernel as kernel

tiling = TILINGS[int(sys.argv[1])][1]
constants = dict(
    WIDTH=4096, INNER=4096, WARPS=tiling.warps, GROUPS=tiling.groups, DOWN_GROUPS=tiling.groups,
    MAINS=tiling.mains, TAILS=tiling.tails, STAGES=tiling.stages, UNROLL=tiling.unroll,
    SETTLE=tiling.settle, EMULATE=False,
)
source = experts_source(ASTSource, kernel, "*u32", "*u32", constants)
compiled = compile_for_hopper(source, num_warps=tiling.warps)
print(compiled.asm["ttgir"])
print("PTX", "wgmma.mma_async" in compiled.asm["ptx"], ".local" in compiled.asm["ptx"])
"""


@pytest.mark.parametrize("tiling", range(4))
def test_weights_reach_the_matrix_unit_in_their_lanes(tiling, tmp_path):
    printed = run_compiler(SCRIPT, str(tiling), cache=tmp_path)
    assert printed.splitlines()[-1] == "PTX True False"
    # Layouts change in the epilogue alone: the loops with a matrix product hold no conversion.
    depth, loops = 0, 0
    current: list[str] = []
    for line in printed.splitlines():
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
import re
from triton.experimental.gluon._runtime import GluonASTSource
from tests.ops.assembly import assembly, compile_for_hopper, experts_source
from musespark.ops.nvfp4_hopper import warp_specialized as w
from musespark.ops.nvfp4_hopper.experts import WARP_TILING as tiling

constants = dict(
    WIDTH=4096, INNER=4096, MAINS=tiling.mains, TAILS=tiling.tails, STAGES=tiling.stages
)
words = f"tensordesc<i32[{w.PROGRAM_TILES}, 1, 4, 256],{w.WORDS_BOX!r}>"
scales = f"tensordesc<i32[{w.PROGRAM_TILES}, 1, 128],{w.SCALES_BOX!r}>"
source = experts_source(
    GluonASTSource, w.warp_specialized_experts_kernel, words, scales, constants
)
sass = assembly(compile_for_hopper(source, num_warps=4, maxnreg=w.START_REGISTERS))
print(len(re.findall("HGMMA", sass)), len(re.findall("WARPGROUP.DEPBAR", sass)))
"""


def test_matrix_instructions_of_warps_with_roles_overlap(tmp_path):
    """Layouts are asserted where they are used; here: the assembler found registers enough."""
    printed = run_compiler(WARPS_SCRIPT, cache=tmp_path)
    instructions, waits = map(int, printed.split())
    assert instructions > 0
    assert waits < instructions / 4
