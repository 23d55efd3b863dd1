"""Ranks in processes of their own, around a fake model: layouts, balance, failure, and the end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from tests.engine.fake_model import VOCAB_SIZE, greedy, next_logits
from tests.executor import fake_ranks
from tests.executor.fake_ranks import POISON
from tests.server.live import eventually

from musespark.config.parallel import Parallelism
from musespark.config.sampling import SamplingParams
from musespark.engine.async_client import AsyncEngineClient
from musespark.engine.client import EngineRequest, EngineState
from musespark.errors import CapacityError, EngineDeadError, RequestError
from musespark.executor.group import RankGroup
from musespark.executor.multiprocess import LocalLauncher, LocalRank
from musespark.executor.remote_engine import RemoteEngine

# Machines that run tests may be slow; only what hangs should fail.
PATIENCE = 90.0


def layout(tp=1, pp=1, dp=1, *, ep=False) -> Parallelism:
    return Parallelism(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        expert_parallel=ep,
        moe_backend="all_to_all" if ep else "auto",
    )


TP2, PP2, DP2 = layout(tp=2), layout(pp=2), layout(dp=2)


def start(parallelism, **settings) -> AsyncEngineClient:
    launcher = LocalLauncher(partial(fake_ranks.build, **settings), parallelism)
    return AsyncEngineClient(lambda deliver: RankGroup(launcher, parallelism, deliver))


def group_of(client) -> RankGroup:
    assert isinstance(client._link, RankGroup)
    return client._link


def processes(client):
    ranks = group_of(client).ranks
    return [rank.process for rank in ranks if isinstance(rank, LocalRank)]


def request_of(name, prompt, count) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=count, logit_bias={POISON: -100})
    return EngineRequest(name, tuple(prompt), params)


async def complete(client, name, prompt, count):
    stream = await client.generate(request_of(name, prompt, count))
    return [token async for output in stream for token in output.token_ids]


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, PATIENCE))


@pytest.mark.parametrize(
    ("parallelism", "settings"),
    [(PP2, {}), (layout(pp=2, dp=2, ep=True), {}), (TP2, {"runs_ahead": True})],
    ids=["pp2", "pp2 dp2 ep2", "tp2 ahead"],
)
def test_steps_under_way_give_every_request_its_tokens(parallelism, settings, monkeypatch):
    """Pipelines are filled; steps begin before the tokens of the last are known. The other
    layouts: test_llm.py, with a real model."""
    if parallelism == PP2:  # the last stage waits for the first one to be a step ahead
        monkeypatch.setenv("TEST_OVERLAP", "1")

    async def scenario():
        client = start(parallelism, **settings)
        await client.wait_ready()
        size = parallelism.world_size
        assert client.info.layout == parallelism.layout_name
        assert len(client.info.memory_bytes) == size
        assert client.info.max_num_seqs == 8 * parallelism.data_parallel_size
        prompts = [[n, n + 1, n + 2] * (n + 1) for n in range(8)]
        calls = [complete(client, str(n), p, 5 + n) for n, p in enumerate(prompts)]
        for n, tokens in enumerate(await asyncio.gather(*calls)):
            assert tokens == greedy_without_poison(prompts[n], 5 + n)
        # One alone: other replicas have nothing to do, a pipeline is not full.
        assert await complete(client, "one", [3, 1], 4) == greedy_without_poison([3, 1], 4)
        stream = await client.generate(request_of("left", [2, 2], 200))
        async for _ in stream:
            break
        await stream.aclose()
        ranks = processes(client)
        await client.shutdown()
        assert client.stats().finished["length"] == 9
        while None in (codes := [process.exitcode for process in ranks]):
            await asyncio.sleep(0.01)
        assert codes == [0] * size

    run(scenario())


def greedy_without_poison(prompt, count):
    """What the bias leaves of the fake model's answer."""
    tokens = list(prompt)
    for _ in range(count):
        logits = next_logits(tokens)
        logits[POISON] -= 100
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("parallelism", "trouble", "text"),
    [(PP2, "kill", "has ended by signal 9"), (TP2, "raise", "poisoned")],
    ids=["kill", "raise"],
)
def test_a_rank_that_fails_ends_all_and_is_named(parallelism, trouble, text):
    async def scenario():
        where = parallelism.world_size - 1 - parallelism.driver_rank(0)  # not the driver
        client = start(parallelism, trouble=trouble, where=where)
        await client.wait_ready()
        ranks = processes(client)
        stream = await client.generate(request_of("a", [1], 250))
        began = time.monotonic()
        with contextlib.suppress(EngineDeadError):
            poison = await client.generate(request_of("b", [POISON] * 2, 3))
            await anext(poison)
        with pytest.raises(EngineDeadError, match=rf"Rank {where} (.|\n)*{text}"):
            async for _ in stream:
                pass
        assert time.monotonic() - began < 5
        assert client.state is EngineState.DEAD
        assert all(process.exitcode is not None for process in ranks)
        await client.shutdown()

    run(scenario())


