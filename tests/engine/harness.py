"""A small engine around a real decoder, and what its runner saw."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from musespark.config.sampling import SamplingParams
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.executor import InProcessExecutor, Runner
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.request import FinishReason, TokenLogprobs
from musespark.engine.runner import ModelRunner
from musespark.model.batch import ForwardBatch
from musespark.model.decoder import Decoder
from musespark.model.kv_cache import KVCacheSpec

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@dataclass
class Finished:
    """All that the engine reported about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class AllLogitsRunner:
    """Computes the logits of every token of a batch, keeps them, and hands out the wanted rows."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.positions: list[int] = []
        self.rows: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert batch.logit_rows is not None
        logits, taps = self._inner.run(dataclasses.replace(batch, logit_rows=None))
        self.positions += batch.positions.tolist()
        self.rows += logits.clone().unbind(0)
        return logits.index_select(0, batch.logit_rows), taps

    def logits(self) -> Tensor:
        """[T, V] of one request that was never preempted, in order of position."""
        assert sorted(self.positions) == list(range(len(self.positions)))
        order = sorted(range(len(self.rows)), key=self.positions.__getitem__)
        return torch.stack([self.rows[row] for row in order])


def layout_for(decoder: Decoder, block_size: int, num_blocks: int) -> CacheLayout:
    """As many blocks for each kind of layers that the decoder has."""
    kinds = {layer.attention for layer in decoder.config.layers}
    return CacheLayout(
        block_size=block_size,
        num_full_blocks=num_blocks if "full_attention" in kinds else 0,
        num_sliding_blocks=num_blocks if "sliding_attention" in kinds else 0,
        sliding_window=decoder.config.sliding_window,
    )


def runner_for(decoder: Decoder, layout: CacheLayout, *, stale: float = 0.0) -> ModelRunner:
    """A runner whose cache is filled with `stale` numbers of both signs first."""
    spec = KVCacheSpec(layout.block_size, layout.num_full_blocks, layout.num_sliding_blocks)
    runner = ModelRunner(decoder, spec)
    if stale:
        for cache in runner._caches:
            for part in (cache.key, cache.value):
                part.uniform_(-stale, stale)
    return runner


def engine_for(
    runner: Runner,
    layout: CacheLayout,
    *,
    vocab_size: int,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    eos_token_ids: Sequence[int] = (),
    depth: int = 1,
    runs_ahead: bool = False,
) -> Engine:
    """An engine with limits that tests need not name."""
    limits = EngineLimits(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        eos_token_ids=frozenset(eos_token_ids),
    )
    executor = InProcessExecutor(runner, layout, max_num_seqs, depth=depth, runs_ahead=runs_ahead)
    return Engine(executor, layout, limits)


def finish(engine: Engine, results: dict[int, Finished] | None = None) -> dict[int, Finished]:
    """Step until nothing is left; request id -> what it produced."""
    results = {} if results is None else results
    while engine.has_work:
        step(engine, results)
    return results


def step(engine: Engine, results: dict[int, Finished]) -> None:
    """One step, its tokens added to `results`, blocks accounted for after it."""
    for token in engine.step():
        result = results.setdefault(token.request_id, Finished())
        assert result.finish_reason is None, "a token after the end"
        result.token_ids.append(token.token_id)
        result.logprobs.append(token.logprobs)
        result.finish_reason = token.finish_reason
    engine.scheduler.check_integrity()


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    *,
    block_size: int = 4,
    num_blocks: int = 256,
    stale: float = 0.0,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
) -> list[list[int]]:
    """Tokens of all prompts, run together through the paged cache."""
    layout = layout_for(decoder, block_size, num_blocks)
    engine = engine_for(
        runner_for(decoder, layout, stale=stale),
        layout,
        vocab_size=decoder.config.vocab_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    results = finish(engine)
    return [results[request_id].token_ids for request_id in ids]


def cached_logits(
    decoder: Decoder,
    token_ids: Sequence[int],
    *,
    prompt_len: int,
    block_size: int = 4,
    chunk: int = 64,
    stale: float = 0.0,
) -> tuple[list[int], Tensor]:
    """Greedy continuation of the first `prompt_len` tokens to the length of `token_ids`.

    Returns:
        (all tokens, their logits [T - 1, V] as the paged cache gave them).
    """
    layout = layout_for(decoder, block_size, 256)
    runner = AllLogitsRunner(runner_for(decoder, layout, stale=stale))
    engine = engine_for(
        runner,
        layout,
        vocab_size=decoder.config.vocab_size,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
    )
    prompt = list(token_ids[:prompt_len])
    params = dataclasses.replace(GREEDY, max_tokens=len(token_ids) - prompt_len)
    request_id = engine.add_request(prompt, params)
    tokens = finish(engine)[request_id].token_ids
    return prompt + tokens, runner.logits()
