"""Speculative decoding in the engine: who guesses, when, and how many guesses a step verifies.

After each step the draft takes in the tokens that stand, or lets them wait for a few steps while
nothing is guessed, and guesses what follows in the sequences that decode. The next step verifies as
many of the guesses as pay (speculative/budget.py); those that are left over are forgotten. Guesses
that turn out wrong leave nothing behind: the target's keys and values of their rows lie behind the
sequence's end, where the next rows overwrite them, and the draft never takes them in.

A block with tokens that wait has no name in the prefix cache yet. So they can be dropped when their
request ends, and whoever finds a block there finds the draft's keys and values in it as well.

While nothing is guessed, the next step may begin before a step's tokens are known, as without a
draft: only what the draft reads of a step has to be copied before the next one is launched.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from musespark.engine.client import SpeculationStats
from musespark.engine.executor import StepOutput
from musespark.engine.request import Request, RequestStatus
from musespark.engine.sampler import Guesses, Sampler, may_differ
from musespark.engine.scheduler import ScheduledRequest
from musespark.model.batch import ForwardBatch
from musespark.model.draft import ContextRows, DraftContext, PagedContext
from musespark.ops.transfers import Readback, send
from musespark.speculative.budget import Acceptance, StepCosts, Surcharge, choose_widths
from musespark.speculative.guess import Guess
from musespark.speculative.proposer import Proposer
from musespark.speculative.verify import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """How an engine guesses ahead."""

    num_tokens: int
    """Tokens guessed at a time, at most the proposer's `max_tokens`."""
    costs: StepCosts | None
    """What steps take, measured; None: not known, so that the width must be fixed."""
    fixed_width: bool = False
    """Verify all guesses always, instead of those that pay."""
    draws_at_random: bool = True
    """Draw guesses for requests with a temperature at random, as their tokens are; otherwise the
    most likely ones."""
    verification: Verification = "block"
    """How guesses drawn at random are verified for requests without a seed."""


# Steps of one token per sequence whose rows the draft takes in together. That costs little more
# than one of them; and none has left the window of a sliding layer by then.
_STEPS_AT_ONCE = 16


