"""An engine in its own process, for a server in this one."""

import functools
from pathlib import Path

from musespark.config.engine import EngineConfig
from musespark.engine.client import EngineClient
from musespark.engine.process_client import start_process_client
from musespark.engine.thread_client import start_thread_client
from musespark.llm.building import build_engine


def launch_engine(
    model: str | Path,
    config: EngineConfig,
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    in_process: bool = False,
) -> EngineClient:
    """Start loading a model and return at once; await `wait_ready()` of the result.

    Must be called from a running asyncio loop.

    Args:
        model: a packaged model's name, a folder, or a Hugging Face repository id.
        config: limits and cache settings.
        device: "cpu" or "cuda"; None: CUDA where there is a device.
        dtype: as for `load_decoder`.
        revision: branch, tag or commit of a Hugging Face repository.
        in_process: run it in a thread of this process instead, for tests and notebooks.
    """
    build = functools.partial(
        build_engine, model, config, device=device, dtype=dtype, revision=revision
    )
    start = start_thread_client if in_process else start_process_client
    return start(build, max_queue_len=config.max_queue_len)
