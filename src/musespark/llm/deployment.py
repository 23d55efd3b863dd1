"""Where an engine runs: in this process, in processes of its own, on a cluster, under torchrun."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from musespark.checkpoint.load import Progress
from musespark.config.engine import EngineConfig
from musespark.config.environment import torchrun_place
from musespark.config.model import DecoderConfig
from musespark.engine.client import EngineInfo
from musespark.errors import ConfigError
from musespark.executor.group import Launcher
from musespark.executor.multiprocess import LocalLauncher
from musespark.executor.rank import Driver
from musespark.executor.ray_cluster import RayLauncher
from musespark.executor.remote_engine import RemoteEngine
from musespark.executor.torchrun import join_torchrun
from musespark.executor.world import Place, World
from musespark.llm.building import build_part
from musespark.llm.drafting import choose_draft
from musespark.llm.loading import default_device
from musespark.llm.open_engine import OpenEngine
from musespark.moe.deployment import validate_deployment

_NO_LIMIT = 2**31


def open_engine(
    model: str | Path,
    folder: Path,
    config: EngineConfig,
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
) -> tuple[OpenEngine, EngineInfo, Callable[[], None]]:
    """An engine, what it serves, and what ends it.

    Under torchrun it returns on the driver only; the other processes run their shares, and exit.

    Args:
        model: what `folder` was found by.
        folder: the checkpoint on this machine.
        config: with a draft that has a name.
        revision: as `model`.
        device: as for `build_engine`.
        dtype: as for `build_engine`.
        progress: as for `build_engine`.

    Raises:
        ConfigError, CheckpointError, CapacityError: as for `build_engine`.
    """
    check_deployment(folder, config, device)
    build = part_builder(model, revision, folder, config, device, dtype)
    place = torchrun_place()
    if place is not None and place.world_size > 1:
        world = join_torchrun(config, place, device_type_of(device))
        return _open_part(build, world, progress)
    if config.world_size == 1 and config.executor == "multiprocess":
        return _open_part(build, World(config, Place()), progress)
    # Nobody else is served, so a call may bring as many prompts as it likes.
    unlimited = dataclasses.replace(config, max_queue_len=_NO_LIMIT)
    remote = RemoteEngine(make_launcher(build, unlimited, device), config, progress=progress)
    return remote, remote.info, remote.close


def _open_part(
    build: "functools.partial[Any]", world: World, progress: Progress | None
) -> tuple[OpenEngine, EngineInfo, Callable[[], None]]:
    part = build(world, progress=progress if world.mesh.is_driver else None)
    if not isinstance(part, Driver):
        part.follow()
        world.leave()
        raise SystemExit(0)

    def close() -> None:
        part.engine.drain()
        part.end()
        world.leave()

    return part.engine, part.info, close


def make_launcher(
    build: "functools.partial[Any]", config: EngineConfig, device: str | torch.device | None
) -> Launcher:
    """What starts the ranks; each replica's queue is its share of the whole."""
    queue_len = -(-config.max_queue_len // config.data_parallel_size)
    if config.executor == "ray":
        # The cluster's devices count, not this machine's.
        named = None if device is None else device_type_of(device)
        return RayLauncher(build, config, device_type=named, max_queue_len=queue_len)
    return LocalLauncher(build, config, device_type=device_type_of(device), max_queue_len=queue_len)


def part_builder(
    model: str | Path,
    revision: str | None,
    folder: Path,
    config: EngineConfig,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
) -> "functools.partial[Any]":
    """A `BuildPart`. Other machines find the model for themselves, this one has found it."""
    if config.executor == "ray":
        return functools.partial(build_part, model, revision, config, device, dtype)
    return functools.partial(build_part, folder, None, config, device, dtype)


def check_deployment(folder: Path, config: EngineConfig, device: str | torch.device | None) -> None:
    """Refuse what the model or this machine cannot be asked for, before anything is started.

    Raises:
        ConfigError: says which setting to change.
        CheckpointError: the model's config is damaged, or there is no such draft.
    """
    model = DecoderConfig.from_folder(folder)
    validate_deployment(model, config)
    choose_draft(config, model)
    if config.executor == "ray" or device_type_of(device) != "cuda" or torchrun_place() is not None:
        return
    have, want = torch.cuda.device_count(), config.world_size
    if have < want:
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} x pipeline_parallel_size "
            f"{config.pipeline_parallel_size} x data_parallel_size {config.data_parallel_size} "
            f"needs {want} GPUs, but {have} can be seen here. Lower the sizes, check "
            "CUDA_VISIBLE_DEVICES, or set executor to ray for several machines."
        )


def device_type_of(device: str | torch.device | None) -> str:
    """ "cuda" or "cpu"; None: CUDA where there is a device."""
    return default_device() if device is None else str(device).partition(":")[0]
