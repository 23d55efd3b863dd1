"""Where the kernels under test run: on the GPU, or else in Triton's interpreter."""

from typing import Any

import pytest
import torch

from musespark.ops.triton_import import HAS_TRITON, IS_INTERPRETED

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

needs_kernels = pytest.mark.skipif(
    not HAS_TRITON or not (ON_GPU or IS_INTERPRETED),
    reason="kernels need Triton, and a GPU or Triton's interpreter (TRITON_INTERPRET=1)",
)


def on_device(*values: Any) -> Any:
    """Tensors among `values` moved to where the kernels run."""
    return tuple(v.to(DEVICE) if isinstance(v, torch.Tensor) else v for v in values)


def on_gpu(*cases: Any) -> Any:
    """Cases for a real GPU only: the interpreter would take too long."""
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases] if ON_GPU else []
