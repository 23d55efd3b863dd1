"""What the compiler makes of the kernels for sm_90, read without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from musespark.ops.triton_import import HAS_TRITON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's compiler"),
]

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
# Of an H200's multiprocessor, for one program.
SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(kernels, name):
    found = [kernel for kernel in kernels if kernel["kernel"] == name]
    assert found
    return found


def test_all_kernels_fit(kernels):
    assert len({kernel["kernel"] for kernel in kernels}) == 22
    for kernel in kernels:
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        # Some bytes may go to the stack of a program that fills all registers.
        assert kernel["stack_bytes"] <= 96, kernel


def test_long_products_run_on_the_matrix_units(kernels):
    for name in (
        "_router_gemm_kernel",
        "_router_planes_kernel",
        "_prefill_kernel",
        "_skinny_kernel",
    ):
        assert all(kernel["uses_wgmma"] for kernel in of(kernels, name))
    assert all(kernel["uses_mma"] for kernel in of(kernels, "_decode_kernel"))


def test_streams_of_rows_are_fetched_ahead(kernels):
    for name in ("_boundary_kernel", "_finalize_kernel"):
        assert any(kernel["uses_async_copies"] for kernel in of(kernels, name))


def test_kernels_that_are_launched_early_wait_for_their_inputs(kernels):
    early = {kernel["kernel"] for kernel in kernels if kernel["waits_for_inputs"]}
    assert early == {
        "_boundary_kernel",
        "_combine_kernel",
        "_decode_kernel",
        "_finalize_kernel",
        "_list_kernel",
        "_output_gate_kernel",
        "_qk_norm_rope_write_kernel",
        "_rms_norm_kernel",
        "_route_kernel",
        "_router_gemm_kernel",
        "_router_planes_kernel",
        "_skinny_kernel",
    }
