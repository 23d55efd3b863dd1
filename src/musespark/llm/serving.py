"""An engine in processes of its own, for a server in this one."""

import dataclasses
import functools
from pathlib import Path

from musespark.checkpoint.load import Progress
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.engine import EngineConfig
from musespark.config.environment import torchrun_place
from musespark.engine.async_client import AsyncEngineClient
from musespark.engine.client import EngineClient
from musespark.engine.thread_client import start_thread_client
from musespark.errors import ConfigError
from musespark.executor.group import RankGroup
from musespark.llm.building import build_engine
from musespark.llm.deployment import check_deployment, make_launcher, part_builder
from musespark.llm.drafting import with_chosen_draft


def launch_engine(
    model: str | Path,
    config: EngineConfig,
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    in_process: bool = False,
    progress: Progress | None = None,
) -> EngineClient:
    """Start loading a model and return at once; await `wait_ready()` of the result.

    Must be called from a running asyncio loop.

    Args:
        model: a packaged model's name, a folder, or a Hugging Face repository id.
        config: limits, cache settings, and how the model is spread.
        device: "cpu" or "cuda"; None: CUDA where there is a device.
        dtype: as for `load_decoder`.
        revision: branch, tag or commit of a Hugging Face repository.
        in_process: run it in a thread of this process instead, for tests and notebooks.
        progress: told the bytes of rank 0 that are loaded, and all of them, from another thread.

    Raises:
        ConfigError, CheckpointError: the model cannot be spread like this, or is not there.
    """
    config = dataclasses.replace(config, warms_up=True)
    if in_process:
        return start_thread_client(
            functools.partial(
                build_engine,
                model,
                config,
                device=device,
                dtype=dtype,
                revision=revision,
                progress=progress,
            ),
            max_queue_len=config.max_queue_len,
        )
    if torchrun_place() is not None:
        raise ConfigError(
            "torchrun runs offline work (musespark generate, or LLM). A server starts its "
            "processes itself: run musespark serve without torchrun."
        )
    config = with_chosen_draft(config, model)
    folder = resolve_checkpoint(str(model), revision)
    check_deployment(folder, config, device)
    build = part_builder(model, revision, folder, config, device, dtype)
    launcher = make_launcher(build, config, device)
    return AsyncEngineClient(
        lambda deliver: RankGroup(launcher, config, deliver, on_loading=progress)
    )
