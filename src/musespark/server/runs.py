"""Running requests, as a stream of deltas whose parts can be ended one by one.

A response may need several requests to the engine: one for each prompt, or one after another where
a tool call has to be brought about. They look like one here.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Protocol

from musespark.engine.client import EngineClient, EngineOutput, EngineRequest, OutputStream
from musespark.engine.request import FinishReason
from musespark.errors import EngineNotReadyError


class Run(Protocol):
    """Something that produces the deltas of `num_outputs` outputs, with indices from 0 on.

    Whoever has a run closes it, whether or not it has ended.
    """

    num_outputs: int

    def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """The deltas; to be called once."""
        ...

    async def stop(self, index: int) -> None:
        """End one output early; no more deltas of it are wanted."""
        ...

    async def aclose(self) -> None:
        """Abort what still runs."""
        ...


class EngineRun:
    """One request to the engine."""

    def __init__(self, engine: EngineClient, request: EngineRequest, stream: OutputStream) -> None:
        self._engine, self._request, self._stream = engine, request, stream
        self.num_outputs = request.params.n
        self._stopped: set[int] = set()

    @classmethod
    async def start(cls, engine: EngineClient, request: EngineRequest) -> "EngineRun":
        """Queue the request; raises what `EngineClient.generate` raises."""
        return cls(engine, request, await engine.generate(request))

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """See `Run`."""
        async for output in self._stream:
            if output.index in self._stopped:
                continue
            if output.finish_reason is FinishReason.ABORT:
                raise EngineNotReadyError(
                    "The request was aborted because the server is shutting down."
                )
            yield output

    async def stop(self, index: int) -> None:
        """See `Run`."""
        self._stopped.add(index)
        await self._engine.abort(self._request.request_id, index)

    async def aclose(self) -> None:
        """See `Run`."""
        # Closing a stream that nobody has read from need not run any of its code.
        await self._engine.abort(self._request.request_id)
        await self._stream.aclose()


class MergedRun:
    """Several runs side by side; their outputs are numbered through."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._firsts = [sum(run.num_outputs for run in runs[:i]) for i in range(len(runs))]
        self.num_outputs = sum(run.num_outputs for run in runs)

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """See `Run`."""
        # One slot: runs are asked for more only when somebody has taken what they gave.
        queue: asyncio.Queue[EngineOutput | Exception | None] = asyncio.Queue(1)
        pumps = [
            asyncio.create_task(_pump(run, first, queue))
            for run, first in zip(self._runs, self._firsts, strict=True)
        ]
        try:
            running = len(pumps)
            while running:
                output = await queue.get()
                if output is None:
                    running -= 1
                elif isinstance(output, Exception):
                    raise output
                else:
                    yield output
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def stop(self, index: int) -> None:
        """See `Run`."""
        which = max(i for i, first in enumerate(self._firsts) if first <= index)
        await self._runs[which].stop(index - self._firsts[which])

    async def aclose(self) -> None:
        """See `Run`."""
        for run in self._runs:
            await run.aclose()


async def _pump(
    run: Run, first: int, queue: "asyncio.Queue[EngineOutput | Exception | None]"
) -> None:
    try:
        async for output in run.outputs():
            await queue.put(replace(output, index=first + output.index))
        await queue.put(None)
    except Exception as error:  # handed to whoever reads the queue
        await queue.put(error)


async def start_runs(engine: EngineClient, requests: Sequence[EngineRequest]) -> Run:
    """Queue all requests; if one is refused, none runs.

    Raises:
        MuseSparkError: what `EngineClient.generate` raises.
    """
    runs: list[EngineRun] = []
    try:
        for request in requests:
            run = await EngineRun.start(engine, request)
            runs.append(run)
    except BaseException:
        for run in runs:
            await run.aclose()
        raise
    return runs[0] if len(runs) == 1 else MergedRun(runs)
