"""The decoder on Triton's kernels, against the decoder on plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from tests.ops.kernels.device import DEVICE, needs_kernels

from musespark.llm.loading import load_decoder
from musespark.model.batch import AttentionMetadata, ForwardBatch
from musespark.model.kv_cache import KVCacheSpec, allocate_kv_cache
from musespark.ops import kernel_set
from musespark.ops.attention_decode import decode_mask
from musespark.testing.checkpoints import make_checkpoint

pytestmark = needs_kernels

BLOCK_SIZE, BLOCKS = 4, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=3)


@pytest.fixture(scope="module")
def decoders(folder):
    """(on plain PyTorch, on kernels), in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_set, "HAS_TRITON", False)
        plain = load_decoder(folder, device=DEVICE, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_set, "torch_kernels", kernel_set.triton_kernels)
        kernels = load_decoder(folder, device=DEVICE, dtype=torch.float32)
    assert plain.kernels is kernel_set.torch_kernels()
    assert kernels.kernels is kernel_set.triton_kernels()
    return plain, kernels


def make_batch(new, seq_lens):
    """A step of sequences with `new` tokens each, those with one first."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3))
    width = -(-max(seq_lens) // BLOCK_SIZE)
    table = order[: len(new) * width].view(len(new), width)
    positions = torch.cat([torch.arange(n - c, n) for c, n in zip(new, seq_lens, strict=True)])
    row = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    slots = table[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    decodes = sum(count == 1 for count in new)
    lengths, starts = torch.tensor(seq_lens[:decodes]), torch.zeros(decodes, dtype=torch.int64)

    def metadata(window):
        return AttentionMetadata(
            block_table=table.to(DEVICE),
            key_start=(0,) * len(new),
            slot_mapping=slots.to(DEVICE),
            decode_table=table[:decodes].to(DEVICE),
            decode_mask=decode_mask(table[:decodes], BLOCK_SIZE, starts, lengths, window).to(
                DEVICE
            ),
        )

    return ForwardBatch(
        token_ids=(torch.arange(len(positions)) * 37 % 128).to(DEVICE),
        positions=positions.to(DEVICE),
        query_start=tuple(sum(new[:i]) for i in range(len(new) + 1)),
        seq_lens=tuple(seq_lens),
        num_decodes=decodes,
        full=metadata(None),
        sliding=metadata(8),
        logit_rows=None,
    )


def new_caches(decoder):
    spec = KVCacheSpec(BLOCK_SIZE, BLOCKS, BLOCKS)
    caches = allocate_kv_cache(decoder.config, spec, dtype=torch.float32, device=DEVICE)
    for index, layer in enumerate(caches):
        generator = torch.Generator().manual_seed(index)
        layer.key.copy_(torch.randn(layer.key.shape, generator=generator))
        layer.value.copy_(torch.randn(layer.value.shape, generator=generator))
    return caches


@pytest.mark.parametrize(
    ("new", "seq_lens"), [([1, 1], [9, 14]), ([7], [7]), ([1, 5, 3], [12, 11, 3])]
)
def test_steps_are_the_same(decoders, new, seq_lens):
    plain, kernels = decoders
    batch = make_batch(new, seq_lens)
    caches = new_caches(plain), new_caches(kernels)
    (one, taps), (other, other_taps) = (
        decoder.forward_with_taps(batch, caches[index], (-1, 0, 2))
        for index, decoder in enumerate(decoders)
    )
    assert torch.allclose(one, other, atol=2e-4)
    for tap, other_tap in zip(taps, other_taps, strict=True):
        assert torch.allclose(tap, other_tap, atol=1e-4)
    for layer, other_layer in zip(*caches, strict=True):
        assert torch.allclose(layer.key, other_layer.key, atol=1e-5)
        assert torch.allclose(layer.value, other_layer.value, atol=1e-5)


def test_without_a_cache(decoders):
    plain, kernels = decoders
    ids = torch.arange(9) * 13 % 128
    one, other = plain.compute_logits(ids), kernels.compute_logits(ids)
    assert torch.allclose(one, other, atol=2e-4)


def padded(batch, count):
    """The same step with `count` rows of padding behind it."""

    def longer(tensor, value):
        return torch.cat((tensor, tensor.new_full((count, *tensor.shape[1:]), value)))

    def metadata(given):
        on_device = kernel_set.triton_kernels().sequences_on_device(
            tuple(range(size + 1)), (*batch.seq_lens, *(0,) * count), (0,) * size, DEVICE
        )
        return replace(
            given,
            block_table=longer(given.block_table, 0),
            key_start=(0,) * size,
            slot_mapping=longer(given.slot_mapping, -1),
            on_device=on_device,
        )

    size = len(batch.seq_lens) + count
    return replace(
        batch,
        token_ids=longer(batch.token_ids, 5),
        positions=longer(batch.positions, 0),
        query_start=tuple(range(size + 1)),
        seq_lens=(*batch.seq_lens, *(0,) * count),
        num_decodes=size,
        full=metadata(batch.full),
        sliding=metadata(batch.sliding),
        padding=torch.arange(size, device=DEVICE) >= size - count,
    )


def test_padding_rows_touch_nothing(decoders):
    _, kernels = decoders
    batch = make_batch([1, 1], [9, 14])
    caches, padded_caches = new_caches(kernels), new_caches(kernels)
    alone = kernels(batch, caches)
    together = kernels(padded(batch, 2), padded_caches)
    assert torch.allclose(together[:2], alone, atol=1e-5)
    assert bool(together.isfinite().all())
    for layer, other_layer in zip(caches, padded_caches, strict=True):
        for one, other in ((layer.key, other_layer.key), (layer.value, other_layer.value)):
            one, other = one.flatten(0, 1), other.flatten(0, 1)
            slots = batch.full.slot_mapping
            assert torch.allclose(one[slots], other[slots], atol=1e-5)
            one[slots] = other[slots] = 0
            assert torch.equal(one, other)
