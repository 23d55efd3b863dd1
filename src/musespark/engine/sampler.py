"""From logits to tokens, for a whole batch at once.

A request's tokens depend on its own logits, settings and random numbers only, never on its place
in the batch or on who shares it. Features that no row of a step asks for cost nothing.

A request whose next tokens a draft has guessed has a row for each guess, and one behind the last.
Every row is sampled as if it came alone; the guesses that equal what was sampled stay, up to the
first that does not, whose place the sampled token takes. So guesses change no token. Requests
without a seed, whose tokens nobody can expect, may keep more: see speculative/verify.py.

What is sampled stays on the device until somebody reads it, so that the next step can begin with it
before the host has seen it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from musespark.engine.random_numbers import ACCEPT, DRAFT, uniform
from musespark.engine.request import Request, TokenLogprobs
from musespark.engine.sampling_table import Needs, SamplingTable, needs_of
from musespark.engine.token_counts import TokenCounts
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.sample import sample_from_uniform
from musespark.ops.sample_logprobs import ranked_logprobs
from musespark.ops.sample_penalties import penalize
from musespark.ops.transfers import Readback, send
from musespark.speculative.draw import DrawSettings
from musespark.speculative.verify import Verification, verify_drafts


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step adds to each request."""

    token_ids: list[list[int]]
    """Guessed tokens that stay, and one more."""
    logprobs: list[list[TokenLogprobs] | None]
    """Of each of them, where asked for."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What has been sampled, perhaps not computed yet."""

    token_ids: Tensor
    """[N] int64 on the device: each row's token, whatever was guessed."""
    read: Callable[[], SampledTokens]
    """Waits until it is here."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a step's requests have guessed ahead."""

    counts: list[int]
    """How many of its `draft_token_ids` each request has rows for."""
    distributions: list[Tensor | None]
    """[counts or more, V] float32 that each request's guesses were drawn from at random, for a
    request that need not get the tokens it would get without them."""
    verification: Verification = "block"
    """How those are verified."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the rows of logits stand for, as it was when they were computed."""

    requests: Sequence[Request]
    """[N]."""
    slots: np.ndarray
    """[N]."""
    needs: np.ndarray
    """[N]."""
    num_output_tokens: np.ndarray
    """[N] output tokens before each row, guessed ones included; [0] where no row needs them."""
    ahead: np.ndarray | None = None
    """[N] guessed tokens before each row; None: nowhere any."""
    guesses: Guesses | None = None

    def one(self, row: int) -> "SamplingRows":
        """A single row, where nothing is guessed."""
        place = slice(row, row + 1)
        numbers = self.num_output_tokens[place]
        return SamplingRows(self.requests[place], self.slots[place], self.needs[place], numbers)


