"""From the settings of a draft to what guesses ahead in an engine."""

import dataclasses
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from musespark.checkpoint.load import Progress
from musespark.checkpoint.source import packaged_draft, resolve_checkpoint
from musespark.config.draft import DraftConfig
from musespark.config.engine import EngineConfig
from musespark.config.environment import cache_folder
from musespark.config.model import DecoderConfig
from musespark.engine.capacity import DraftRoom
from musespark.engine.executor import Executor, StepOutput
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.speculation import (
    Speculation,
    SpeculationSettings,
    context_rows,
    draft_inputs,
)
from musespark.engine.trial_steps import TrialSteps
from musespark.errors import ConfigError
from musespark.llm.loading import load_draft, load_embedding
from musespark.model.decoder import Decoder
from musespark.model.draft import DraftDecoder
from musespark.model.draft_cache import draft_bytes_per_block
from musespark.model.kv_cache import KVCacheSpec, kv_cache_dtype
from musespark.ops.graph_recorder import SIZES
from musespark.speculative.budget import StepCosts
from musespark.speculative.costs import cached_costs, measure_costs
from musespark.speculative.proposer import DraftProposer
from musespark.speculative.verify import Verification

# Steps without guesses that are timed together, where each may begin before the last has ended.
_STEPS_AHEAD = 4


def with_chosen_draft(config: EngineConfig, model: str | Path) -> EngineConfig:
    """The same settings, with the draft that "auto" stands for; it depends on the model's name."""
    if config.draft != "auto":
        return config
    draft = packaged_draft(str(model))
    if draft is not None:
        return dataclasses.replace(config, draft=draft)
    return dataclasses.replace(config, draft="none", num_speculative_tokens=None)


@dataclass(frozen=True, slots=True)
class ChosenDraft:
    """A draft that was found to fit its target, before any weights are read."""

    folder: Path
    config: DraftConfig
    num_tokens: int
    """Tokens to guess at a time."""


def choose_draft(config: EngineConfig, target: DecoderConfig) -> ChosenDraft | None:
    """The draft that the settings ask for; None: none.

    Raises:
        ConfigError: it was made for another target, or is asked for too many tokens, or for as
            many as pay where that cannot be measured.
        CheckpointError: there is no such draft.
    """
    if config.draft == "none":
        return None
    if config.shares_experts_over_replicas and config.num_speculative_tokens is None:
        raise ConfigError(
            "num_speculative_tokens: must be given where replicas share experts: one replica alone "
            "cannot measure how many tokens pay."
        )
    folder = resolve_checkpoint(config.draft)
    draft = DraftConfig.from_folder(folder)
    draft.check_target(target)
    num_tokens = config.num_speculative_tokens or draft.max_tokens
    draft.check_num_tokens(num_tokens)
    return ChosenDraft(folder, draft, num_tokens)


def draft_room(chosen: ChosenDraft, config: EngineConfig, decoder: Decoder) -> DraftRoom:
    """What the draft needs of the cache."""
    stored = kv_cache_dtype(config.kv_cache_dtype, decoder.dtype)
    full, sliding = (
        draft_bytes_per_block(chosen.config, decoder.config, kind, config.block_size, stored)
        for kind in ("full_attention", "sliding_attention")
    )
    return DraftRoom(full, sliding, chosen.num_tokens)


def load_chosen_draft(
    chosen: ChosenDraft, decoder: Decoder, folder: Path, *, progress: Progress | None = None
) -> DraftDecoder:
    """Load the draft beside its target, on the rank that samples.

    Args:
        chosen: which one.
        decoder: this rank's part of the target.
        folder: the target's checkpoint.
        progress: told the bytes loaded so far and in all.
    """
    own = decoder.embed_tokens
    if own is not None and own.weight.shape[0] == decoder.config.vocab_size:
        embedding: Tensor = own.weight
    else:  # the table is cut, or on another stage
        embedding = load_embedding(folder, dtype=decoder.dtype, device=decoder.device)
    draft = load_draft(
        chosen.folder, decoder.config, embedding, dtype=decoder.dtype, progress=progress
    )
    draft.pack()
    return draft


