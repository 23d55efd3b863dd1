"""The compressed block against a loop over tokens and their experts, in float64."""

import pytest
import torch
from safetensors.torch import load_file
from tests.ops.accuracy import BF16, F32, F64, randn
from tests.ops.test_rms_norm import exact_norm

from musespark import load_decoder
from musespark.moe.block import CompressedMoE
from musespark.ops import small_experts
from musespark.parallel.placement import Replicated
from musespark.testing import make_checkpoint


@pytest.fixture(autouse=True, params=["small", "large"])
def expert_size(request, monkeypatch):
    """Tiny experts take a path of their own on a CPU; here they also pass for large ones."""
    if request.param == "large":
        monkeypatch.setattr(small_experts, "_MAX_EXPERT_BYTES", 0)


MLP = "model.language_model.layers.0.mlp."


def make(folder, dtype, *, per_expert=False, **overrides):
    """(the block of a one-layer model, its weights in float64, the config)."""
    make_checkpoint(
        folder, dtype=BF16, per_expert=per_expert, num_hidden_layers=1, seed=3, **overrides
    )
    decoder = load_decoder(folder, dtype=dtype)
    block = decoder.layers[0].mlp
    assert isinstance(block, CompressedMoE)
    whole = make_checkpoint(
        folder.with_name("whole"), dtype=BF16, num_hidden_layers=1, seed=3, **overrides
    )
    tensors = load_file(whole / "model.safetensors")
    weights = {
        name.removeprefix(MLP): tensor.to(F64)
        for name, tensor in tensors.items()
        if name.startswith(MLP)
    }
    return block, weights, decoder.config


def silu(x):
    return x / (1 + torch.exp(-x))


def exact_block(hidden, weights, config):
    """Equations of the block, one route after the other."""
    rows = []
    for f in hidden.to(F64):
        p = torch.sigmoid(weights["gate.weight"] @ f * config.output_multiplier)
        biased = p + weights["gate.e_score_correction_bias"]
        ids = biased.topk(config.num_experts_per_tok).indices
        w = p[ids] / (p[ids].sum() + 1e-15) * config.routed_scaling_factor
        h = exact_norm(
            weights["pre_expert_proj.weight"] @ f,
            1 + weights["pre_expert_norm.weight"],
            config.rms_norm_eps,
        )
        m = torch.zeros_like(h)
        for weight, expert in zip(w, ids.tolist(), strict=True):
            gate, up = (weights["experts.gate_up_proj"][expert] @ h).chunk(2)
            y = weights["experts.down_proj"][expert] @ (silu(gate) * up)
            gain = 1 + weights["experts.post_expert_norm.weight"]
            m += weight * exact_norm(y, gain, config.post_norm_eps, scale_input=True)
        rows.append(weights["post_expert_proj.weight"] @ m)
    return torch.stack(rows) if rows else hidden.to(F64)


# Root mean square error relative to the output: bfloat16 rounds five times on the way.
TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 1e-2}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 8, "routed_scaling_factor": 2.5},
        {"num_local_experts": 64, "num_experts_per_tok": 3},
        {"num_local_experts": 1, "num_experts_per_tok": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [0, 1, 2, 50])
def test_equals_the_loop(dtype, overrides, tokens, tmp_path):
    """Few tokens and many take different paths through the experts; most experts may be idle."""
    block, weights, config = make(tmp_path / "model", dtype, **overrides)
    hidden = randn(tokens, 64, seed=7).to(getattr(torch, dtype))
    exact = exact_block(hidden, weights, config)
    for packed in (False, True):
        if packed:
            for module in block.modules():
                if module is not block and hasattr(module, "pack"):
                    module.pack()
        actual = block(hidden)
        assert actual.shape == hidden.shape
        assert actual.dtype == hidden.dtype
        if tokens:
            error = (actual.to(F64) - exact).square().mean().sqrt()
            assert error <= TOLERANCE[dtype] * exact.square().mean().sqrt()


def test_experts_stored_one_by_one(tmp_path):
    block, weights, config = make(tmp_path / "model", "float32", per_expert=True)
    hidden = randn(9, 64, seed=7)
    exact = exact_block(hidden, weights, config)
    assert (block(hidden) - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_padding_rows_touch_nothing(dtype, tokens, tmp_path):
    block, _, _ = make(tmp_path / "model", dtype)
    hidden = randn(tokens, 64, seed=7).to(getattr(torch, dtype))
    padding = torch.arange(tokens) % 3 == 1
    poisoned = hidden.masked_fill(padding[:, None], float("nan"))
    out = block(poisoned, Replicated(padding=padding))
    assert not out[padding].any()
    alone = block(hidden[~padding])
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert (out[~padding] - alone).abs().max() <= tolerance * alone.abs().max()


def test_nothing_but_padding(tmp_path):
    block, _, _ = make(tmp_path / "model", "bfloat16")
    nan = torch.full((3, 64), float("nan"), dtype=BF16)
    out = block(nan, Replicated(padding=torch.ones(3, dtype=torch.bool)))
    assert torch.equal(out, torch.zeros(3, 64, dtype=BF16))


def test_weights_stay_in_their_dtypes(tmp_path):
    block, _, _ = make(tmp_path / "model", "bfloat16")
    dtypes = {name: parameter.dtype for name, parameter in block.named_parameters()}
    assert dtypes["gate.weight"] == dtypes["gate.e_score_correction_bias"] == F32
    assert dtypes["pre_expert_proj.weight"] == BF16
