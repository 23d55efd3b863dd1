"""What the compiler makes of the Hopper kernel for prompts, for sm_90, read without a GPU.

Layouts are asserted where they are used. Here: the assembler found registers enough to let matrix
instructions run beside the softmax, and has left the waits where they belong.
"""

import pytest
from tests.ops.assembly import run_compiler

from musespark.ops.gluon_import import HAS_GLUON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_GLUON, reason="needs Triton's compiler"),
]

# In a process of its own, since kernels here are defined for the interpreter.
SCRIPT = """
import re, sys
import torch
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction
from tests.ops.assembly import assembly, compile_for_hopper
from musespark.ops.attention_prefill_hopper import attention_prefill_hopper

KINDS = {torch.bfloat16: "*bf16", torch.int32: "*i32"}

def run(kernel, *args, grid, warmup, num_warps, **constants):
    bound = dict(zip(kernel.arg_names, args)) | constants
    signature, given, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], given[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = KINDS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if parameter.name == "query_stride":
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, given, aligned)
    sass = assembly(compile_for_hopper(source, num_warps=num_warps))
    pattern = r"HGMMA[.]64x\\d+|DEPBAR[.]LE gsb0, 0x\\d|MUFU[.]EX2|LDGSTS[.E]+BYPASS[.]128"
    print(*(found.replace(" ", "_") for found in re.findall(pattern, sass)))

JITFunction.run = run
def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)
table, ints = torch.zeros((3, 9), dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
first = ints[:1] if sys.argv[1] == "True" else 1
window = eval(sys.argv[2])
attention_prefill_hopper(
    bf16(99, 128, 64), bf16(9, 16, 16, 64), bf16(9, 16, 16, 64), table, ints, ints[:3], ints[:3],
    0.1, window, first_sequence=first,
)
"""


@pytest.mark.parametrize(("first_on_device", "window"), [(False, None), (True, 2048)])
def test_products_run_beside_the_softmax(first_on_device, window, tmp_path):
    printed = run_compiler(SCRIPT, repr(first_on_device), repr(window), cache=tmp_path)
    found = printed.split()
    assert any(name.startswith("LDGSTS") for name in found)  # 16 bytes at a time
    scores, values = "HGMMA.64x128", "HGMMA.64x64"
    steps = printed.count(" ".join([scores] * 4 + [values] * 8 + ["DEPBAR.LE_gsb0,_0x1"]))
    assert steps == 2 * 3  # two loops of three warpgroups; nothing waits in between
    for part in printed.split("DEPBAR.LE_gsb0,_0x1")[1:]:
        softmax = part.split("DEPBAR.LE_gsb0,_0x0")[0]
        assert softmax.count("MUFU.EX2") == 128 // 2 + 2  # of a thread: all before the next wait
