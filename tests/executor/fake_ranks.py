"""Ranks around the fake model, importable by name so that other processes can build them.

Every rank holds the whole fake model. What a real one would exchange is exchanged all the same, and
checked: the ranks of a stage sum their tokens, and a stage passes them on to the next.
"""

import os
import signal
import time
from functools import partial

import torch
from tests.engine.fake_model import VOCAB_SIZE, FakeModel
from torch import Tensor

from musespark.config.parallel import Parallelism
from musespark.engine.client import EngineInfo
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.inputs import InputBuilder
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.step_plan import StepPlan
from musespark.errors import CapacityError
from musespark.executor.distributed import DriverExecutor, accept_ranks, connect_to_driver, follow
from musespark.executor.multiprocess import LocalLauncher, LocalRank
from musespark.executor.rank import Driver, Follower
from musespark.executor.remote_engine import RemoteEngine
from musespark.executor.world import World
from musespark.model.batch import ForwardBatch
from musespark.parallel.collectives import all_reduce, receive, send

LAYOUT = CacheLayout(block_size=4, num_full_blocks=99, num_sliding_blocks=99, sliding_window=8)
LIMITS = EngineLimits(
    vocab_size=VOCAB_SIZE,
    max_model_len=300,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    eos_token_ids=frozenset(),
)
POISON = VOCAB_SIZE - 1
"""A token at which something happens."""


class RankModel:
    """One rank's share, in words: `trouble` is what rank `where` does at the POISON token."""

    def __init__(self, world: World, trouble: str = "", where: int = -1) -> None:
        self._model, self._world = FakeModel(LAYOUT), world
        self._trouble = trouble if world.place.rank == where else ""
        self._num_steps = self._num_waits = 0
        self._sent: list[object] = []

    @property
    def device(self) -> torch.device:
        return self._model.device

    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._trouble and POISON in batch.token_ids.tolist():
            self._fail()
        mesh = self._world.mesh
        mine = torch.tensor([int(batch.token_ids.sum()), len(batch.seq_lens)])
        if mesh.pipeline.rank > 0:
            before = receive(torch.empty_like(mine), mesh.pipeline.rank - 1, mesh.pipeline)
            assert torch.equal(before, mine), "the stages run different steps"
        total = all_reduce(mine.clone(), mesh.tensor)
        assert torch.equal(total, mine * mesh.tensor.size), "the ranks run different steps"
        if self._world.parallelism.shares_experts_over_replicas:
            # Every replica takes part; who is idle brings an empty batch.
            all_reduce(mine.clone(), mesh.expert)
        self._watch_the_stages(len(batch.seq_lens))
        if mesh.pipeline.rank < mesh.pipeline.size - 1:
            self._sent.append(send(mine, mesh.pipeline.rank + 1, mesh.pipeline))
        self._num_steps += 1
        return self._model.run(batch)

    def _watch_the_stages(self, num_sequences: int) -> None:
        """With TEST_OVERLAP, the last stage goes on only when the first has begun the next step:
        four times, and only if there are more requests than this step's, so that there is one."""
        world, stage = self._world, self._world.mesh.pipeline
        if not os.environ.get("TEST_OVERLAP") or world.store is None:
            return
        if stage.rank == 0:
            world.store.set(f"begun-{self._num_steps}", "")
        elif num_sequences > 2 and self._num_waits < 4:
            self._num_waits += 1
            world.store.get(f"begun-{self._num_steps + 1}")

    @property
    def has_overlapped(self) -> bool:
        """Whether what TEST_OVERLAP asks for has happened."""
        return self._num_waits == 4 or not os.environ.get("TEST_OVERLAP")

    def _fail(self) -> None:
        if self._trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._trouble == "raise":
            raise ZeroDivisionError("poisoned")


class WatchedDriver(DriverExecutor):
    """Counts the steps that begin before the tokens of the last are known."""

    num_ahead = 0

    def submit(self, plan: StepPlan) -> None:
        self.num_ahead += plan.num_unknown > 0
        super().submit(plan)


def build(
    world: World, *, trouble: str = "", where: int = -1, runs_ahead: bool = False, progress=None
) -> Driver | Follower:
    """One rank."""
    if trouble == "load" and world.place.rank == where:
        raise CapacityError("max_model_len: lower it.")
    if progress is not None:
        progress(1, 2)
        progress(2, 2)
    followers = accept_ranks(world) if world.mesh.is_driver else None
    connection = connect_to_driver(world) if followers is None else None
    assert world.minimum([world.place.rank, 7]) == [0, 7]
    model = RankModel(world, trouble, where)
    inputs = InputBuilder(LAYOUT, LIMITS.max_num_seqs, model.device)
    if followers is None:
        assert connection is not None
        return Follower(partial(follow, model, inputs, connection, world.mesh.tensor), num_bytes=10)
    settings = world.parallelism
    executor = WatchedDriver(
        model,
        inputs,
        followers,
        world.mesh.tensor,
        depth=settings.pipeline_parallel_size,
        in_lockstep=settings.shares_experts_over_replicas,
        runs_ahead=runs_ahead,
    )
    info = EngineInfo(
        vocab_size=VOCAB_SIZE,
        max_model_len=LIMITS.max_model_len,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        eos_token_ids=(),
        block_size=LAYOUT.block_size,
        num_full_blocks=LAYOUT.num_full_blocks,
        num_sliding_blocks=LAYOUT.num_sliding_blocks,
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        structured_output=False,
    )

    def end() -> None:
        assert model.has_overlapped
        assert (executor.num_ahead > 0) == runs_ahead
        executor.end()

    return Driver(Engine(executor, LAYOUT, LIMITS), info, end, num_bytes=11)


def wait_as_front() -> None:
    """Start two ranks, print their process ids, and do nothing more."""
    parallelism = Parallelism(tensor_parallel_size=2)
    engine = RemoteEngine(LocalLauncher(build, parallelism), parallelism)
    ranks = engine._group.ranks
    print(*(rank.process.pid for rank in ranks if isinstance(rank, LocalRank)), flush=True)
    time.sleep(600)
