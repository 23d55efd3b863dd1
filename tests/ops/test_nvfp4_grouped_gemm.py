import pytest
import torch
from tests.ops.accuracy import seeded

from musespark.ops import nvfp4_grouped_gemm as module
from musespark.ops.nvfp4 import dequantize
from musespark.ops.nvfp4_grouped_gemm import nvfp4_grouped_gemm, pack_nvfp4_grouped_gemm

TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-14}


def random_weights(experts, out_features, in_features):
    packed = torch.randint(
        256, (experts, out_features, in_features // 2), generator=seeded(), dtype=torch.uint8
    )
    codes = torch.randint(
        127, (experts, out_features, in_features // 16), generator=seeded(1), dtype=torch.uint8
    )
    return packed, codes.view(torch.float8_e4m3fn)


def expected_rows(x, group_ends, packed, scales):
    weight = dequantize(packed, scales, torch.float64)
    start, parts = 0, []
    for expert, end in enumerate(group_ends):
        parts.append(x[start:end].double() @ weight[expert].T)
        start = end
    return torch.cat(parts)


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


ENDS = [0, 3, 3, 4, 9, 9, 9, 40]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("piece", [2**19, 2048, 1024])
@pytest.mark.parametrize(("out_features", "in_features"), [(32, 48), (96, 64)])
def test_both_forms_equal_the_formula(monkeypatch, dtype, piece, out_features, in_features):
    # A piece takes several experts, one expert, or a part of one.
    monkeypatch.setattr(module, "_PIECE", piece)
    packed, scales = random_weights(len(ENDS), out_features, in_features)
    x = torch.randn(ENDS[-1], in_features, generator=seeded(2)).to(dtype)
    expected = expected_rows(x, ENDS, packed, scales)
    plain = nvfp4_grouped_gemm(packed, scales)(x, ENDS)
    fast = pack_nvfp4_grouped_gemm(packed.clone(), scales.clone())(x, ENDS)
    for found in (plain, fast):
        assert found.dtype == dtype
        assert relative_error(found, expected) < TOLERANCE[dtype]


def test_many_rows_of_small_experts(monkeypatch):
    packed, scales = random_weights(4, 32, 32)
    x = torch.randn(100, 32, generator=seeded(2))
    ends = [10, 10, 90, 100]
    expected = expected_rows(x, ends, packed, scales)
    matmul = pack_nvfp4_grouped_gemm(packed.clone(), scales.clone())
    together = matmul(x, ends)
    monkeypatch.setattr(module, "_SMALL_PRODUCT", 0)
    apart = matmul(x, ends)
    assert relative_error(together, expected) < 1e-6
    assert relative_error(apart, expected) < 1e-6


def test_every_pair_of_codes_survives_packing():
    """Scale s on row s; the sixteen codes along the inputs; every product is exact."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).expand(1, 256, 8).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 256, 1)
    expected = dequantize(packed, scales, torch.float64)[0]
    x = torch.eye(16, dtype=torch.bfloat16)
    found = pack_nvfp4_grouped_gemm(packed.clone(), scales.clone())(x, [16]).double().T
    is_number = ~expected.isnan().any(dim=1)  # 0 * NaN: those rows are NaN as a whole
    assert is_number.sum() == 254
    assert torch.equal(found[is_number], expected[is_number])


def test_packing_happens_in_the_weights_own_memory():
    packed, scales = random_weights(3, 32, 64)
    before = packed.clone(), scales.view(torch.uint8).clone()
    matmul = pack_nvfp4_grouped_gemm(packed, scales)
    assert not torch.equal(packed, before[0])
    # Nothing else holds weights: destroying these bytes destroys the result.
    x = torch.randn(3, 64, generator=seeded())
    assert matmul(x, [1, 2, 3]).count_nonzero() > 0
    packed.zero_()
    assert matmul(x, [1, 2, 3]).count_nonzero() == 0


@pytest.mark.parametrize("form", [nvfp4_grouped_gemm, pack_nvfp4_grouped_gemm])
def test_no_rows(form):
    matmul = form(*random_weights(2, 32, 16))
    assert matmul(torch.empty(0, 16), [0, 0]).shape == (0, 32)


def test_sums_beyond_half_precision_stay_finite():
    packed = torch.full((1, 16, 512), 0x77, dtype=torch.uint8)
    scales = torch.full((1, 16, 64), 448.0).to(torch.float8_e4m3fn)
    x = torch.full((1, 1024), 100.0, dtype=torch.bfloat16)
    found = pack_nvfp4_grouped_gemm(packed, scales)(x, [1])
    assert found.isfinite().all()
    assert found[0, 0].item() == pytest.approx(1024 * 100 * 6 * 448, rel=4e-3)
