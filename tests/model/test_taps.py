"""Taps: the stream behind chosen layers, of every token, without a change to anything else."""

import pytest
import torch
from tests.engine.harness import layout_for
from tests.model.test_kernel_decoder import make_batch
from tests.ops.kernels.device import DEVICE

from musespark import load_decoder
from musespark.engine.runner import ModelRunner, OneByOneRunner
from musespark.model.batch import ForwardBatch
from musespark.model.kv_cache import KVCacheSpec
from musespark.testing import make_checkpoint

ALL = (-1, 0, 1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("taps") / "model", mlp_layer_types=["dense", "sparse"] * 3
    )


def token_ids(count):
    return torch.randint(128, (count,), generator=torch.Generator().manual_seed(count))


def unfused(decoder, ids):
    """[num_layers + 1] streams, layer by layer, every boundary as a blend and then a norm."""
    batch = ForwardBatch.uncached(ids)
    angles = decoder._rotary_angles(batch.positions)
    embedded = decoder.embed_tokens(ids)
    stream = embedded / (embedded.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    streams = [stream]
    for layer, kind in zip(decoder.layers, decoder.config.layers, strict=True):
        normed = layer.input_layernorm(streams[-1], out_dtype=decoder.dtype)
        streams.append(layer(normed, streams[-1], None, None, angles[kind.rope_theta]).blend())
    return streams


@pytest.mark.parametrize("taps", [ALL, (-1,), (5,), (0, 3), ()])
def test_a_tap_is_the_layers_output_blended_and_not_normed(folder, taps):
    decoder = load_decoder(folder, dtype="float64")
    ids = token_ids(21)
    logits, found = decoder.forward_with_taps(ForwardBatch.uncached(ids), None, taps)
    streams = unfused(decoder, ids)
    assert torch.equal(logits, decoder.compute_logits(ids))
    assert len(found) == len(taps)
    for tap, stream in zip(taps, found, strict=True):
        assert (stream - streams[tap + 1]).abs().max() < 1e-12


def test_taps_are_float32_and_of_all_tokens_in_bfloat16_too(folder):
    decoder = load_decoder(folder, device=DEVICE, dtype="bfloat16")
    runner = ModelRunner(decoder, KVCacheSpec(4, 24, 24), tap_layers=(-1, 2))
    batch = make_batch([1, 5, 3], [12, 11, 3])
    logits, taps = runner.run(batch)
    assert logits.shape == (9, 128)
    assert [(tap.shape, tap.dtype) for tap in taps] == [((9, 64), torch.float32)] * 2
    assert not any(torch.equal(tap, tap.bfloat16().float()) for tap in taps)


def test_one_by_one_gives_the_taps_of_all_sequences_in_order(folder):
    decoder = load_decoder(folder, device=DEVICE, dtype="float64")
    layout = layout_for(decoder, 4, 24)
    spec = KVCacheSpec(4, layout.num_full_blocks, layout.num_sliding_blocks)
    batch = make_batch([1, 5, 3], [12, 11, 3])
    together, alone = (
        kind(decoder, spec, tap_layers=(0, 5)).run(batch)[1]
        for kind in (ModelRunner, OneByOneRunner)
    )
    for one, other in zip(together, alone, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_a_layer_that_is_not_there_is_no_tap(folder):
    decoder = load_decoder(folder, dtype="float32")
    for taps in ((6,), (-2,), (3, 1), (1, 1)):
        with pytest.raises(AssertionError):
            decoder.forward_with_taps(ForwardBatch.uncached(token_ids(3)), None, taps)
