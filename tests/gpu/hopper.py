"""Marks of tests that need a Hopper GPU."""

import pytest
import torch

from musespark.ops.triton_import import is_hopper

IS_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
needs_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU"),
]
