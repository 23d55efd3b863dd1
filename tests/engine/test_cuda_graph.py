"""What the graph of a step reads and writes, with a stand-in that calls again what it recorded.

On a GPU tests/gpu runs real graphs.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from tests.model.test_kernel_decoder import BLOCK_SIZE, BLOCKS, make_batch, new_caches
from tests.ops.kernels.device import DEVICE, needs_kernels

from musespark.engine import cuda_graph
from musespark.engine.cuda_graph import StepGraphs
from musespark.engine.executor import InProcessExecutor
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.trial_steps import warm_up
from musespark.llm.loading import load_decoder
from musespark.model.decoder import Decoder
from musespark.model.kv_cache import KVCacheSpec
from musespark.ops import kernel_set
from musespark.ops.graph_recorder import SIZES, padded_size
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
    """A `Recorder` whose graphs compute again, into the tensors that the first call returned."""

    def __init__(self):
        self.num_recorded = 0

    def record(self, forward):
        self.num_recorded += 1
        results = forward()
        assert bool(results[0].isfinite().all())
        return forward, results


def new_graphs(decoder, caches, recorder):
    graphs = StepGraphs(decoder, caches, SPEC, tap_layers=TAPS, recorder=recorder)
    # In these batches the tables of sliding layers are whole.
    graphs._sliding_table = graphs._full_table.clone()
    return graphs


STEPS = [
    ([1, 1, 1], [9, 14, 3]), ([1, 4, 2], [12, 11, 7]), ([3, 2], [9, 14]), ([1, 11], [5, 14]),
    ([1], [7]),
]  # fmt: skip


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
    # Sizes 1 and 4 for plain steps; 8 for those that verify, 16 for one that reads a prompt.
    assert recorder.num_recorded == 4


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_tokens", "num_blocks"),
    [(50, 2048, BLOCKS), (64, 64, BLOCKS), (3, 2048, BLOCKS), (1, 2048, 9), (1, 1, BLOCKS)],
)
def test_every_size_is_run_ahead(decoder, max_num_seqs, max_num_tokens, num_blocks):
    recorder = CallsAgain()
    graphs = new_graphs(decoder, new_caches(decoder), recorder)
    layout = CacheLayout(BLOCK_SIZE, num_blocks, num_blocks, decoder.config.sliding_window)
    kinds, large = set(), set()

    class Runner:
        device = DEVICE

        def run(self, batch):
            tokens = batch.query_start[-1]
            assert tokens <= max_num_tokens
            if tokens > SIZES[-1]:
                large.add(tokens)
                assert len(batch.logit_rows) == len(batch.seq_lens)
                return torch.empty(len(batch.logit_rows), 1, device=DEVICE), ()
            assert graphs.accepts(batch)
            kinds.add((padded_size(tokens), len(batch.seq_lens) == tokens))
            return torch.empty(tokens, 1, device=DEVICE), ()

    executor = InProcessExecutor(Runner(), layout, max_num_seqs, with_masks=False)
    warm_up(executor, layout, max_num_seqs, max_num_tokens)
    for tokens in range(1, min(max_num_seqs, max_num_tokens) + 1):
        assert (padded_size(tokens), True) in kinds
    # A prompt may be as long as the cache.
    most = min(SIZES[-1], max_num_tokens, max_num_seqs * num_blocks * BLOCK_SIZE)
    for tokens in range(2, most + 1):
        assert (padded_size(tokens), False) in kinds, tokens
    longest = num_blocks * BLOCK_SIZE
    for size in (512, 1024, 2048):
        reached = min(size, max_num_seqs * longest)
        if SIZES[-1] < reached and size <= max_num_tokens:
            assert any(reached - longest < tokens <= reached for tokens in large)


def test_graphs_are_gone_when_closed(decoder):
    """At once: a rank keeps the garbage collector from walking through its model."""
    recorded = []

    class Remembers(CallsAgain):
        def record(self, forward):
            recorded.append(weakref.ref(forward))
            return super().record(forward)

    graphs = new_graphs(decoder, new_caches(decoder), Remembers())
    gc.disable()
    try:
        graphs.run(make_batch([1, 1], [9, 14]))
        assert recorded[0]() is not None
        graphs.close()
        assert recorded[0]() is None
    finally:
        gc.enable()


def test_other_steps_are_left_alone(decoder, monkeypatch):
    graphs = new_graphs(decoder, new_caches(decoder), CallsAgain())
    batch = make_batch([1, 4], [9, 14])
    assert graphs.accepts(batch)
    monkeypatch.setattr(cuda_graph, "SIZES", (1, 2, 4))
    assert not graphs.accepts(batch)
    monkeypatch.undo()
    graphs._full_table = graphs._full_table[:, :1]
    assert not graphs.accepts(batch)
