"""The sampling settings of all running requests in arrays, one row per slot.

Settings never change while a request runs, so a step only picks rows instead of reading hundreds
of objects.
"""

import secrets
from collections.abc import Sequence
from enum import IntFlag

import numpy as np

from musespark.config.sampling import SamplingParams
from musespark.engine.random_numbers import random_key
from musespark.engine.request import Request

# Dividing logits by less would overflow; the most likely token would come in any case.
_GREEDY_BELOW = 1e-5


_NOTHING = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)


class Needs(IntFlag):
    """What a request's sampling involves beyond the most likely token."""

    RANDOM = 1
    FILTER = 2
    PENALTIES = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32


class SamplingTable:
    """Columns of settings, indexed by slot."""

    def __init__(self, num_slots: int) -> None:
        self.needs = np.zeros(num_slots, dtype=np.uint8)
        self.numbers = np.zeros((num_slots, 6), dtype=np.float32)
        """temperature, top_p, min_p, presence, frequency and repetition penalty."""
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.keys = np.zeros(num_slots, dtype=np.uint64)
        self.biased: list[tuple[np.ndarray, np.ndarray]] = [_NOTHING] * num_slots
        """Token ids int64 and what is added to their logits, float32."""
        self.ends: list[np.ndarray] = [_NOTHING[0]] * num_slots
        """End tokens, int64, where they may have to wait for `min_tokens`."""
        self._owners: list[Request | None] = [None] * num_slots

    def load(self, requests: Sequence[Request]) -> np.ndarray:
        """The slots [N] of `requests`, whose rows hold their settings from now on."""
        owners = self._owners
        slots = [request.slot for request in requests]
        for slot, request in zip(slots, requests, strict=True):
            if owners[slot] is not request:
                self._set(slot, request)
                owners[slot] = request
        return np.array(slots, dtype=np.int64)

    def _set(self, slot: int, request: Request) -> None:
        params = request.params
        self.needs[slot] = needs_of(params)
        self.numbers[slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        self.top_k[slot] = params.top_k
        if params.logit_bias:
            token_ids, values = zip(*dict(params.logit_bias).items(), strict=True)
            self.biased[slot] = np.array(token_ids), np.array(values, dtype=np.float32)
        if params.min_tokens:
            self.ends[slot] = np.array(sorted(request.end_token_ids), dtype=np.int64)
        if request.random_key is None:
            seed = secrets.randbits(63) if params.seed is None else params.seed
            request.random_key = random_key(seed, request.index)
        self.keys[slot] = request.random_key


def needs_of(params: SamplingParams) -> Needs:
    """What sampling with `params` involves."""
    needs = Needs(0)
    if params.temperature >= _GREEDY_BELOW:
        needs |= Needs.RANDOM
        if params.top_k or params.top_p < 1 or params.min_p:
            needs |= Needs.FILTER
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        needs |= Needs.PENALTIES
    if params.logit_bias:
        needs |= Needs.BIAS
    if params.min_tokens:
        needs |= Needs.MIN_TOKENS
    if params.logprobs is not None:
        needs |= Needs.LOGPROBS
    return needs
