"""Steps that mean nothing, run before there are requests: to record them, to see what they take."""

import math

from musespark.engine.executor import Executor, StepOutput
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.prefix_cache import first_visible_block
from musespark.engine.step_plan import GroupPlan, StepPlan
from musespark.ops.graph_recorder import SIZES

# Tokens of each sequence that are in the cache already.
_CONTEXT = 256


class TrialSteps:
    """Runs steps of sequences that are all alike, on an executor that has run nothing else.

    All sequences lie in the same blocks: what they hold is of no use to anybody, and whoever gets
    the blocks later writes them anew before reading them.
    """

    def __init__(self, executor: Executor, layout: CacheLayout, most_rows: int) -> None:
        """`most_rows`: new tokens of a sequence at most."""
        self._executor, self._layout = executor, layout
        pools = [n for n in (layout.num_full_blocks, layout.num_sliding_blocks) if n]
        room = min(pools) * layout.block_size - most_rows
        self.num_computed = max(0, min(_CONTEXT, room))
        """Tokens of each sequence that count as cached."""

    def run(self, num_sequences: int, num_rows: int) -> StepOutput:
        """One step of so many sequences, with so many new tokens each."""
        layout, computed = self._layout, self.num_computed
        num_tokens = num_sequences * num_rows
        last_block = -(-(computed + num_rows) // layout.block_size)
        first = first_visible_block(computed, layout.sliding_window, layout.block_size)
        self._executor.submit(
            StepPlan(
                slots=list(range(num_sequences)),
                token_ids=[0] * num_tokens,
                query_start=list(range(0, num_tokens + 1, num_rows)),
                num_computed=[computed] * num_sequences,
                logit_rows=list(range(num_tokens)),
                num_decodes=num_sequences if num_rows == 1 else 0,
                full=_group(num_sequences, 0, last_block) if layout.num_full_blocks else None,
                sliding=_group(num_sequences, first, last_block)
                if layout.num_sliding_blocks
                else None,
            )
        )
        return self._executor.collect()


def record_decode_steps(
    executor: Executor, layout: CacheLayout, max_num_seqs: int, max_num_tokens: int, most_rows: int
) -> None:
    """Run every size of decode step once, so that executors which record steps have done so.

    Args:
        executor: has run nothing else yet.
        layout: its cache.
        max_num_seqs: sequences of a step at most.
        max_num_tokens: tokens of a step at most.
        most_rows: new tokens of a sequence at most: 1, or more where guesses are verified.
    """
    kinds: set[tuple[int, int]] = set()
    for size in SIZES:
        for rows in {1, min(size, most_rows)}:
            most = min(max_num_seqs, max_num_tokens // rows)
            kinds.add((min(size // rows, most), rows))
    steps = TrialSteps(executor, layout, most_rows)
    # The largest first: smaller ones find room in its memory.
    for count, rows in sorted(kinds, key=math.prod, reverse=True):
        if count:
            steps.run(count, rows)


def _group(num_sequences: int, first: int, last: int) -> GroupPlan:
    blocks = list(range(last - first))
    return GroupPlan(
        first_blocks=[first] * num_sequences,
        num_blocks=[len(blocks)] * num_sequences,
        updates=[(slot, 0, blocks) for slot in range(num_sequences)],
    )
