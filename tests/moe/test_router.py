import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, randn
from tests.ops.kernels.device import DEVICE, needs_kernels

from musespark.moe.router import Router
from musespark.ops.kernel_set import triton_kernels
from musespark.testing import tiny_config

CPU = torch.device("cpu")


def make_router(dtype=BF16, **overrides):
    config = tiny_config(num_local_experts=12, num_experts_per_tok=3, **overrides)
    router = Router(config, dtype=dtype, device=CPU)
    router.weight.copy_(0.3 * randn(12, 64, seed=1))
    router.e_score_correction_bias.copy_(0.1 * randn(12, seed=2))
    raw = router.weight.clone()
    router.finish_loading()
    return router, raw


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize(("scale", "multiplier"), [(1.0, 0.5), (2.5, 0.1767766952966369)])
def test_scores_in_float32_whatever_the_compute_dtype(dtype, scale, multiplier):
    router, raw = make_router(dtype, routed_scaling_factor=scale, output_multiplier=multiplier)
    hidden = randn(40, 64, dtype=dtype)
    routing = router(hidden)
    assert routing.weights.dtype == (F64 if dtype == F64 else F32)
    scores = torch.sigmoid(hidden.to(F64) @ raw.to(F64).t() * multiplier)
    biased = scores + router.e_score_correction_bias.to(F64)
    assert torch.equal(routing.ids, biased.topk(3).indices)
    chosen = scores.gather(1, routing.ids)
    expected = chosen / chosen.sum(-1, keepdim=True) * scale
    assert torch.allclose(routing.weights.to(F64), expected, rtol=3e-6)


def test_softmax_scoring():
    router, raw = make_router(F32, scoring_func="softmax", output_multiplier=0.5)
    hidden = randn(9, 64)
    scores = (hidden.to(F64) @ raw.to(F64).t() * 0.5).softmax(-1)
    routing = router(hidden)
    ids = (scores + router.e_score_correction_bias.to(F64)).topk(3).indices
    assert torch.equal(routing.ids, ids)
    chosen = scores.gather(1, ids)
    expected = chosen / chosen.sum(-1, keepdim=True)
    assert torch.allclose(routing.weights.to(F64), expected, rtol=3e-6)


@needs_kernels
def test_packing_changes_the_way_and_not_the_choice(monkeypatch):
    monkeypatch.setattr("musespark.moe.router.choose_kernels", lambda *_: triton_kernels())
    router, _ = make_router()
    router.to(DEVICE)
    hidden = randn(65, 64, dtype=BF16).to(DEVICE)
    before = router(hidden)
    router.pack()
    split: list[torch.Tensor] = []
    monkeypatch.setattr("musespark.ops.router_gemm.split_weight", split.append)
    after = router(hidden)
    assert not split
    assert torch.equal(after.ids, before.ids)
    assert torch.equal(after.weights, before.weights)


def test_padding_rows_go_nowhere():
    router, _ = make_router()
    hidden = randn(4, 64, dtype=BF16)
    hidden[1] = float("nan")
    routing = router(hidden, torch.tensor([False, True, False, False]))
    assert routing.ids[1].tolist() == [-1] * 3
    assert routing.weights[1].tolist() == [0.0] * 3
    assert torch.equal(routing.ids[[0, 2, 3]], router(hidden[[0, 2, 3]]).ids)