class Sampler:
    """Chooses the next tokens of requests that have a slot."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._filter_logits = choose_kernels(device, torch.float32).filter_logits
        self._table = SamplingTable(max_num_seqs)
        self._counts = TokenCounts(max_num_seqs, device)

    def rows(self, requests: Sequence[Request], guesses: Guesses | None = None) -> SamplingRows:
        """The rows to sample: one for each request, which has a slot; and with `guesses`, what the
        requests have guessed, 1 + counts[i] for request i."""
        slots, ahead = self._table.load(requests), None
        if guesses is not None:
            counts = [count + 1 for count in guesses.counts]
            slots = np.repeat(slots, counts)
            requests = [r for r, count in zip(requests, counts, strict=True) for _ in range(count)]
            ahead = np.concatenate([np.arange(count) for count in counts])
        needs = self._table.needs[slots]
        num_output_tokens = np.zeros(0, dtype=np.int64)
        if (needs & (Needs.RANDOM | Needs.MIN_TOKENS)).any():
            num_output_tokens = np.array([len(request.output_token_ids) for request in requests])
            num_output_tokens += 0 if ahead is None else ahead
        return SamplingRows(requests, slots, needs, num_output_tokens, ahead, guesses)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: SamplingRows, forbidden: tuple[list[int], Tensor] | None = None
    ) -> Sampling:
        """Choose the next token, or tokens, of each request.

        Args:
            logits: [N, V] float32, a row each.
            rows: from `rows`.
            forbidden: rows [n] and, for each, the tokens [n, V] bool that must not come.
        """
        edited = self._edit(logits, rows, forbidden)
        chosen = edited.argmax(dim=-1)  # [N]
        random = np.flatnonzero(rows.needs & Needs.RANDOM)
        filtered = self._filter(edited, rows, random) if random.size else edited
        if random.size:
            numbers = self._numbers(rows, random)
            chosen.index_copy_(0, self._tensor(random), sample_from_uniform(filtered, numbers))
        if rows.guesses is None:
            return Sampling(chosen, self._reading(logits, chosen, rows))
        at_random = self._verify_at_random(filtered, rows, random, rows.guesses)
        token_ids = _take_equal(chosen.tolist(), rows, rows.guesses, at_random)
        sampled = SampledTokens(token_ids, self._logprobs(logits, rows, rows.guesses, token_ids))
        return Sampling(chosen, lambda: sampled)

    def draw_settings(self, requests: Sequence[Request], num_tokens: int) -> DrawSettings | None:
        """How to draw `num_tokens` guesses for each request; None: the most likely tokens.

        Requests with a seed get the very numbers that will decide their tokens, so that a draft
        that thinks as the target does guesses the same.
        """
        slots, table = self._table.load(requests), self._table
        is_random = (table.needs[slots] & Needs.RANDOM) > 0
        if not is_random.any():
            return None
        first = np.array([len(request.output_token_ids) for request in requests])
        own = np.array([may_differ(request) for request in requests])
        keys = np.where(own, table.keys[slots] ^ DRAFT, table.keys[slots])
        numbers = table.numbers[slots]
        temperature = np.where(is_random, numbers[:, 0], np.float32(0))
        return DrawSettings(
            temperature=self._tensor(temperature),
            top_k=self._tensor(table.top_k[slots]),
            top_p=self._tensor(numbers[:, 1]),
            min_p=self._tensor(numbers[:, 2]),
            uniform=self._tensor(uniform(keys[:, None], first[:, None] + np.arange(num_tokens))),
            has_filters=bool((table.needs[slots] & Needs.FILTER).any()),
        )

    def _edit(
        self, logits: Tensor, rows: SamplingRows, forbidden: tuple[list[int], Tensor] | None
    ) -> Tensor:
        """Logits after everything that changes which token is the most likely; a copy, if any."""
        needs = rows.needs
        edits = Needs.PENALTIES | Needs.BIAS | Needs.MIN_TOKENS
        if not (needs & edits).any() and forbidden is None:
            return logits
        logits = logits.clone()  # log-probabilities are of the model's own distribution
        if places := np.flatnonzero(needs & Needs.PENALTIES).tolist():
            counts = self._counts.rows(
                [rows.requests[place] for place in places],
                logits.shape[1],
                None if rows.ahead is None else rows.ahead[places].tolist(),
            )
            numbers = self._tensor(self._table.numbers[rows.slots[places], 3:]).unbind(1)
            index = self._tensor(np.array(places))
            logits[index] = penalize(logits[index], *counts, *numbers)
        if places := np.flatnonzero(needs & Needs.BIAS).tolist():
            self._add_bias(logits, rows.slots, places)
        if places := np.flatnonzero(needs & Needs.MIN_TOKENS).tolist():
            # A grammar that allows nothing but the end has the last word.
            constrained = set() if forbidden is None else set(forbidden[0])
            self._hold_back_end(logits, rows, [row for row in places if row not in constrained])
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

    def _hold_back_end(self, logits: Tensor, rows: SamplingRows, places: list[int]) -> None:
        """No end token for rows whose output is too short yet."""
        counts = rows.num_output_tokens
        places = [
            place for place in places if counts[place] < rows.requests[place].params.min_tokens
        ]
        if not places:
            return
        # The model's own end tokens may lie beyond a vocabulary that was cut down.
        ends = [self._table.ends[slot] for slot in rows.slots[places]]
        ends = [token_ids[token_ids < logits.shape[1]] for token_ids in ends]
        index = self._tensor(np.repeat(places, [len(token_ids) for token_ids in ends]))
        logits[index, self._tensor(np.concatenate(ends))] = -torch.inf

    def _filter(self, logits: Tensor, rows: SamplingRows, places: np.ndarray) -> Tensor:
        """[n, V] logits of the rows with a temperature, after it and after the filters."""
        table, slots = self._table, rows.slots[places]
        if len(places) < len(rows.slots):
            logits = logits.index_select(0, self._tensor(places))
        temperature, top_p, min_p = self._tensor(table.numbers[slots, :3]).unbind(1)
        filtered = logits / temperature[:, None]
        if (some := np.flatnonzero(rows.needs[places] & Needs.FILTER)).size:
            index = self._tensor(some)
            top_k = self._tensor(table.top_k[slots[some]])
            filtered[index] = self._filter_logits(
                filtered[index], top_k, top_p[index], min_p[index]
            )
        return filtered

    def _numbers(self, rows: SamplingRows, places: np.ndarray) -> Tensor:
        """[n] the random number that decides the token of each row."""
        keys, positions = self._table.keys[rows.slots[places]], rows.num_output_tokens[places]
        return self._tensor(uniform(keys, positions))

    def _verify_at_random(
        self, filtered: Tensor, rows: SamplingRows, random: np.ndarray, guesses: Guesses
    ) -> dict[int, tuple[int, int]]:
        """(guesses that stay, the token behind them) of the requests that may get other tokens
        than without guesses, by place."""
        places = [
            place
            for place, (count, drawn_from) in enumerate(
                zip(guesses.counts, guesses.distributions, strict=True)
            )
            if count and drawn_from is not None
        ]
        if not places:
            return {}
        widths = np.array([guesses.counts[place] for place in places])
        most = int(widths.max())
        first_row = np.array([0, *accumulate(count + 1 for count in guesses.counts)])[places]
        # Rows of `filtered` behind 0 to N guesses; those beyond a width mean nothing.
        row = first_row[:, None] + np.minimum(np.arange(most + 1), widths[:, None])  # [S, N + 1]
        target = filtered.softmax(dim=-1)[self._tensor(np.searchsorted(random, row))]
        drafts = [guesses.distributions[place] for place in places]
        token_ids = np.zeros((len(places), most), dtype=np.int64)
        for line, (place_row, width) in enumerate(zip(first_row.tolist(), widths, strict=True)):
            token_ids[line, :width] = rows.requests[place_row].draft_token_ids[:width]
        keys = self._table.keys[rows.slots[first_row]][:, None]
        positions = rows.num_output_tokens[first_row][:, None] + np.arange(most + 1)
        verified = verify_drafts(
            target,
            torch.stack([draft[:most] for draft in drafts if draft is not None]),
            self._tensor(token_ids),
            self._tensor(widths),
            self._tensor(uniform(keys ^ ACCEPT, positions[:, :most])),
            self._tensor(uniform(keys, positions)),
            guesses.verification,
        )
        counts, ends = torch.stack((verified.num_accepted, verified.token_ids)).tolist()
        return dict(zip(places, zip(counts, ends, strict=True), strict=True))

    def _reading(
        self, logits: Tensor, chosen: Tensor, rows: SamplingRows
    ) -> Callable[[], SampledTokens]:
        """Start to fetch the `chosen` tokens [N] of rows without guesses, and what is asked for
        about them; what that returns waits for it."""
        tokens = Readback(chosen)
        wanted = np.flatnonzero(rows.needs & Needs.LOGPROBS).tolist()
        nothing: list[list[TokenLogprobs] | None] = [None] * len(rows.requests)
        if not wanted:
            return lambda: SampledTokens([[token] for token in tokens.lists()[0]], nothing)
        index = self._tensor(np.array(wanted))
        counts = [rows.requests[row].params.logprobs or 0 for row in wanted]
        found = LogprobsReadback(logits.index_select(0, index), chosen[index], counts)

        def read() -> SampledTokens:
            logprobs = list(nothing)
            for row, entry in zip(wanted, found.entries(), strict=True):
                logprobs[row] = [entry]
            return SampledTokens([[token] for token in tokens.lists()[0]], logprobs)

        return read

    def _logprobs(
        self, logits: Tensor, rows: SamplingRows, guesses: Guesses, token_ids: list[list[int]]
    ) -> list[list[TokenLogprobs] | None]:
        """Of the tokens of those requests that ask for them, where some were guessed."""
        result: list[list[TokenLogprobs] | None] = [None] * len(token_ids)
        index: list[int] = []
        counts: list[int] = []
        flat: list[int] = []
        first = 0
        for place, (count, taken) in enumerate(zip(guesses.counts, token_ids, strict=True)):
            if (wanted := rows.requests[first].params.logprobs) is not None:
                index += range(first, first + len(taken))
                counts += [wanted] * len(taken)
                flat += taken
                result[place] = []
            first += 1 + count
        if not index:
            return result
        chosen = self._tensor(np.array(flat))
        some = logits.index_select(0, self._tensor(np.array(index)))
        found = iter(LogprobsReadback(some, chosen, counts).entries())
        for entries, taken in zip(result, token_ids, strict=True):
            if entries is not None:
                entries += [next(found) for _ in taken]
        return result

    def _tensor(self, array: np.ndarray) -> Tensor:
        return send(array, self._device)


def may_differ(request: Request) -> bool:
    """Whether a request may get other tokens than without guesses, from the same distribution: not
    if it says by a seed which ones it wants, nor if there is no choice."""
    return request.params.seed is None and Needs.RANDOM in needs_of(request.params)


def _take_equal(
    chosen: list[int],
    rows: SamplingRows,
    guesses: Guesses,
    at_random: dict[int, tuple[int, int]],
) -> list[list[int]]:
    """Each request's guesses as far as they equal what was `chosen` in each row, and the first
    chosen token that does not; or what was verified otherwise."""
    result = []
    first = 0
    for place, count in enumerate(guesses.counts):
        request = rows.requests[first]
        if place in at_random:
            num_kept, token_id = at_random[place]
        else:
            own = chosen[first : first + count]
            pairs = enumerate(zip(own, request.draft_token_ids, strict=False))
            num_kept = next((i for i, (mine, guess) in pairs if mine != guess), count)
            token_id = chosen[first + num_kept]
        result.append([*request.draft_token_ids[:num_kept], token_id])
        first += 1 + count
    return result


class LogprobsReadback:
    """Log-probabilities on their way to the host."""

    def __init__(self, logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> None:
        """Of `token_ids` [N] under `logits` [N, V], with the `counts` [N] most likely ones."""
        self._counts = counts
        self._ranked = Readback(*ranked_logprobs(logits, token_ids, max(counts, default=0)))

    def entries(self) -> list[TokenLogprobs]:
        """One per token; waits for them."""
        return [
            TokenLogprobs(logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
            for logprob, rank, ids, values, count in zip(
                *self._ranked.lists(), self._counts, strict=True
            )
        ]