def make_speculation(
    chosen: ChosenDraft,
    draft: DraftDecoder,
    decoder: Decoder,
    spec: KVCacheSpec,
    layout: CacheLayout,
    config: EngineConfig,
    executor: Executor,
) -> Speculation:
    """What guesses ahead in an engine around `executor`, which has run nothing yet."""
    proposer = DraftProposer(draft, decoder.config, spec)
    costs: StepCosts | None = None
    if not executor.in_lockstep:  # where a step needs other engines, which may not measure now
        key = _cost_key(chosen, decoder, spec, config, executor)
        trial = _Trial(proposer, executor, layout, chosen.num_tokens)
        if config.warms_up and proposer.records:
            trial.record(config)
        costs = cached_costs(cache_folder() / "speculation", key, lambda: trial.measure(config))
    return Speculation(
        proposer,
        SpeculationSettings(
            num_tokens=chosen.num_tokens,
            costs=costs,
            fixed_width=config.num_speculative_tokens is not None,
            draws_at_random=config.draft_sampling == "probabilistic",
            verification=cast("Verification", config.draft_verification),
        ),
    )


def _cost_key(
    chosen: ChosenDraft,
    decoder: Decoder,
    spec: KVCacheSpec,
    config: EngineConfig,
    executor: Executor,
) -> dict[str, Any]:
    """All that the times of steps depend on."""
    on_gpu = decoder.device.type == "cuda"
    device = torch.cuda.get_device_name(decoder.device) if on_gpu else f"cpu of {platform.node()}"
    return {
        "software": [version("musespark"), torch.__version__],
        "model": repr(decoder.config),
        "draft": repr(chosen.config),
        "num_tokens": chosen.num_tokens,
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": str(decoder.dtype),
        "cache": [spec.block_size, str(spec.dtype)],
        "layout": repr(decoder.layout),
        "experts": config.moe_backend,
        "sizes": [config.max_num_seqs, config.max_num_batched_tokens],
        "runs_ahead": executor.runs_ahead,
    }


class _Trial:
    """Runs the three parts of speculative decoding on what means nothing."""

    def __init__(
        self, proposer: DraftProposer, executor: Executor, layout: CacheLayout, num_tokens: int
    ) -> None:
        self._proposer, self._num_tokens = proposer, num_tokens
        self._runs_ahead = executor.runs_ahead
        self._steps = TrialSteps(executor, layout, 1 + num_tokens)
        self._last: StepOutput | None = None

    def record(self, config: EngineConfig) -> None:
        """Guess, and take in, once for each number that has a graph of its own."""
        most = min(config.max_num_seqs, config.max_num_batched_tokens)
        for count in sorted({min(size, most) for size in SIZES}, reverse=True):
            self._guess(count)
        assert self._last is not None  # noqa: S101
        for size in reversed(SIZES):
            self._take_in(self._last, torch.zeros(size, dtype=torch.int64))

    def measure(self, config: EngineConfig) -> StepCosts:
        """Time 1, 2, 4, ... sequences, as many as the settings allow."""
        most = min(config.max_num_seqs, config.max_num_batched_tokens // (1 + self._num_tokens))
        sizes = [1 << power for power in range(max(1, most).bit_length())]
        plain_steps = _STEPS_AHEAD if self._runs_ahead else 1
        return measure_costs(
            self._step, self._guess, sizes, self._num_tokens, plain_steps=plain_steps
        )

    def _step(self, num_sequences: int, rows: int, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            output = self._last = self._steps.run(num_sequences, rows)
        output.logits.argmax(dim=-1).tolist()
        if rows == 1:
            return  # such rows wait, and are taken in with those of other steps
        self._take_in(output, torch.arange(num_sequences * rows))

    def _take_in(self, output: StepOutput, rows: Tensor) -> None:
        """Some rows of a step, perhaps one of them several times."""
        rows = rows.to(output.batch.positions.device)
        context = context_rows(output.batch, self._proposer.features(output.taps))
        self._proposer.inject(context.map(lambda x: x[rows]))

    def _guess(self, num_sequences: int) -> None:
        if self._last is None or len(self._last.batch.seq_lens) != num_sequences:
            self._step(num_sequences, 1)
        assert self._last is not None  # noqa: S101
        anchors, context = draft_inputs(
            self._last.batch,
            range(num_sequences),
            [0] * num_sequences,
            [self._steps.num_computed] * num_sequences,
        )
        guess = self._proposer.propose(anchors, context, self._num_tokens, None)
        guess.token_ids.tolist()
