"""What the graph of a step reads and writes, with a stand-in that calls again what it recorded.

On a GPU tests/gpu runs real graphs.
"""

from bisect import bisect_left
from dataclasses import replace

import pytest
import torch
from tests.model.test_kernel_decoder import BLOCK_SIZE, BLOCKS, make_batch, new_caches
from tests.ops.kernels.device import DEVICE, needs_kernels

from musespark.engine.cuda_graph import DecodeGraphs
from musespark.engine.executor import InProcessExecutor
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.trial_steps import record_decode_steps
from musespark.llm.loading import load_decoder
from musespark.model.decoder import Decoder
from musespark.model.kv_cache import KVCacheSpec
from musespark.ops import kernel_set
from musespark.ops.graph_recorder import SIZES
from musespark.testing.checkpoints import make_checkpoint

pytestmark = needs_kernels

TAPS = (-1, 0)
SPEC = KVCacheSpec(BLOCK_SIZE, BLOCKS, BLOCKS)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_set, "torch_kernels", kernel_set.triton_kernels)
        return load_decoder(folder, device=DEVICE, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _records_anything(monkeypatch):
    """A stand-in does not mind that experts on a CPU ask for numbers."""
    monkeypatch.setattr(Decoder, "can_record", lambda _self, _num_tokens: True)


class CallsAgain:
    """A `Recorder` whose graphs fill the tensors of the first call, as a graph does."""

    def __init__(self):
        self.num_recorded = 0

    def record(self, forward):
        self.num_recorded += 1
        logits, taps = forward()
        assert bool(logits.isfinite().all())

        def replay():
            again, taps_again = forward()
            logits.copy_(again)
            for mine, other in zip(taps, taps_again, strict=True):
                mine.copy_(other)

        return replay, (logits, taps)


def new_graphs(decoder, caches, recorder, max_rows=6):
    graphs = DecodeGraphs(
        decoder, caches, SPEC, tap_layers=TAPS, max_rows=max_rows, recorder=recorder
    )
    # In these batches the tables of sliding layers are whole.
    graphs._sliding_table = graphs._full_table.clone()
    return graphs


STEPS = [([1, 1, 1], [9, 14, 3]), ([1, 4, 2], [12, 11, 7]), ([3, 2], [9, 14]), ([1], [7])]


def test_a_graph_does_what_the_steps_do(decoder):
    """One after the other, so that each finds what the ones before have left in its inputs."""
    recorder = CallsAgain()
    caches, graph_caches = new_caches(decoder), new_caches(decoder)
    graphs = new_graphs(decoder, graph_caches, recorder)
    for new, seq_lens in STEPS:
        batch = make_batch(new, seq_lens)
        assert graphs.accepts(batch)
        logits, taps = decoder.forward_with_taps(batch, caches, TAPS)
        replayed, replayed_taps = graphs.run(batch)
        assert torch.allclose(replayed, logits, atol=1e-4)
        for tap, replayed_tap in zip(taps, replayed_taps, strict=True):
            assert torch.allclose(replayed_tap, tap, atol=1e-4)
        for layer, graph_layer in zip(caches, graph_caches, strict=True):
            # Padding writes nothing.
            assert torch.allclose(layer.key, graph_layer.key, atol=1e-5)
            assert torch.allclose(layer.value, graph_layer.value, atol=1e-5)
    rows = torch.tensor([0], device=DEVICE)
    wanted, _ = graphs.run(replace(batch, logit_rows=rows))
    assert torch.allclose(wanted, logits[rows], atol=1e-4)
    # Sizes 1 and 4 for plain steps, 8 for those that verify.
    assert recorder.num_recorded == 3


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_tokens", "most_rows"), [(50, 2048, 1), (64, 2048, 6), (3, 8, 4)]
)
def test_every_size_is_recorded_ahead(decoder, max_num_seqs, max_num_tokens, most_rows):
    recorder = CallsAgain()
    graphs = new_graphs(decoder, new_caches(decoder), recorder, max_rows=most_rows)
    layout = CacheLayout(BLOCK_SIZE, BLOCKS, BLOCKS, decoder.config.sliding_window)
    kinds = set()

    class Runner:
        device = DEVICE

        def run(self, batch):
            assert graphs.accepts(batch)
            assert batch.query_start[-1] <= max_num_tokens
            is_plain = len(batch.seq_lens) == batch.query_start[-1]
            kinds.add((SIZES[bisect_left(SIZES, batch.query_start[-1])], is_plain))
            return torch.empty(batch.query_start[-1], 1, device=DEVICE), ()

    executor = InProcessExecutor(Runner(), layout, max_num_seqs, with_masks=False)
    record_decode_steps(executor, layout, max_num_seqs, max_num_tokens, most_rows)
    most_verified = min(max_num_seqs, max_num_tokens // most_rows, SIZES[-1] // most_rows)
    for tokens, is_plain in [(n, True) for n in range(1, max_num_seqs + 1)] + [
        (n, False) for n in range(2, most_verified * most_rows + 1) if most_rows > 1
    ]:
        assert (SIZES[bisect_left(SIZES, tokens)], is_plain) in kinds


def test_other_steps_are_left_alone(decoder):
    graphs = new_graphs(decoder, new_caches(decoder), CallsAgain(), max_rows=4)
    assert graphs.accepts(make_batch([1, 4], [9, 14]))
    assert not graphs.accepts(make_batch([1, 5], [9, 14]))  # a prompt's chunk
    assert not new_graphs(decoder, new_caches(decoder), CallsAgain(), max_rows=1).accepts(
        make_batch([1, 2], [9, 14])
    )
    wide = make_batch([1, 4], [9, 14])
    graphs._full_table = graphs._full_table[:, :1]
    assert not graphs.accepts(wide)
