"""An engine behind the client's seam, in a thread and in a process of its own."""

import asyncio
import contextlib
import os
import signal
import time

import pytest
from tests.engine import fake_engine
from tests.engine.fake_model import VOCAB_SIZE, greedy

from musespark.config.sampling import SamplingParams
from musespark.engine.client import EngineRequest, EngineState
from musespark.engine.request import FinishReason
from musespark.engine.thread_client import start_thread_client
from musespark.errors import (
    CapacityError,
    EngineDeadError,
    EngineNotReadyError,
    QueueFullError,
    RequestError,
)
from musespark.executor.group import RankGroup
from musespark.executor.multiprocess import LocalRank, start_process_client

STARTERS = [start_thread_client, start_process_client]
both = pytest.mark.parametrize("start", STARTERS, ids=["thread", "process"])


def greedy_params(count: int, **settings) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **settings)


def request_of(name: str, prompt, params) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), params)


async def collect(stream):
    """(tokens of each output, finish reason of each output)."""
    tokens: dict[int, list[int]] = {}
    reasons = {}
    async for output in stream:
        tokens.setdefault(output.index, []).extend(output.token_ids)
        if output.finish_reason is not None:
            assert output.index not in reasons
            reasons[output.index] = output.finish_reason
    return tokens, reasons


async def complete(client, name, prompt, count):
    stream = await client.generate(request_of(name, prompt, greedy_params(count)))
    tokens, reasons = await collect(stream)
    assert reasons == {0: FinishReason.LENGTH}
    return tokens[0]


@contextlib.asynccontextmanager
async def running(start, build=fake_engine.build, **settings):
    client = start(build, **settings)
    try:
        await client.wait_ready()
        yield client
    finally:
        await asyncio.wait_for(client.shutdown(), 10)
        assert client.state is EngineState.DEAD


def run(scenario):
    """Run one coroutine; nothing here may take longer."""
    asyncio.run(asyncio.wait_for(scenario, 60))


async def wait_for_no_blocks(client):
    """The pool is full again soon after the last request has ended."""
    async with asyncio.timeout(5):
        while client.stats().kv_cache_usage or client.stats().num_running:
            await asyncio.sleep(0.01)


@both
def test_requests_run_together_and_get_their_own_tokens(start):
    async def scenario():
        async with running(start) as client:
            assert client.is_healthy
            assert client.info.vocab_size == VOCAB_SIZE
            prompts = [[n, n + 1, n + 2] * (n + 1) for n in range(20)]
            calls = [complete(client, str(n), p, 5 + n) for n, p in enumerate(prompts)]
            for n, tokens in enumerate(await asyncio.gather(*calls)):
                assert tokens == greedy(prompts[n], 5 + n)
            stats = client.stats()
            assert stats.generation_tokens == sum(5 + n for n in range(20))
            assert stats.finished == {"length": 20}
            await wait_for_no_blocks(client)

    run(scenario())


@both
def test_everything_a_request_asks_for_arrives(start):
    async def scenario():
        async with running(start) as client:
            params = SamplingParams(
                n=3, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, logit_bias={3: 1.0}
            )
            stream = await client.generate(request_of("a", range(12), params))
            outputs = [output async for output in stream]
            for index in range(3):
                mine = [output for output in outputs if output.index == index]
                assert sum(len(output.token_ids) for output in mine) == 6
                entries = [entry for output in mine for entry in output.logprobs]
                assert all(len(entry.top) == 2 for entry in entries)
                assert {output.num_cached_tokens for output in mine} == {8 if index else 0}
            (told,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
            assert told[0] is None
            assert len(told) == 12

    run(scenario())


@both
def test_refusals_come_before_the_stream(start):
    async def scenario():
        async with running(start, fake_engine.build_slow, max_queue_len=2) as client:
            for prompt in ([], [VOCAB_SIZE], [0] * 400):
                with pytest.raises(RequestError):
                    await client.generate(request_of("bad", prompt, greedy_params(3)))
            streams = [
                await client.generate(request_of(str(n), [n], greedy_params(50))) for n in range(10)
            ]
            with pytest.raises(QueueFullError) as refused:
                await client.generate(request_of("one more", [1], greedy_params(3)))
            assert refused.value.retry_after > 0
            with pytest.raises(RequestError, match="runs already"):
                await client.generate(request_of("3", [1], greedy_params(3)))
            for stream in streams:
                await collect(stream)
            assert len(await complete(client, "3", [1], 3)) == 3  # the name is free again

    run(scenario())


@both
def test_leaving_a_stream_frees_its_blocks_and_its_name(start):
    async def scenario():
        async with running(start, fake_engine.build_slow) as client:
            for _ in range(5):
                stream = await client.generate(request_of("a", [1, 2], greedy_params(300)))
                async for _ in stream:
                    break
                await stream.aclose()
                await stream.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            await wait_for_no_blocks(client)
            assert await complete(client, "a", [1, 2], 4) == greedy([1, 2], 4)
            assert client.stats().finished == {"abort": 5, "length": 1}

    run(scenario())


@both
def test_a_caller_that_vanishes_while_submitting_leaves_nothing(start):
    async def scenario():
        async with running(start, fake_engine.build_slow) as client:
            request = request_of("a", range(30), greedy_params(300))
            task = asyncio.create_task(client.generate(request))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await complete(client, "a", [4], 4) == greedy([4], 4)
            await wait_for_no_blocks(client)

    run(scenario())


@both
def test_one_output_can_be_aborted(start):
    async def scenario():
        async with running(start, fake_engine.build_slow) as client:
            params = greedy_params(30, n=2)
            stream = await client.generate(request_of("a", [5, 6], params))
            first = await anext(stream)
            await client.abort("a", first.index)
            await client.abort("unknown")
            tokens, reasons = await collect(stream)
            other = 1 - first.index
            assert reasons == {first.index: FinishReason.ABORT, other: FinishReason.LENGTH}
            assert tokens[other][-20:] == greedy([5, 6], 30)[-20:]
            await client.abort("a")

    run(scenario())


@both
def test_a_slow_reader_holds_up_nobody_and_misses_nothing(start):
    async def scenario():
        async with running(start) as client:
            slow = await client.generate(request_of("slow", [1], greedy_params(200)))
            assert len(await complete(client, "fast", [2], 300)) == 300
            deltas = [output async for output in slow]
            assert len(deltas) < 5  # joined
            assert [t for delta in deltas for t in delta.token_ids] == greedy([1], 200)

    run(scenario())


@both
def test_the_prefix_cache_can_be_emptied(start):
    async def scenario():
        async with running(start) as client:
            for expected in (0, 16, 0):
                params = greedy_params(2)
                stream = await client.generate(request_of("a", range(18), params))
                assert {output.num_cached_tokens async for output in stream} == {expected}
                if expected:
                    await client.reset_prefix_cache()

    run(scenario())


@both
def test_shutting_down_lets_requests_finish_or_aborts_them(start):
    async def scenario():
        client = start(fake_engine.build_slow)
        await client.wait_ready()
        short = await client.generate(request_of("short", [1], greedy_params(5)))
        long = await client.generate(request_of("long", [2], greedy_params(390)))
        stopping = asyncio.create_task(client.shutdown(drain_seconds=0.5))
        await asyncio.sleep(0.05)
        assert client.state is EngineState.DRAINING
        with pytest.raises(EngineNotReadyError, match="shutting down"):
            await client.generate(request_of("late", [1], greedy_params(5)))
        assert (await collect(short))[1] == {0: FinishReason.LENGTH}
        tokens, reasons = await collect(long)
        assert reasons == {0: FinishReason.ABORT}
        assert tokens[0] == greedy([2], len(tokens[0]))
        await stopping
        await client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await client.generate(request_of("late", [1], greedy_params(5)))

    run(scenario())


@both
@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (fake_engine.build_too_large, CapacityError, "max_model_len: lower it"),
        (fake_engine.build_broken, EngineDeadError, "no such weight"),
    ],
)
def test_a_failed_start_is_told(start, build, error, text):
    async def scenario():
        client = start(build)
        assert not client.is_healthy
        with pytest.raises(EngineNotReadyError, match="still starting"):
            await client.generate(request_of("early", [1], greedy_params(5)))
        with pytest.raises(error, match=text):
            await client.wait_ready()
        assert client.state is EngineState.DEAD
        await client.shutdown()

    run(scenario())


