"""From a model's name to an engine that serves it, or to one rank's share of that."""

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from musespark.chat.tokenizer import Tokenizer
from musespark.checkpoint.load import Progress
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.engine import EngineConfig
from musespark.config.model import DecoderConfig
from musespark.engine.capacity import NO_DRAFT, CachePlan, free_memory, plan_kv_cache
from musespark.engine.client import EngineInfo
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.executor import Executor, InProcessExecutor
from musespark.engine.grammar import GrammarCompiler, has_grammar_library
from musespark.engine.inputs import InputBuilder
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.runner import ModelRunner, OneByOneRunner
from musespark.engine.trial_steps import warm_up
from musespark.executor.distributed import DriverExecutor, accept_ranks, connect_to_driver, follow
from musespark.executor.rank import Driver, Follower
from musespark.executor.world import Place, World
from musespark.llm.drafting import (
    ChosenDraft,
    choose_draft,
    draft_room,
    load_chosen_draft,
    make_speculation,
    with_chosen_draft,
)
from musespark.llm.loading import default_device, load_decoder
from musespark.model.decoder import Decoder
from musespark.model.draft import DraftDecoder
from musespark.moe.load import ExpertLoad


def build_engine(
    model: str | Path,
    config: EngineConfig,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> tuple[Engine, EngineInfo]:
    """Load a model into this process, with a KV cache of the size that fits and an engine around.

    Args:
        model: a packaged model's name, a folder, or a Hugging Face repository id.
        config: limits and cache settings, for one process.
        device: "cpu" or "cuda"; None: CUDA where there is a device.
        dtype: as for `load_decoder`.
        revision: branch, tag or commit of a Hugging Face repository.
        progress: told the bytes loaded so far and in all.

    Raises:
        ConfigError: the model's config or a setting is unsupported.
        CheckpointError: files are missing, damaged, or do not fit the config.
        CapacityError: the model's length does not fit into memory.
    """
    config = with_chosen_draft(config, model)
    part = build_part(
        model, revision, config, device, dtype, World(config, Place()), progress=progress
    )
    assert isinstance(part, Driver)  # noqa: S101 - of one process
    return part.engine, part.info


@dataclass(frozen=True, slots=True)
class _Share:
    """What every rank has."""

    folder: Path
    decoder: Decoder
    draft: ChosenDraft | None
    plan: CachePlan
    runner: ModelRunner
    expert_load: ExpertLoad | None

    @property
    def layout(self) -> CacheLayout:
        """The cache, as engines see it."""
        spec = self.plan.spec
        return CacheLayout(
            block_size=spec.block_size,
            num_full_blocks=spec.num_full_blocks,
            num_sliding_blocks=spec.num_sliding_blocks,
            sliding_window=self.decoder.config.sliding_window,
        )


def build_part(
    model: str | Path,
    revision: str | None,
    config: EngineConfig,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    world: World,
    *,
    progress: Progress | None = None,
) -> Driver | Follower:
    """Load one rank's share of a model; arguments and errors as for `build_engine`.

    Args:
        model: a folder on this machine, or a name that leads to one.
        revision: of a Hugging Face repository.
        config: the same on all ranks, with a draft that has a name.
        device: "cpu" or "cuda".
        dtype: the compute dtype.
        world: this rank's place; all ranks call this.
        progress: told how far this rank's share is read.
    """
    _share_cores(config, world)
    # Before loading, which may take different ranks very different times.
    followers = accept_ranks(world) if world.mesh.is_driver else None
    driver = connect_to_driver(world) if followers is None else None
    folder = resolve_checkpoint(str(model), revision)
    chosen = choose_draft(config, DecoderConfig.from_folder(folder))
    decoder = load_decoder(
        folder,
        device=_device(device, world),
        dtype=dtype,
        parallelism=config,
        mesh=world.mesh,
        progress=progress,
    )
    decoder.pack()
    draft = None
    if chosen is not None and followers is not None:
        draft = load_chosen_draft(chosen, decoder, folder)
    plan = _plan_cache(decoder, chosen, config, world)
    # Before anything is recorded as a graph, which repeats what was there then.
    expert_load = ExpertLoad(decoder.layers) if config.expert_load_metrics else None
    tap_layers = () if chosen is None else chosen.config.target_layer_ids
    kind = OneByOneRunner if config.batch_invariant else ModelRunner
    runner = kind(decoder, plan.spec, tap_layers=tap_layers)
    share = _Share(folder, decoder, chosen, plan, runner, expert_load)
    if followers is not None:
        return _driver(share, draft, config, followers)
    assert driver is not None  # noqa: S101
    inputs = _input_builder(share, config)

    def follow_driver() -> None:
        follow(runner, inputs, driver, decoder.layout.tensor)
        runner.close()

    return Follower(follow_driver, _held_bytes(runner.device))


def _driver(
    share: _Share, draft: DraftDecoder | None, config: EngineConfig, followers: list[Connection]
) -> Driver:
    """The rank with the engine."""
    layout, runner = share.layout, share.runner
    on_gpu = runner.device.type == "cuda"
    executor: Executor
    leading: DriverExecutor | None = None
    if config.world_size == 1:
        executor = InProcessExecutor(
            runner,
            layout,
            config.max_num_seqs,
            with_masks=runner.reads_masks,
            runs_ahead=on_gpu,
        )
    else:
        executor = leading = DriverExecutor(
            runner,
            _input_builder(share, config),
            followers,
            share.decoder.layout.tensor,
            depth=config.pipeline_parallel_size,
            in_lockstep=config.shares_experts_over_replicas,
            runs_ahead=on_gpu
            and config.pipeline_parallel_size == 1
            and not config.shares_experts_over_replicas,
        )
    if config.warms_up and runner.records_steps:
        warm_up(executor, layout, config.max_num_seqs, config.max_num_batched_tokens)
    speculation = None
    if share.draft is not None and draft is not None:
        speculation = make_speculation(
            share.draft, draft, share.decoder, share.plan.spec, layout, config, executor
        )
    limits = _limits(config, share.decoder, share.plan)
    grammars = _grammar_compiler(share.folder, limits.vocab_size)
    engine = Engine(executor, layout, limits, grammars, share.expert_load, speculation)
    info = _info(share.decoder, share.plan, limits, with_grammars=grammars is not None)

    def end() -> None:
        if leading is not None:
            leading.end()
        runner.close()

    return Driver(engine, info, end, _held_bytes(runner.device))


def _input_builder(share: _Share, config: EngineConfig) -> InputBuilder:
    runner = share.runner
    return InputBuilder(
        share.layout, config.max_num_seqs, runner.device, with_masks=runner.reads_masks
    )


def _share_cores(config: EngineConfig, world: World) -> None:
    ranks = world.place.ranks_here
    if config.num_threads is not None or ranks > 1:
        # PyTorch has one setting for the process.
        threads = config.num_threads or torch.get_num_threads()
        torch.set_num_threads(max(1, threads // ranks))


def _device(device: str | torch.device | None, world: World) -> str | torch.device:
    device = default_device() if device is None else device
    is_any_gpu = str(device) == "cuda" and world.parallelism.world_size > 1
    return f"cuda:{world.place.device_index}" if is_any_gpu else device


def _plan_cache(
    decoder: Decoder, chosen: ChosenDraft | None, config: EngineConfig, world: World
) -> CachePlan:
    world.minimum([0])  # every rank has loaded: memory is what is left for good
    free = free_memory(decoder.device)
    if decoder.device.type == "cpu":
        free //= world.place.ranks_here
    return plan_kv_cache(
        decoder.config,
        config,
        decoder.dtype,
        free,
        draft=NO_DRAFT if chosen is None else draft_room(chosen, config, decoder),
        layout=decoder.layout,
        minimum=world.minimum,
    )


def _held_bytes(device: torch.device) -> int:
    """Memory that weights and caches take, and with them whatever else this process holds."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return psutil.Process().memory_info().rss


def _limits(config: EngineConfig, decoder: Decoder, plan: CachePlan) -> EngineLimits:
    return EngineLimits(
        vocab_size=decoder.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=frozenset(decoder.config.eos_token_ids),
        prefix_caching=config.enable_prefix_caching,
        fixed_chunk=config.fixed_chunk if config.batch_invariant else None,
    )


def _info(
    decoder: Decoder, plan: CachePlan, limits: EngineLimits, *, with_grammars: bool
) -> EngineInfo:
    return EngineInfo(
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        eos_token_ids=tuple(sorted(limits.eos_token_ids)),
        block_size=plan.spec.block_size,
        num_full_blocks=plan.spec.num_full_blocks,
        num_sliding_blocks=plan.spec.num_sliding_blocks,
        dtype=str(decoder.dtype).removeprefix("torch."),
        kv_cache_dtype=str(plan.spec.dtype).removeprefix("torch."),
        device=str(decoder.device),
        structured_output=with_grammars,
    )


def _grammar_compiler(folder: Path, vocab_size: int) -> GrammarCompiler | None:
    """What constrains output to grammars; None without the library or a byte-level tokenizer."""
    if not has_grammar_library() or not (folder / "tokenizer.json").exists():
        return None
    tokenizer = Tokenizer.from_folder(folder)
    vocabulary = tokenizer.vocabulary()
    return None if vocabulary is None else GrammarCompiler(vocabulary, vocab_size)
