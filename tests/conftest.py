"""Settings that hold for every test: one thread, and the same random examples in every run."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from tests.parallel.workers import Workers

# Tiny tensors gain nothing from threads; must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU, Triton's kernels run in its interpreter; read when a kernel is defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("musespark", derandomize=True, deadline=None)
settings.load_profile("musespark")


@pytest.fixture(scope="session")
def workers():
    """Four processes for all tests of parallel layouts, started by the first that needs them."""
    pool = Workers()
    yield pool
    pool.close()
