"""For programs that compile kernels for sm_90 and read what comes of it, without a GPU.

They are programs, since under pytest kernels are defined for the interpreter.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run_compiler(program: str, *arguments: str, cache: Path) -> str:
    """What a program prints; `cache` is a folder for the compiler."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", program, *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=root)
    return done.stdout


def experts_source(
    kind: Any, kernel: Any, words: str, scales: str, constants: dict[str, Any]
) -> Any:
    """A `kind` of source for a kernel of NVFP4 experts; `words` and `scales` are types."""
    kinds = dict.fromkeys(("x", "hidden", "rows"), "*bf16")
    kinds |= dict.fromkeys(("order", "tiles", "num_tiles"), "*i32")
    kinds |= {"gate_up": words, "down": words, "gate_up_scales": scales, "down_scales": scales}
    kinds |= dict.fromkeys(("gate_up_factors", "down_factors"), "*fp32")
    kinds |= {"top_k": "i32"} | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    return kind(
        kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n].startswith("*")},
    )


def compile_for_hopper(source: Any, **options: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembly(compiled: Any) -> str:
    """The machine's instructions."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
