import pytest
import torch
from tests.ops.accuracy import BF16, F32, randn

from musespark.ops.kv_write import kv_write


def caches(dtype=F32):
    key = randn(5, 4, 2, 8, dtype=dtype, seed=8)
    return key, randn(5, 4, 2, 8, dtype=dtype, seed=9)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("padding", [0, 3])
def test_writes_its_slots_and_nothing_else(tokens, padding):
    key, value = randn(tokens + padding, 2, 8), randn(tokens + padding, 2, 8, seed=1)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:tokens]
    key_cache, value_cache = caches()
    expected = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        expected[0][slot // 4, slot % 4] = key[token]
        expected[1][slot // 4, slot % 4] = value[token]
    kv_write(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


def test_non_contiguous_rows_and_a_cache_of_another_dtype():
    fused = randn(3, 6, 8)
    key_cache, value_cache = caches(BF16)
    kv_write(fused[:, :2], fused[:, 4:], key_cache, value_cache, torch.tensor([19, 0, 6]))
    assert torch.equal(key_cache[4, 3], fused[0, :2].to(BF16))
    assert torch.equal(value_cache[0, 0], fused[1, 4:].to(BF16))
    assert torch.equal(value_cache[1, 2], fused[2, 4:].to(BF16))


def test_an_eight_bit_cache_saturates():
    values = torch.tensor([0.0, 1.0, -448.0, 460.0, 1e6, -1e9, float("inf"), 2.0**-9])
    rows = values.view(1, 1, 8).expand(2, 2, 8).contiguous()
    key_cache = torch.zeros(5, 4, 2, 8, dtype=torch.float8_e4m3fn)
    value_cache = torch.zeros_like(key_cache)
    kv_write(rows, -rows, key_cache, value_cache, torch.tensor([3, 17]))
    expected = torch.tensor([0.0, 1.0, -448.0, 448.0, 448.0, -448.0, 448.0, 2.0**-9])
    assert torch.equal(key_cache[0, 3].float(), expected.expand(2, 8))
    assert torch.equal(value_cache[4, 1].float(), -expected.expand(2, 8))
    assert not key_cache.float()[1:4].any()
