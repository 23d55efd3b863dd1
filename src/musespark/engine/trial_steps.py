"""Steps that mean nothing, run before there are requests: to record them, to see what they take."""

from musespark.engine.executor import Executor, StepOutput
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.prefix_cache import first_visible_block
from musespark.engine.step_plan import GroupPlan, StepPlan
from musespark.ops.graph_recorder import SIZES, padded_size

# Tokens of each sequence that are in the cache already.
_CONTEXT = 256


class TrialSteps:
    """Runs steps of sequences that are all alike, on an executor that has run nothing else.

    Each sequence has blocks of its own as far as there are enough, since reading the same ones
    again would be faster. What they hold is of no use to anybody, and whoever gets the blocks later
    writes them anew before reading them.
    """

    def __init__(self, executor: Executor, layout: CacheLayout, most_rows: int) -> None:
        """`most_rows`: new tokens of a sequence at most."""
        self._executor, self._layout = executor, layout
        pools = [n for n in (layout.num_full_blocks, layout.num_sliding_blocks) if n]
        room = min(pools) * layout.block_size - most_rows
        self.num_computed = max(0, min(_CONTEXT, room))
        """Tokens of each sequence that count as cached."""

    def run(self, num_sequences: int, num_rows: int, *, all_logits: bool = True) -> StepOutput:
        """One step of so many sequences, with so many new tokens each.

        `all_logits`: of every new token, as to verify guesses; else of each sequence's last.
        """
        layout, computed = self._layout, self.num_computed
        num_tokens = num_sequences * num_rows
        every = 1 if all_logits else num_rows
        last_block = -(-(computed + num_rows) // layout.block_size)
        first = first_visible_block(computed, layout.sliding_window, layout.block_size)
        self._executor.submit(
            StepPlan(
                slots=list(range(num_sequences)),
                token_ids=[0] * num_tokens,
                query_start=list(range(0, num_tokens + 1, num_rows)),
                num_computed=[computed] * num_sequences,
                logit_rows=list(range(every - 1, num_tokens, every)),
                num_decodes=num_sequences if num_rows == 1 else 0,
                full=_group(num_sequences, 0, last_block, layout.num_full_blocks),
                sliding=_group(num_sequences, first, last_block, layout.num_sliding_blocks),
            )
        )
        return self._executor.collect()


def warm_up(
    executor: Executor, layout: CacheLayout, max_num_seqs: int, max_num_tokens: int
) -> None:
    """Run every size of small step once, so that executors which record steps have done so, and
    each power of two of a larger one, so that kernels are compiled.

    Args:
        executor: has run nothing else yet.
        layout: its cache.
        max_num_seqs: sequences of a step at most.
        max_num_tokens: tokens of a step at most.
    """
    pools = [n for n in (layout.num_full_blocks, layout.num_sliding_blocks) if n]
    longest = min(min(pools) * layout.block_size, max_num_tokens)
    steps = TrialSteps(executor, layout, longest)
    # The largest first: smaller ones find room in its memory.
    large = min(max_num_tokens, max_num_seqs * longest)
    while large > SIZES[-1]:
        rows = min(large, longest)
        steps.run(large // rows, rows, all_logits=False)
        large = 1 << ((large - 1).bit_length() - 1)
    longest = min(longest, SIZES[-1])
    steps = TrialSteps(executor, layout, longest)
    for size in reversed(SIZES):
        plain = min(size, max_num_seqs, max_num_tokens)
        if padded_size(plain) == size:
            steps.run(plain, 1)
        for rows in range(2, min(size, longest) + 1):
            count = size // rows
            fits = count <= max_num_seqs and count * rows <= max_num_tokens
            if fits and padded_size(count * rows) == size:
                steps.run(count, rows)
                break


def _group(num_sequences: int, first: int, last: int, num_blocks: int) -> GroupPlan | None:
    """Sequences with blocks number `first` to `last` - 1, out of a pool that has so many."""
    if not num_blocks:
        return None
    count = last - first
    return GroupPlan(
        first_blocks=[first] * num_sequences,
        num_blocks=[count] * num_sequences,
        updates=[
            (slot, 0, [(slot * count + place) % num_blocks for place in range(count)])
            for slot in range(num_sequences)
        ],
    )
