import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, randn
from tests.ops.test_rms_norm import exact_norm

from musespark.modules.norms import CentredRMSNorm, RMSNorm, WeightFirstRMSNorm

CPU = torch.device("cpu")
WIDTH, EPS = 48, 1e-5


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize(
    ("kind", "offset", "scale_input"),
    [(RMSNorm, 0, False), (CentredRMSNorm, 1, False), (WeightFirstRMSNorm, 1, True)],
)
def test_each_kind_weighs_in_its_own_way(kind, offset, scale_input, dtype):
    norm = kind(WIDTH, EPS, dtype=dtype, device=CPU)
    # 1 + w in bfloat16 would lose most of such weights.
    weight = (1 - offset) + 0.003 * randn(WIDTH, seed=1)
    norm.weight.copy_(weight)
    norm.finish_loading()
    x = randn(6, WIDTH, dtype=dtype)
    gain = norm.weight.to(F64) + offset
    assert norm(x).dtype == dtype
    assert_rounded_once(norm(x), exact_norm(x, gain, EPS, scale_input))
    if dtype == BF16:
        assert_rounded_once(norm(x, out_dtype=F32), exact_norm(x, gain, EPS, scale_input))


def test_the_gain_is_kept_in_float32_and_out_of_checkpoints():
    norm = CentredRMSNorm(WIDTH, EPS, dtype=BF16, device=CPU)
    assert norm.gain.dtype == F32
    assert list(norm.state_dict()) == ["weight"]