@pytest.mark.parametrize(
    ("start", "build", "text"),
    [
        (start_thread_client, fake_engine.build_mortal, "poisoned"),
        (start_process_client, fake_engine.build_mortal, "poisoned"),
        (start_process_client, fake_engine.build_segfaulting, "ended with code 7"),
    ],
)
def test_death_reaches_every_stream_at_once(start, build, text):
    async def scenario():
        client = start(build)
        await client.wait_ready()
        careful = greedy_params(300, logit_bias={fake_engine.POISON: -100})
        streams = [await client.generate(request_of(str(n), [n], careful)) for n in range(4)]
        poison = request_of("poison", [fake_engine.POISON] * 2, greedy_params(3))
        with contextlib.suppress(EngineDeadError):
            streams.append(await client.generate(poison))
        for stream in streams:
            with pytest.raises(EngineDeadError, match=text):
                await collect(stream)
        assert not client.is_healthy
        with pytest.raises(EngineDeadError, match=text):
            await client.generate(request_of("late", [1], greedy_params(5)))
        await client.shutdown()

    run(scenario())


def engine_process(client):
    assert isinstance(client._link, RankGroup)
    (rank,) = client._link.ranks
    assert isinstance(rank, LocalRank)
    return rank.process


def test_a_killed_process_is_noticed_at_once_even_when_idle():
    async def scenario():
        client = start_process_client(fake_engine.build)
        await client.wait_ready()
        started = time.monotonic()
        os.kill(engine_process(client).pid, signal.SIGKILL)
        while client.is_healthy:
            await asyncio.sleep(0.005)
        assert time.monotonic() - started < 1
        with pytest.raises(EngineDeadError, match="signal 9"):
            await client.generate(request_of("a", [1], greedy_params(5)))
        await client.shutdown()

    run(scenario())


def test_shutdown_is_bounded_while_loading_and_when_the_engine_hangs():
    async def scenario():
        loading = start_process_client(fake_engine.build_never)
        await asyncio.sleep(0.2)
        await asyncio.wait_for(loading.shutdown(drain_seconds=60), 5)
        with pytest.raises(EngineDeadError):
            await loading.wait_ready()

        hanging = start_process_client(fake_engine.build_slow)
        await hanging.wait_ready()
        stream = await hanging.generate(request_of("a", [1], greedy_params(300)))
        process = engine_process(hanging)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.wait_for(hanging.shutdown(), 10)
        with pytest.raises(EngineDeadError):
            await collect(stream)
        async with asyncio.timeout(5):
            while process.exitcode is None:
                await asyncio.sleep(0.01)
        assert process.exitcode == -signal.SIGKILL

    run(scenario())


def test_signals_of_the_terminal_do_not_reach_the_engine():
    async def scenario():
        async with running(start_process_client) as client:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(engine_process(client).pid, number)
            assert await complete(client, "a", [1], 5) == greedy([1], 5)

    run(scenario())
