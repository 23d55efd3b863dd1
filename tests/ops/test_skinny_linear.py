"""Products of a few tokens, on the GPU or in the interpreter, against float64."""

import pytest
import torch
from tests.ops.accuracy import BF16, F64, assert_rounded_once, randn
from tests.ops.kernels.device import DEVICE, needs_kernels, on_gpu

from musespark.ops.linear import linear
from musespark.ops.skinny_linear import MAX_TOKENS, _strip, skinny_linear_triton, takes

pytestmark = needs_kernels


@pytest.mark.parametrize(
    ("tokens", "rows", "width"),
    [
        (0, 64, 640),
        (1, 64, 640),
        (5, 70, 1024),
        (16, 1, 128),
        (3, 140, 256),
        *on_gpu((1, 18432, 8192), (16, 4096, 8192), (7, 8192, 4096)),
    ],
)
def test_product(tokens, rows, width):
    x = randn(tokens, width + 8, dtype=BF16, seed=1)[:, :width]
    weight = randn(rows, width, dtype=BF16, seed=2)
    out = skinny_linear_triton(x.to(DEVICE), weight.to(DEVICE)).cpu()
    exact = x.to(F64) @ weight.to(F64).T
    assert_rounded_once(out, exact, x.to(F64).abs() @ weight.to(F64).abs().T)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, MAX_TOKENS, MAX_TOKENS + 1])
def test_linear_takes_it_where_it_pays(tokens):
    x, weight = randn(tokens, 4096, dtype=BF16, seed=1), randn(4096, 4096, dtype=BF16, seed=2)
    out = linear(weight.cuda())(x.cuda()).cpu()
    exact = x.to(F64) @ weight.to(F64).T
    assert_rounded_once(out, exact, x.to(F64).abs() @ weight.to(F64).abs().T)


@pytest.mark.parametrize("num_rows", [1, 2304, 4096, 8192, 9216, 18432, 20000])
def test_programs_of_a_long_weight_take_equal_shares_in_one_round(num_rows):
    rows, more = _strip(num_rows, 132)
    programs = -(-num_rows // (rows + more))
    assert programs <= 132
    assert rows + more == 64 or programs > 104


def test_leaves_other_weights_to_the_library():
    assert not takes(torch.empty(8192, 8192, dtype=BF16))
    assert not takes(torch.empty(64, 128, dtype=BF16, device=DEVICE))
    assert not takes(torch.empty(4096, 4096, dtype=torch.float32, device=DEVICE))
