"""The decoder's own promises: causality, dtypes, and the order of its steps."""

import pytest
import torch
from tests.ops.accuracy import F64

from musespark import load_decoder
from musespark.model.residual import ResidualGate, ResidualStream
from musespark.modules.norms import CentredRMSNorm, WeightFirstRMSNorm
from musespark.testing import make_checkpoint, tiny_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("decoder") / "model"
    return make_checkpoint(path, mlp_layer_types=["dense", "sparse"] * 3)


def random_tokens(count, seed=0):
    return torch.randint(128, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "logits"),
    [
        ("bfloat16", torch.float32),
        ("float32", torch.float32),
        ("float64", torch.float64),
    ],
)
def test_logits_are_wide_and_capped(folder, dtype, logits):
    out = load_decoder(folder, dtype=dtype).compute_logits(random_tokens(9))
    assert out.shape == (9, 128)
    assert out.dtype == logits
    assert out.abs().max() < 20
    assert not out.requires_grad


@pytest.mark.parametrize("packed", [False, True])
def test_the_vocabulary_projection_is_not_rounded_to_bfloat16(folder, packed):
    decoder = load_decoder(folder, dtype="bfloat16")
    if packed:
        decoder.pack()
    cap, multiplier = decoder.config.final_logit_softcapping, decoder.config.output_multiplier
    logits = decoder.compute_logits(random_tokens(30)).double()
    scores = torch.atanh(logits / cap) * cap / multiplier
    relative = (scores.to(torch.bfloat16).double() - scores).abs() / scores.abs()
    # On the grid of bfloat16, scores would be within 1e-6 of it: what tanh leaves of them.
    assert relative.median() > 5e-4


def test_tokens_see_only_what_is_before_them(folder):
    decoder = load_decoder(folder, dtype="float64")
    tokens = random_tokens(24)
    whole = decoder.compute_logits(tokens)
    for length in (1, 7, 8, 9, 23):
        assert (decoder.compute_logits(tokens[:length]) - whole[:length]).abs().max() < 1e-12
    changed = tokens.clone()
    changed[12] = (changed[12] + 1) % 128
    difference = (decoder.compute_logits(changed) - whole).abs().amax(dim=1)
    assert difference[:12].max() < 1e-12
    assert difference[12] > 1e-3


def test_lists_and_tensors_of_token_ids(folder):
    decoder = load_decoder(folder, dtype="float32")
    tokens = random_tokens(5)
    assert torch.equal(decoder.compute_logits(tokens.tolist()), decoder.compute_logits(tokens))
    assert torch.equal(
        decoder.compute_logits(tokens.to(torch.int32)), decoder.compute_logits(tokens)
    )


def test_no_tokens_no_logits(folder):
    assert load_decoder(folder, dtype="float32").compute_logits([]).shape == (0, 128)


def test_per_expert_files_hold_the_same_model(folder, tmp_path):
    apart = make_checkpoint(
        tmp_path / "apart", mlp_layer_types=["dense", "sparse"] * 3, per_expert=True
    )
    tokens = random_tokens(12)
    expected = load_decoder(folder, dtype="float32").compute_logits(tokens)
    assert torch.equal(load_decoder(apart, dtype="float32").compute_logits(tokens), expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_deferred_boundary_is_blend_then_norm(weighted, dtype):
    config = tiny_config()
    width = config.hidden_size
    gate = ResidualGate(config, dtype=dtype, device=CPU)
    pre = CentredRMSNorm(width, 1e-5, dtype=dtype, device=CPU)
    post = WeightFirstRMSNorm(width, 1e-8, dtype=dtype, device=CPU) if weighted else None
    torch.manual_seed(0)
    gate.gate.copy_(torch.randn(width))
    for module in filter(None, (pre, post)):
        module.weight.copy_(0.3 * torch.randn(width))
        module.finish_loading()
    gate.finish_loading()
    pending = ResidualStream(
        stream=torch.randn(5, width),
        branch=torch.randn(5, width).to(dtype),
        gate=gate,
        post_norm=post,
        post_eps=1e-8,
    )
    normed, stream = pending.boundary(pre)
    assert stream.dtype == torch.float32
    assert normed.dtype == dtype
    assert torch.equal(stream, pending.blend())
    assert torch.equal(normed, pre(stream, out_dtype=dtype))
    # beta of the branch and sqrt(1 - beta^2) of the stream, in float64.
    beta = torch.sigmoid(gate.gate.to(F64) / config.residual_gate_temperature)
    alpha = (1 - beta.square()).clamp_min(1e-3).sqrt()
    branch = pending.branch.to(F64) * (1 if post is None else 1 + post.weight.to(F64))
    branch = branch / (branch.square().mean(-1, keepdim=True) + 1e-8).sqrt()
    expected = alpha * pending.stream.to(F64) + beta * branch
    assert (stream - expected).abs().max() < 1e-5
