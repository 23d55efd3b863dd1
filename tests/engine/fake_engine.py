"""Engines around the fake model, importable by name so that another process can build one."""

import os
import time
from collections.abc import Callable

import torch
from tests.engine.fake_model import VOCAB_SIZE, FakeModel
from torch import Tensor

from musespark.engine.client import EngineInfo
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.executor import InProcessExecutor
from musespark.engine.kv_blocks import CacheLayout
from musespark.errors import CapacityError
from musespark.model.batch import ForwardBatch

LAYOUT = CacheLayout(block_size=4, num_full_blocks=200, num_sliding_blocks=200, sliding_window=8)
POISON = VOCAB_SIZE - 1
"""A token that some of these models die of."""


class HookedModel:
    """The fake model, with something that happens before each batch."""

    def __init__(self, layout: CacheLayout, hook: Callable[[ForwardBatch], None]) -> None:
        self._model, self._hook = FakeModel(layout), hook

    @property
    def device(self) -> torch.device:
        return self._model.device

    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        self._hook(batch)
        return self._model.run(batch)


def build(step_seconds: float = 0.0, hook: Callable[[ForwardBatch], None] | None = None):
    """An engine whose every step takes at least so long."""

    def before(batch: ForwardBatch) -> None:
        time.sleep(step_seconds)
        if hook is not None:
            hook(batch)

    limits = EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        eos_token_ids=frozenset(),
    )
    info = EngineInfo(
        vocab_size=VOCAB_SIZE,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        eos_token_ids=(),
        block_size=LAYOUT.block_size,
        num_full_blocks=LAYOUT.num_full_blocks,
        num_sliding_blocks=LAYOUT.num_sliding_blocks,
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        structured_output=False,
    )
    executor = InProcessExecutor(HookedModel(LAYOUT, before), LAYOUT, limits.max_num_seqs)
    return Engine(executor, LAYOUT, limits), info


def build_slow():
    """Steps of ten milliseconds."""
    return build(0.01)


def build_mortal():
    """An engine that the POISON token kills."""

    def check(batch: ForwardBatch) -> None:
        if POISON in batch.token_ids.tolist():
            raise ZeroDivisionError("poisoned")

    return build(0.005, check)


def build_segfaulting():
    """An engine whose process ends without a word at the POISON token."""

    def check(batch: ForwardBatch) -> None:
        if POISON in batch.token_ids.tolist():
            os._exit(7)

    return build(0.005, check)


def build_too_large():
    """A model that does not fit."""
    raise CapacityError("max_model_len: lower it.")


def build_broken():
    """A model whose loading hits a bug."""
    raise KeyError("no such weight")


def build_never():
    """A model that takes ages to load."""
    time.sleep(600)
