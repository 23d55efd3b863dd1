"""From logits to tokens, for a whole batch at once.

A request's tokens depend on its own logits, settings and random numbers only, never on its place
in the batch or on who shares it. Features that no row of a step asks for cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from musespark.engine.random_numbers import uniform
from musespark.engine.request import Request, TokenLogprobs
from musespark.engine.sampling_table import Needs, SamplingTable
from musespark.engine.token_counts import TokenCounts
from musespark.ops.sample import filter_logits, sample_from_uniform
from musespark.ops.sample_logprobs import ranked_logprobs
from musespark.ops.sample_penalties import penalize


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, and log-probabilities where asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Chooses the next tokens of requests that have a slot."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._table = SamplingTable(max_num_seqs)
        self._counts = TokenCounts(max_num_seqs, device)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        forbidden: tuple[list[int], Tensor] | None = None,
    ) -> SampledTokens:
        """Choose the next token of each row.

        Args:
            logits: [N, V] float32.
            requests: [N], each with a slot.
            forbidden: rows [n] and, for each, the tokens [n, V] bool that must not come.
        """
        slots = self._table.load(requests)
        needs = self._table.needs[slots]
        all_needs = Needs(int(np.bitwise_or.reduce(needs, initial=0)))
        edited = self._edit(logits, requests, slots, needs, forbidden)
        token_ids = edited.argmax(dim=-1)  # [N]
        if Needs.RANDOM in all_needs:
            rows = np.flatnonzero(needs & Needs.RANDOM)
            chosen = self._sample_random(edited, rows, requests, slots, needs)
            token_ids.index_copy_(0, self._tensor(rows), chosen)
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        if Needs.LOGPROBS in all_needs:
            self._fill_logprobs(logprobs, logits, token_ids, requests, needs)
        return SampledTokens(token_ids.tolist(), logprobs)

    def _edit(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        slots: np.ndarray,
        needs: np.ndarray,
        forbidden: tuple[list[int], Tensor] | None,
    ) -> Tensor:
        """Logits after everything that changes which token is the most likely; a copy, if any."""
        edits = Needs.PENALTIES | Needs.BIAS | Needs.MIN_TOKENS
        if not (needs & edits).any() and forbidden is None:
            return logits
        logits = logits.clone()  # log-probabilities are of the model's own distribution
        if rows := np.flatnonzero(needs & Needs.PENALTIES).tolist():
            picked = [requests[row] for row in rows]
            counts = self._counts.rows(picked, logits.shape[1])
            numbers = self._tensor(self._table.numbers[slots[rows], 3:]).unbind(1)
            index = self._tensor(np.array(rows))
            logits[index] = penalize(logits[index], *counts, *numbers)
        if rows := np.flatnonzero(needs & Needs.BIAS).tolist():
            self._add_bias(logits, slots, rows)
        if rows := np.flatnonzero(needs & Needs.MIN_TOKENS).tolist():
            # A grammar that allows nothing but the end has the last word.
            constrained = set() if forbidden is None else set(forbidden[0])
            free = [row for row in rows if row not in constrained]
            self._hold_back_end(logits, requests, slots, free)
        if forbidden is not None:
            index = self._tensor(np.array(forbidden[0]))
            logits[index] = logits[index].masked_fill_(forbidden[1], -torch.inf)
        return logits

    def _add_bias(self, logits: Tensor, slots: np.ndarray, rows: list[int]) -> None:
        biased = [self._table.biased[slot] for slot in slots[rows]]
        counts = [len(token_ids) for token_ids, _ in biased]
        index = self._tensor(np.repeat(rows, counts))
        token_ids = self._tensor(np.concatenate([token_ids for token_ids, _ in biased]))
        values = self._tensor(np.concatenate([values for _, values in biased]))
        logits.index_put_((index, token_ids), values.to(logits.dtype), accumulate=True)

    def _hold_back_end(
        self, logits: Tensor, requests: Sequence[Request], slots: np.ndarray, rows: list[int]
    ) -> None:
        """No end token for rows whose output is too short yet."""
        rows = [
            row
            for row in rows
            if len(requests[row].output_token_ids) < requests[row].params.min_tokens
        ]
        if not rows:
            return
        # The model's own end tokens may lie beyond a vocabulary that was cut down.
        ends = [self._table.ends[slot] for slot in slots[rows]]
        ends = [token_ids[token_ids < logits.shape[1]] for token_ids in ends]
        index = self._tensor(np.repeat(rows, [len(token_ids) for token_ids in ends]))
        logits[index, self._tensor(np.concatenate(ends))] = -torch.inf

    def _sample_random(
        self,
        logits: Tensor,
        rows: np.ndarray,
        requests: Sequence[Request],
        slots: np.ndarray,
        needs: np.ndarray,
    ) -> Tensor:
        """Tokens [n] of the rows with a temperature."""
        table = self._table
        positions = np.array([len(requests[row].output_token_ids) for row in rows.tolist()])
        numbers = self._tensor(uniform(table.keys[slots[rows]], positions))
        if len(rows) < len(requests):
            logits = logits.index_select(0, self._tensor(rows))
        temperature, top_p, min_p = self._tensor(table.numbers[slots[rows], :3]).unbind(1)
        filtered = logits / temperature[:, None]
        if (places := np.flatnonzero(needs[rows] & Needs.FILTER)).size:
            index = self._tensor(places)
            top_k = self._tensor(table.top_k[slots[rows[places]]])
            filtered[index] = filter_logits(filtered[index], top_k, top_p[index], min_p[index])
        return sample_from_uniform(filtered, numbers)

    def _fill_logprobs(
        self,
        result: list[TokenLogprobs | None],
        logits: Tensor,
        token_ids: Tensor,
        requests: Sequence[Request],
        needs: np.ndarray,
    ) -> None:
        rows = np.flatnonzero(needs & Needs.LOGPROBS)
        index = self._tensor(rows)
        counts = [requests[row].params.logprobs or 0 for row in rows.tolist()]
        found = token_logprobs(logits.index_select(0, index), token_ids[index], counts)
        for row, logprobs in zip(rows.tolist(), found, strict=True):
            result[row] = logprobs

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def token_logprobs(logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of `token_ids` [N] under `logits` [N, V], with the `counts` [N] most likely ones."""
    ranked = ranked_logprobs(logits, token_ids, max(counts, default=0))
    columns = zip(
        ranked.logprobs.tolist(),
        ranked.ranks.tolist(),
        ranked.top_ids.tolist(),
        ranked.top_logprobs.tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprobs(logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for logprob, rank, ids, values, count in columns
    ]
