"""Steps that are run before there are requests fit any cache, however small."""

import pytest
import torch
from tests.engine.harness import runner_for

from musespark.engine.executor import InProcessExecutor
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.trial_steps import warm_up
from musespark.llm.loading import load_decoder
from musespark.testing.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=2)
    return load_decoder(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_tokens", "full", "sliding"),
    [(8, 600, 200, 200), (1, 600, 160, 9), (3, 600, 7, 7), (2, 300, 40, 4)],
)
def test_warming_up(decoder, max_num_seqs, max_num_tokens, full, sliding):
    layout = CacheLayout(4, full, sliding, decoder.config.sliding_window)
    runner = runner_for(decoder, layout)
    steps = []

    class Watched:
        device = runner.device

        def run(self, batch):
            logits, taps = runner.run(batch)
            assert bool(logits.isfinite().all())
            steps.append((batch.query_start[-1], len(batch.seq_lens)))
            return logits, taps

    executor = InProcessExecutor(Watched(), layout, max_num_seqs)
    warm_up(executor, layout, max_num_seqs, max_num_tokens)
    assert all(t <= max_num_tokens and n <= max_num_seqs for t, n in steps)
    longest = min(full, sliding) * layout.block_size
    reached = min(max_num_tokens, max_num_seqs * longest)
    assert max(steps)[0] > reached - longest
    assert min(steps) == (1, 1)
