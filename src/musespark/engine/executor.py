"""The seam between the engine and whatever runs its batches."""

from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from musespark.engine.inputs import InputBuilder, fill_in
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.step_plan import StepPlan
from musespark.model.batch import ForwardBatch


class StepOutput(NamedTuple):
    """A step that has run."""

    batch: ForwardBatch
    """Its inputs, where the engine is."""
    logits: Tensor
    """[N, V] float32 of its wanted rows."""
    taps: tuple[Tensor, ...]
    """[T, D] float32 each: streams of all its rows, where a draft reads some."""


class Executor(Protocol):
    """Runs steps in the order in which they are submitted."""

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        ...

    @property
    def depth(self) -> int:
        """Steps that may be under way at once, so that all stages of a pipeline are busy."""
        ...

    @property
    def in_lockstep(self) -> bool:
        """Whether other engines take part in each step, so that one without work runs it too."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether plans may name tokens that are sampled only now, and it pays to make them: the
        device works while the host goes on."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Begin a step; at most `depth` may be under way."""
        ...

    def collect(self, sampled: Tensor | None = None) -> StepOutput:
        """What has come of the oldest step under way.

        Args:
            sampled: [N] int64 on the device, what the step before has sampled, if the plan names
                such tokens.
        """
        ...


class Runner(Protocol):
    """What runs a batch: a `ModelRunner`, or a stand-in in tests."""

    @property
    def device(self) -> torch.device:
        """Where batches must be."""
        ...

    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(logits [N, V] float32 of the batch's wanted rows, tapped streams [T, D] of all)."""
        ...


class InProcessExecutor:
    """One process holds the whole model."""

    in_lockstep = False

    def __init__(
        self,
        runner: Runner,
        layout: CacheLayout,
        max_num_seqs: int,
        *,
        with_masks: bool = True,
        depth: int = 1,
        runs_ahead: bool = False,
    ) -> None:
        """`with_masks` is False for a runner that never reads the masks of a batch; `runs_ahead`
        pays for one that returns before the device has finished. A `depth` above 1 gains nothing
        here, and shows in tests what a pipeline does to the engine."""
        assert depth == 1 or not runs_ahead
        self._runner, self.depth, self.runs_ahead = runner, depth, runs_ahead
        self._inputs = InputBuilder(layout, max_num_seqs, runner.device, with_masks=with_masks)
        self._batches: deque[ForwardBatch] = deque()

    @property
    def device(self) -> torch.device:
        return self._runner.device

    def submit(self, plan: StepPlan) -> None:
        self._batches.append(self._inputs.build(plan))

    def collect(self, sampled: Tensor | None = None) -> StepOutput:
        batch = self._batches.popleft()
        if sampled is not None:
            batch = fill_in(batch, sampled)
        return StepOutput(batch, *self._runner.run(batch))