def test_a_rank_that_is_killed_while_all_are_idle_is_noticed():
    async def scenario():
        client = start(TP2)
        await client.wait_ready()
        ranks = processes(client)
        os.kill(ranks[1].pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while client.is_healthy:
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match=r"Rank 1 \(tensor 1, .*\) has ended by signal 9"):
            await client.generate(request_of("a", [1], 3))
        assert [process.exitcode for process in ranks] == [-9, -9]
        await client.shutdown()

    run(scenario())


def test_the_error_of_a_rank_that_cannot_load_is_raised():
    async def scenario():
        client = start(TP2, trouble="load", where=1)
        with pytest.raises(CapacityError, match="lower it"):
            await client.wait_ready()
        await client.shutdown()
        assert all(process.exitcode is not None for process in processes(client))

    run(scenario())


def test_requests_are_shared_out_over_replicas():
    async def scenario():
        client = start(DP2)
        await client.wait_ready()
        streams = [await client.generate(request_of(str(n), [n], 200)) for n in range(4)]
        for stream in streams:
            await anext(stream)
        assert client.stats().num_running == 4
        loads = group_of(client)._replicas._load
        assert [outputs for outputs, _ in loads] == [2, 2]
        for stream in streams:
            await stream.aclose()
        async with asyncio.timeout(20):
            while group_of(client)._replicas._load != [(0, 0), (0, 0)]:
                await asyncio.sleep(0.01)
        await client.shutdown()

    run(scenario())


@pytest.fixture(scope="module")
def remote():
    told: list[tuple[int, int]] = []
    launcher = LocalLauncher(fake_ranks.build, TP2)
    engine = RemoteEngine(launcher, TP2, progress=lambda *numbers: told.append(numbers))
    assert told[-1] == (2, 2)
    yield engine
    engine.close()


GREEDY = SamplingParams(temperature=0, max_tokens=6)


def finish(engine):
    tokens: dict[tuple[int, int], list[int]] = {}
    while engine.has_work:
        for token in engine.step():
            tokens.setdefault((token.request_id, token.output_index), []).append(token.token_id)
    return tokens


def test_a_remote_engine_is_called_like_one_that_is_here(remote):
    numbers = [remote.add_request([n, n + 1], GREEDY) for n in range(5)]
    tokens = finish(remote)
    assert [tokens[n, 0] for n in numbers] == [greedy([n, n + 1], 6) for n in range(5)]


def test_nothing_comes_of_an_output_that_was_aborted(remote):
    params = SamplingParams(temperature=0, max_tokens=100, n=2)
    number, other = remote.add_request([1], params), remote.add_request([2], GREEDY)
    remote.step()
    assert remote.abort(number, index=1) == [1]
    assert remote.abort(number, index=1) == []
    assert remote.abort(number) == [0]
    assert set(finish(remote)) <= {(other, 0)}


def test_a_remote_engine_refuses_at_once(remote):
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        remote.add_request([VOCAB_SIZE], GREEDY)
    assert not remote.has_work


def test_a_remote_engine_says_how_it_died():
    launcher = LocalLauncher(partial(fake_ranks.build, trouble="raise", where=1), TP2)
    engine = RemoteEngine(launcher, TP2)
    engine.add_request([POISON], GREEDY)
    with pytest.raises(EngineDeadError, match="poisoned"):
        finish(engine)
    with pytest.raises(EngineDeadError, match="poisoned"):
        engine.step()
    engine.close()


def test_ranks_end_when_their_front_is_killed():
    code = "from tests.executor.fake_ranks import wait_as_front; wait_as_front()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in front.stdout.readline().split()]
        assert len(ranks) == 2
        front.kill()
    assert eventually(lambda: not any(_is_alive(rank) for rank in ranks), 30)


def _is_alive(process: psutil.Process) -> bool:
    """Nobody may be there to take its exit code: then it is a zombie for ever."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