class StepPart(NamedTuple):
    """A request's part of a step that has been committed."""

    request: Request
    place: int
    """Which of the batch's sequences it was."""
    num_kept: int
    """Rows, from its first, that stand."""
    has_sampled: bool


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step that stand, and whose they are."""

    context: ContextRows
    owners: list[tuple[Request, int, int]]
    """(request, how many times it had been started, its rows), in order."""

    @classmethod
    def joined(cls, parts: "Sequence[_Rows]") -> "_Rows":
        """Those of several steps, at least one."""
        if len(parts) == 1:
            return parts[0]
        contexts = [part.context for part in parts]
        full, sliding = (
            None if slots[0] is None else torch.cat(slots)
            for slots in zip(*((c.full_slots, c.sliding_slots) for c in contexts), strict=True)
        )
        context = ContextRows(
            torch.cat([c.features for c in contexts]),
            torch.cat([c.positions for c in contexts]),
            full,
            sliding,
        )
        return cls(context, [owner for part in parts for owner in part.owners])

    def take(self, rows: Sequence[int] | np.ndarray) -> "_Rows":
        """Some of the rows, whose owners then no longer count."""
        index = send(np.asarray(rows, dtype=np.int64), self.context.positions.device)
        return _Rows(self.context.map(lambda x: x.index_select(0, index)), self.owners)


class Speculation:
    """Guesses ahead for the requests of one engine."""

    def __init__(self, proposer: Proposer, settings: SpeculationSettings) -> None:
        self._proposer, self._settings = proposer, settings
        # What decides about widths; None: they are fixed.
        self._costs = None if settings.fixed_width else settings.costs
        assert settings.fixed_width or self._costs is not None
        self._acceptance = Acceptance(settings.num_tokens)
        self._surcharge = Surcharge()
        # Whether there were guesses behind the last step.
        self._has_guessed = False
        # What a slot's guesses were drawn from, and for whom.
        self._drawn_from: dict[int, tuple[Request, Tensor]] = {}
        self._verified_at = [0] * settings.num_tokens
        self._accepted_at = [0] * settings.num_tokens
        self._num_cycles = self._num_tokens = 0
        self._draft_seconds = self._saved_seconds = 0.0
        # What the draft has still to take in, step by step.
        self._waiting: list[_Rows] = []
        self._may_wait = False
        # Sequences that could guess, and that decode, when it was last not worth it.
        self._refused: tuple[int, int] | None = None

    def choose_widths(
        self, requests: Sequence[Request], num_sequences: int, num_tokens: int
    ) -> list[int]:
        """A `ChooseWidths` for the scheduler."""
        if self._costs is None:
            return [len(request.draft_token_ids) for request in requests]
        survival = [request.draft_survival for request in requests]
        return choose_widths(survival, num_sequences, num_tokens, self._costs, self._surcharge)

    def guesses(self, sampling: Sequence[ScheduledRequest]) -> Guesses | None:
        """What a step has to verify; None if nothing."""
        if not any(item.num_drafts for item in sampling):
            return None
        distributions: list[Tensor | None] = []
        for item in sampling:
            owner, drawn_from = self._drawn_from.get(item.request.slot, (None, None))
            is_its_own = item.num_drafts and owner is item.request
            distributions.append(drawn_from if is_its_own else None)
        counts = [item.num_drafts for item in sampling]
        return Guesses(counts, distributions, self._settings.verification)

    def observe(self, sampling: Sequence[ScheduledRequest], token_ids: Sequence[list[int]]) -> None:
        """Take in what verification has made of the guesses."""
        if not any(item.request.draft_token_ids for item in sampling):
            return
        self._acceptance.observe(
            (item.num_drafts, len(tokens) - 1, item.request.draft_survival)
            for item, tokens in zip(sampling, token_ids, strict=True)
        )
        for item, tokens in zip(sampling, token_ids, strict=True):
            if not (width := item.num_drafts):
                continue
            num_accepted = len(tokens) - 1
            self._num_cycles += 1
            self._num_tokens += len(tokens)
            for index in range(width):
                self._verified_at[index] += 1
                self._accepted_at[index] += index < num_accepted

    def count_time(
        self, schedule: Sequence[ScheduledRequest], num_new_tokens: int, seconds: float
    ) -> None:
        """Compare a step that took `seconds`, for `num_new_tokens` tokens, with what it should have
        taken, and with how long those tokens would have taken one by one."""
        costs, surcharge = self._settings.costs, self._surcharge
        if costs is None:
            return
        num_drafts = sum(item.num_drafts for item in schedule)
        num_sampling = sum(item.samples for item in schedule)
        num_tokens = sum(item.num_new_tokens for item in schedule) - num_drafts
        if num_drafts:
            plain = costs.plain_seconds(num_tokens) + surcharge.plain_seconds(num_sampling)
            self._saved_seconds += num_new_tokens / num_sampling * plain - seconds
        if num_tokens > len(schedule) or bool(num_drafts) != self._has_guessed:
            return  # it read a prompt, or was the first or the last of those that guess
        measured = costs.plain_seconds(num_tokens)
        if num_drafts:
            measured = costs.verify_seconds(num_tokens, num_drafts)
            measured += costs.draft_seconds(num_sampling)
        surcharge.observe(num_tokens, seconds, measured, verifies=num_drafts > 0)

    def stats(self) -> SpeculationStats:
        """What guessing has brought."""
        return SpeculationStats(
            cycles=self._num_cycles,
            cycle_tokens=self._num_tokens,
            verified=list(self._verified_at),
            accepted=list(self._accepted_at),
            draft_seconds=self._draft_seconds,
            saved_seconds=self._saved_seconds,
        )

    def rests(self, schedule: Sequence[ScheduledRequest]) -> bool:
        """Whether a step will only leave its rows to wait, as is known before its tokens are.

        Requests that end with it unforeseen may make guessing worth it one step earlier.
        """
        if self._refused is None or not self._lets_wait(schedule):
            return False
        num_sampling = sum(item.samples for item in schedule)
        num_guessing = sum(item.samples and _may_guess(item.request, 1) for item in schedule)
        return (num_guessing, num_sampling) == self._refused

    def features(self, output: StepOutput) -> Tensor:
        """[T, W] what the draft reads of a step: a copy, to be made before the next one is
        launched, since a graph's own taps last until then only."""
        return self._proposer.features(output.taps)

    def _lets_wait(self, schedule: Sequence[ScheduledRequest]) -> bool:
        is_plain = all(item.num_new_tokens == 1 for item in schedule)
        return is_plain and len(self._waiting) + 1 < _STEPS_AT_ONCE

    def before_commit(self, schedule: Sequence[ScheduledRequest]) -> None:
        """Before a step is committed: say of its requests how many of their tokens will wait."""
        self._may_wait = self._lets_wait(schedule)
        for item in schedule:
            waiting = item.request.num_waiting_tokens
            item.request.num_waiting_tokens = waiting + 1 if self._may_wait else 0

    def follow(
        self,
        output: StepOutput,
        features: Tensor,
        parts: Sequence[StepPart],
        sampler: Sampler,
        *,
        is_overtaken: bool,
    ) -> None:
        """After a step, which has been committed: take in what stands, and guess what follows.

        Args:
            output: what came of the step.
            features: from `features`.
            parts: what stands of it.
            sampler: draws guesses as it draws tokens.
            is_overtaken: the next step is under way already. It `rests`.
        """
        self._has_guessed = False
        if not parts:
            return
        started = time.perf_counter()
        self._waiting.append(_standing(output.batch, features, parts))
        drafting = [part for part in parts if part.has_sampled and _may_guess(part.request)]
        num_sampling = sum(part.has_sampled for part in parts)
        guesses = not is_overtaken and self._is_worthwhile(len(drafting), num_sampling)
        if guesses or not self._may_wait:
            ended = (part.request for part in parts)
            self._inject({id(r) for r in ended if r.status is RequestStatus.FINISHED})
        if guesses:
            self._has_guessed = True
            self._propose(output.batch, drafting, sampler)
        elif drafting:
            self._acceptance.forget()
        self._draft_seconds += time.perf_counter() - started

    def _is_worthwhile(self, num_guessing: int, num_sequences: int) -> bool:
        if self._costs is None or not num_guessing:
            return num_guessing > 0
        load = num_guessing, num_sequences
        if self._may_wait and load == self._refused:
            return False  # asked again when the draft takes in what waits
        guesses = self._acceptance.is_worthwhile(*load, self._costs, self._surcharge)
        self._refused = None if guesses else load
        return guesses

    def _inject(self, just_ended: Collection[int]) -> None:
        """Let the draft take in all rows that wait, together.

        But for those whose blocks may be another's by now; blocks of the requests `just_ended`, by
        id, are nobody's yet.
        """
        rows, self._waiting = _Rows.joined(self._waiting), []
        held, counts = [], []
        for request, starts, count in rows.owners:
            request.num_waiting_tokens = 0
            is_there = request.status is RequestStatus.RUNNING or id(request) in just_ended
            held.append(is_there and request.num_starts == starts)
            counts.append(count)
        if not all(held):
            rows = rows.take(np.flatnonzero(np.repeat(held, counts)))
        if len(rows.context.positions):
            self._proposer.inject(rows.context)

    def _propose(self, batch: ForwardBatch, drafting: Sequence[StepPart], sampler: Sampler) -> None:
        requests = [part.request for part in drafting]
        count = self._settings.num_tokens
        at_random = self._settings.draws_at_random
        anchors, context = draft_inputs(
            batch,
            [part.place for part in drafting],
            [request.output_token_ids[-1] for request in requests],
            [request.num_computed_tokens for request in requests],
        )
        guess = self._proposer.propose(
            anchors,
            context,
            count,
            sampler.draw_settings(requests, count) if at_random else None,
        )
        self._hand_out(requests, guess)

    def _hand_out(self, requests: Sequence[Request], guess: Guess) -> None:
        wanted = [guess.token_ids]
        if guess.confidences is not None:
            wanted.append(guess.confidences.cumprod(dim=-1))
        token_ids, *rest = Readback(*wanted).lists()
        survival = rest[0] if rest else [self._acceptance.survival] * len(requests)
        for row, request in enumerate(requests):
            request.draft_token_ids = _up_to_end(request, token_ids[row])
            request.draft_survival = survival[row][: len(request.draft_token_ids)]
            if guess.distributions is not None and may_differ(request):
                self._drawn_from[request.slot] = request, guess.distributions[row]
            else:
                self._drawn_from.pop(request.slot, None)


