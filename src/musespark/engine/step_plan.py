"""One step as plain numbers: what every process that takes part builds its tensors from.

A step changes little: most requests go on with the same blocks. So a plan holds only the blocks
that have changed since the last plan, and whoever builds tensors keeps the rest. Plans must
therefore be taken up in order, and each of them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.scheduler import ScheduledRequest


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The blocks that the layers of one kind, full or sliding, use in a step of B sequences."""

    first_blocks: list[int]
    """[B] number of each sequence's first block."""
    num_blocks: list[int]
    """[B] how many each has from there on."""
    updates: list[tuple[int, int, list[int]]]
    """(slot, place, blocks): what stands at a slot from that place on, where it has changed."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of B sequences and T tokens; B and T may be 0."""

    slots: list[int] = field(default_factory=list)
    """[B] place of each sequence among all that run."""
    token_ids: list[int] = field(default_factory=list)
    """[T]; -1 - k is what row k of the logits of the step before samples, not known yet."""
    query_start: list[int] = field(default_factory=lambda: [0])
    """[B + 1] first token of each sequence, and T at the end."""
    num_computed: list[int] = field(default_factory=list)
    """[B] tokens of each sequence that are in the cache."""
    logit_rows: list[int] = field(default_factory=list)
    """[N] rows of which logits are wanted."""
    num_decodes: int = 0
    """How many sequences, from the first on, have exactly one new token."""
    full: GroupPlan | None = None
    """None where the model has no full layers."""
    sliding: GroupPlan | None = None
    """None where the model has no sliding layers."""

    @property
    def num_unknown(self) -> int:
        """How many of the tokens that the step before samples this one needs: all up to the last
        that it names."""
        return max(0, -min(self.token_ids, default=0))

    def rows_of(self, sequences: Sequence[bool]) -> list[int]:
        """Places, among the wanted rows, of those that belong to the chosen sequences [B]."""
        starts = self.query_start
        return [
            place
            for place, row in enumerate(self.logit_rows)
            if sequences[bisect_right(starts, row) - 1]
        ]


class StepPlanner:
    """Makes the plan of each step."""

    def __init__(self, layout: CacheLayout, max_num_seqs: int) -> None:
        self._layout = layout
        self._full = _SentBlocks(max_num_seqs)
        self._sliding = _SentBlocks(max_num_seqs)

    def plan(self, schedule: Sequence[ScheduledRequest]) -> StepPlan:
        """One step. `schedule` lists the requests with a single new token first."""
        token_ids: list[int] = []
        query_start = [0]
        num_computed: list[int] = []
        logit_rows: list[int] = []
        num_decodes = 0
        for item in schedule:
            request, count, num_drafts, samples = item
            first = request.num_computed_tokens
            num_computed.append(first)
            if count == 1:
                num_decodes += 1
                prompt, outputs = request.prompt_token_ids, request.output_token_ids
                place = first - len(prompt)
                token_ids.append(outputs[place] if place >= 0 else prompt[first])
            else:
                token_ids += request.token_ids(first, first + count - num_drafts)
                token_ids += request.draft_token_ids[:num_drafts]
            end = len(token_ids)
            query_start.append(end)
            if count == 1 and samples:
                logit_rows.append(end - 1)
            else:
                logit_rows += wanted_rows(item, end)
        slots = [item.request.slot for item in schedule]
        full, sliding = self._full_group(slots, schedule), self._sliding_group(slots, schedule)
        return StepPlan(
            slots=slots,
            token_ids=token_ids,
            query_start=query_start,
            num_computed=num_computed,
            logit_rows=logit_rows,
            num_decodes=num_decodes,
            full=full,
            sliding=sliding,
        )

    def _full_group(
        self, slots: list[int], schedule: Sequence[ScheduledRequest]
    ) -> GroupPlan | None:
        if not self._layout.num_full_blocks:
            return None
        blocks = [item.request.full_blocks for item in schedule]
        return self._full.group(slots, blocks, [0] * len(blocks))

    def _sliding_group(
        self, slots: list[int], schedule: Sequence[ScheduledRequest]
    ) -> GroupPlan | None:
        if not self._layout.num_sliding_blocks:
            return None
        blocks = [item.request.sliding_blocks for item in schedule]
        firsts = [item.request.first_sliding_block for item in schedule]
        return self._sliding.group(slots, blocks, firsts)


class _SentBlocks:
    """What earlier plans have said of each slot's blocks."""

    def __init__(self, num_slots: int) -> None:
        # The list itself that was read, its length then, and its first number.
        self._sources: list[list[int] | None] = [None] * num_slots
        self._lengths = [0] * num_slots
        self._firsts = [0] * num_slots

    def group(self, slots: list[int], blocks: list[list[int]], firsts: list[int]) -> GroupPlan:
        """The plan of the sequences at `slots`, with what is new in it."""
        updates = []
        for slot, source, first in zip(slots, blocks, firsts, strict=True):
            if (
                self._sources[slot] is not source
                or self._lengths[slot] != len(source)
                or self._firsts[slot] != first
            ):
                updates.append(self._update(slot, source, first))
        return GroupPlan(firsts, [len(source) for source in blocks], updates)

    def _update(self, slot: int, source: list[int], first: int) -> tuple[int, int, list[int]]:
        place = self._lengths[slot]
        if self._sources[slot] is not source or self._firsts[slot] != first:
            place = 0
        self._sources[slot], self._lengths[slot] = source, len(source)
        self._firsts[slot] = first
        return slot, place, source[place:]


def wanted_rows(item: ScheduledRequest, end: int) -> range:
    """The rows, of a request's up to `end`, whose logits are needed: that of its last token, if the
    step reaches it, and of the guessed ones behind; all, if they predict prompt tokens whose
    log-probability is wanted."""
    request, count, num_drafts, samples = item
    if request.params.prompt_logprobs is not None and not request.output_token_ids:
        return range(end - count, end)
    return range(end - samples - num_drafts, end)
