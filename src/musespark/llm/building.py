"""From a model's name to an engine that serves it."""

from pathlib import Path
from typing import cast

import torch

from musespark.chat.tokenizer import Tokenizer
from musespark.checkpoint.load import Progress
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.engine import EngineConfig
from musespark.config.model import DecoderConfig
from musespark.config.parallel import MoEBackend, Parallelism
from musespark.engine.capacity import free_memory, plan_kv_cache
from musespark.engine.client import EngineInfo
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.executor import InProcessExecutor
from musespark.engine.grammar import GrammarCompiler, has_grammar_library
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.runner import ModelRunner, OneByOneRunner
from musespark.llm.drafting import (
    choose_draft,
    draft_room,
    load_chosen_draft,
    make_speculation,
    with_chosen_draft,
)
from musespark.llm.loading import load_decoder
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
    """Load a model, give it a KV cache of the size that fits, and put an engine around it.

    Args:
        model: a packaged model's name, a folder, or a Hugging Face repository id.
        config: limits and cache settings.
        device: "cpu" or "cuda"; None: CUDA where there is a device.
        dtype: as for `load_decoder`.
        revision: branch, tag or commit of a Hugging Face repository.
        progress: told the bytes loaded so far and in all.

    Raises:
        ConfigError: the model's config or a setting is unsupported.
        CheckpointError: files are missing, damaged, or do not fit the config.
        CapacityError: the model's length does not fit into memory.
    """
    folder = resolve_checkpoint(str(model), revision)
    config = with_chosen_draft(config, model)
    chosen = choose_draft(config, DecoderConfig.from_folder(folder))
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)  # PyTorch has one setting for the process
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = load_decoder(
        folder,
        device=device,
        dtype=dtype,
        parallelism=Parallelism(moe_backend=cast("MoEBackend", config.moe_backend)),
        progress=progress,
    )
    decoder.pack()
    draft = None if chosen is None else load_chosen_draft(chosen, decoder, folder)
    plan = plan_kv_cache(
        decoder.config,
        config,
        decoder.dtype,
        free_memory(decoder.device),
        draft=None if chosen is None else draft_room(chosen, config, decoder),
    )
    layout = CacheLayout(
        block_size=plan.spec.block_size,
        num_full_blocks=plan.spec.num_full_blocks,
        num_sliding_blocks=plan.spec.num_sliding_blocks,
        sliding_window=decoder.config.sliding_window,
    )
    limits = EngineLimits(
        vocab_size=decoder.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=frozenset(decoder.config.eos_token_ids),
        prefix_caching=config.enable_prefix_caching,
        fixed_chunk=config.fixed_chunk if config.batch_invariant else None,
    )
    grammars = _grammar_compiler(folder, decoder.config.vocab_size)
    info = EngineInfo(
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        eos_token_ids=tuple(sorted(limits.eos_token_ids)),
        block_size=layout.block_size,
        num_full_blocks=layout.num_full_blocks,
        num_sliding_blocks=layout.num_sliding_blocks,
        dtype=str(decoder.dtype).removeprefix("torch."),
        kv_cache_dtype=str(plan.spec.dtype).removeprefix("torch."),
        device=str(decoder.device),
        structured_output=grammars is not None,
    )
    # Before anything is recorded as a graph, which repeats what was there then.
    expert_load = ExpertLoad(decoder.layers) if config.expert_load_metrics else None
    tap_layers = () if chosen is None else chosen.config.target_layer_ids
    kind = OneByOneRunner if config.batch_invariant else ModelRunner
    max_rows = 1 if chosen is None else 1 + chosen.num_tokens
    runner = kind(decoder, plan.spec, tap_layers=tap_layers, max_rows=max_rows)
    executor = InProcessExecutor(runner, layout, config.max_num_seqs, with_masks=runner.reads_masks)
    speculation = None
    if chosen is not None and draft is not None:
        speculation = make_speculation(chosen, draft, decoder, plan.spec, layout, config, executor)
    return Engine(executor, layout, limits, grammars, expert_load, speculation), info


def _grammar_compiler(folder: Path, vocab_size: int) -> GrammarCompiler | None:
    """What constrains output to grammars; None without the library or a byte-level tokenizer."""
    if not has_grammar_library() or not (folder / "tokenizer.json").exists():
        return None
    tokenizer = Tokenizer.from_folder(folder)
    vocabulary = tokenizer.vocabulary()
    return None if vocabulary is None else GrammarCompiler(vocabulary, vocab_size)
