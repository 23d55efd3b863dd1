"""Batches that one process ran, run again on many ranks.

What must come out is what the one process computed: its logits, its streams behind chosen layers.
"""

from dataclasses import dataclass, fields, is_dataclass, replace

import torch
import torch.distributed as dist
from tests.engine.harness import GREEDY, engine_for, finish, layout_for, runner_for
from torch import Tensor

from musespark import load_decoder
from musespark.config.parallel import Parallelism
from musespark.engine.runner import ModelRunner
from musespark.model.batch import ForwardBatch
from musespark.model.decoder import Decoder
from musespark.model.kv_cache import KVCacheSpec
from musespark.parallel.mesh import build_mesh

TAPS = (-1, 0, 3, 5)


@dataclass
class Step:
    """One forward pass: its batch, and what it gave."""

    batch: ForwardBatch
    cached: bool
    logits: Tensor
    taps: tuple[Tensor, ...]


@dataclass
class Recording:
    """All steps of one run, and the cache they need."""

    spec: KVCacheSpec
    steps: list[Step]


@dataclass
class Differences:
    """Between what ranks gave and what one process gave; errors in units of the largest value."""

    logits: float = 0.0
    taps: float = 0.0
    typical: float = 0.0
    """The largest of the steps' median errors of the logits."""
    flips: int = 0
    """Steps whose greedy tokens differ."""
    steps: int = 0

    def add(self, logits, expected, taps, expected_taps):
        self.steps += 1
        assert logits.shape == expected.shape
        assert logits.dtype == expected.dtype
        self.flips += not torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1))
        self.logits = max(self.logits, float(_errors(logits, expected).max()))
        self.typical = max(self.typical, float(_errors(logits, expected).median()))
        for pair in zip(taps, expected_taps, strict=True):
            self.taps = max(self.taps, float(_errors(*pair).max()))


def _errors(found, expected):
    if not expected.numel():
        return torch.zeros(1)
    assert found.isfinite().all()
    return (found - expected).abs() / expected.abs().max()


class _Recorder:
    """A runner that keeps what went through it."""

    def __init__(self, inner, steps):
        self._inner, self._steps, self.device = inner, steps, inner.device

    def run(self, batch):
        logits, taps = self._inner.run(batch)
        self._steps.append(Step(batch, True, logits.clone(), taps))
        return logits, taps


def record(decoder: Decoder, lengths, *, prompts=(), chunk=7, max_tokens=5) -> Recording:
    """Uncached sequences of some lengths, then prompts through the cache, in chunks."""
    vocabulary = decoder.config.vocab_size
    generator = torch.Generator().manual_seed(len(lengths))

    def random_tokens(count):
        return torch.randint(vocabulary, (count,), generator=generator)

    steps = []
    for length in lengths:
        batch = ForwardBatch.uncached(random_tokens(length))
        steps.append(Step(batch, False, *decoder.forward_with_taps(batch, None, TAPS)))
    cache = layout_for(decoder, 4, 64)
    runner = runner_for(decoder, cache)
    runner._tap_layers = TAPS
    engine = engine_for(
        _Recorder(runner, steps), cache, vocab_size=vocabulary, max_num_batched_tokens=chunk
    )
    for length in prompts:
        engine.add_request(random_tokens(length).tolist(), replace(GREEDY, max_tokens=max_tokens))
    finish(engine)
    return Recording(KVCacheSpec(4, cache.num_full_blocks, cache.num_sliding_blocks), steps)


def idle(like: Recording, num_steps: int) -> Recording:
    """As many steps without a token."""
    batch = ForwardBatch.uncached(torch.empty(0, dtype=torch.int64))
    step = like.steps[0]
    empty = Step(batch, False, step.logits[:0], tuple(tap[:0] for tap in step.taps))
    return Recording(like.spec, [empty] * num_steps)


def on_device(thing, device):
    """A batch, and all that it holds, on a device."""
    if isinstance(thing, Tensor):
        return thing.to(device)
    if type(thing) is tuple:
        return tuple(on_device(each, device) for each in thing)
    if not is_dataclass(thing) or isinstance(thing, type):
        return thing
    moved = {each.name: on_device(getattr(thing, each.name), device) for each in fields(thing)}
    return replace(thing, **moved)


def replay(rank, settings, folder, recordings, dtype="float32", pack=False, device="cpu"):
    """Run a replica's recording on this rank, and compare.

    Replicas go step by step together; one whose steps are over runs empty ones.

    Returns:
        what differs; None on ranks that hand out nothing.
    """
    return replay_all(rank, settings, [(folder, recordings, dtype, pack, device)])[0]


def replay_all(rank, settings, cases):
    """Several recordings in one layout: each case is what `replay` takes behind the settings."""
    parallelism = Parallelism(**settings)
    mesh = build_mesh(parallelism, rank)
    return [_replay_on(parallelism, mesh, *case) for case in cases]


def _replay_on(parallelism, mesh, folder, recordings, dtype, pack, device):
    decoder = load_decoder(folder, device=device, dtype=dtype, parallelism=parallelism, mesh=mesh)
    if pack:
        decoder.pack()
    recording = recordings[mesh.data.rank % len(recordings)]
    most = max(len(each.steps) for each in recordings)
    steps = recording.steps + idle(recording, most - len(recording.steps)).steps
    runner = ModelRunner(decoder, recording.spec, tap_layers=TAPS)
    found = Differences()
    for step in steps:
        batch = on_device(step.batch, device)
        if step.cached:
            logits, taps = on_device(runner.run(batch), "cpu")
        else:
            logits, taps = on_device(decoder.forward_with_taps(batch, None, TAPS), "cpu")
        if mesh.pipeline.rank != mesh.pipeline.size - 1:
            assert logits.shape == (0, decoder.config.vocab_size)
            assert taps == ()
            continue
        found.add(logits, step.logits, taps, step.taps)
    dist.barrier()  # a message to a slower rank lives as long as the decoder that sent it
    runner.close()
    if mesh.pipeline.rank != mesh.pipeline.size - 1:
        return None
    return found