def _standing(batch: ForwardBatch, features: Tensor, parts: Sequence[StepPart]) -> _Rows:
    """The rows of a step that stand."""
    starts = batch.query_start
    owners = [(part.request, part.request.num_starts, part.num_kept) for part in parts]
    rows = _Rows(context_rows(batch, features), owners)
    if sum(part.num_kept for part in parts) == starts[-1]:
        return rows
    kept = [
        row
        for part in parts
        for row in range(starts[part.place], starts[part.place] + part.num_kept)
    ]
    return rows.take(kept)


def _may_guess(request: Request, num_to_come: int = 0) -> bool:
    """Whether a request goes on, for two tokens at least; behind those of a step under way."""
    wanted = request.num_wanted_tokens - num_to_come
    return request.status is RequestStatus.RUNNING and wanted > 1


def context_rows(batch: ForwardBatch, features: Tensor) -> ContextRows:
    """All rows of a step, of which a proposer reads `features` [T, W]."""
    full, sliding = (None if m is None else m.slot_mapping for m in (batch.full, batch.sliding))
    return ContextRows(features, batch.positions, full, sliding)


def draft_inputs(
    batch: ForwardBatch, places: Sequence[int], anchor_ids: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, DraftContext]:
    """What a proposer reads of some of a step's sequences.

    Args:
        batch: the step.
        places: [B] which sequences.
        anchor_ids: [B] last token of each.
        lengths: [B] tokens before it.

    Returns:
        (anchor_ids [B], where the tokens before them lie)
    """
    kinds = batch.full, batch.sliding
    starts = [[m.key_start[place] for place in places] for m in kinds if m is not None]
    numbers = np.array([places, anchor_ids, lengths, *starts], dtype=np.int64)
    index, anchors, context_lens, *key_starts = send(numbers, batch.token_ids.device).unbind()
    full, sliding = (
        None if m is None else PagedContext(m.block_table[index], key_starts.pop(0)) for m in kinds
    )
    return anchors, DraftContext(context_lens, full, sliding)


def _up_to_end(request: Request, token_ids: list[int]) -> list[int]:
    """Guessed tokens up to one that ends the output."""
    done = len(request.output_token_ids)
    for count, token_id in enumerate(token_ids, start=1):
        if token_id in request.end_token_ids and done + count > request.params.min_tokens:
            return token_ids[:count]
    return token_ids
