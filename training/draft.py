"""Train Spark-Mini's draft. README.md beside this file says how; draft_config.py holds the numbers.

python -m training.draft --out build/spark-mini-draft
python -m training.draft --out build/spark-mini-draft --seconds 90    # a piece; run it again
"""

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from musespark import LLM, SamplingParams, load_decoder
from musespark.model.batch import ForwardBatch
from training.data import Encoded
from training.draft_config import DRAFT_RECIPE, SPARK_MINI_DRAFT, DraftRecipe
from training.draft_data import continued, made
from training.draft_export import export_draft
from training.draft_model import Blocks, Draft, DraftOutput
from training.export import ASSETS
from training.optimisation import make_optimiser, take_step, write_state

PLACES_JUDGED = 5
"""Tokens a cycle are reported for this many draft tokens."""


@dataclass(frozen=True)
class Judged:
    """A step's losses and how well the draft does."""

    cross_entropy: Tensor
    total_variation: Tensor
    confidence: Tensor
    tokens_per_cycle: Tensor
    """Mean over anchors of 1 + the draft tokens that a greedy target accepts."""


class Read(NamedTuple):
    """Conversations and what the target makes of them, padded to the longest."""

    ids: Tensor  # [N, T]
    trained: Tensor  # [N, T]
    logits: Tensor  # [N, T, V]
    taps: Tensor  # [N, T, taps * D]

    @staticmethod
    def together(parts: Sequence["Read"]) -> "Read":
        """Return single conversations as one batch."""
        return Read(
            *(
                pad_sequence([tensor[0] for tensor in tensors], batch_first=True)
                for tensors in zip(*parts, strict=True)
            )
        )


class Target:
    """The finished model, as the engine runs it: its logits, and its stream behind some layers."""

    def __init__(self, folder: Path, taps: tuple[int, ...], device: torch.device) -> None:
        """Load the checkpoint."""
        self.decoder = load_decoder(folder, device=device)
        table, head = self.decoder.embed_tokens, self.decoder.lm_head
        # One process has all of the model, and its weights are plain until they are packed.
        assert table is not None
        assert head is not None
        assert head.weight is not None
        self.embedding, self.lm_head = table.weight.float(), head.weight.float()
        self.decoder.pack()
        self.taps = taps

    def read(self, conversations: Sequence[Encoded]) -> list[Read]:
        """Run every conversation through the model."""
        device = self.decoder.device
        found = []
        for conversation in conversations:
            ids = torch.from_numpy(conversation.ids.astype("int64")).to(device)
            batch = ForwardBatch.uncached(ids)
            logits, streams = self.decoder.forward_with_taps(batch, None, self.taps)
            trained = torch.from_numpy(conversation.trained).to(device)
            taps = torch.cat(streams, -1).bfloat16()
            # Clones, so that training may use what inference has made.
            found.append(Read(*(t[None].clone() for t in (ids, trained, logits, taps))))
        return found


class Trainer:
    """The draft, its optimiser and the step they have reached."""

    def __init__(self, recipe: DraftRecipe, target: Target, device: torch.device) -> None:
        """Draw the initial weights from the recipe's seed."""
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.recipe, self.device = recipe, device
        self.draft = Draft(SPARK_MINI_DRAFT, recipe, target.embedding, target.lm_head).to(device)
        self.optimiser = make_optimiser(self.draft, recipe, device)
        self.step = 0

    def train_step(self, read: Read) -> Judged:
        """Take one step on some conversations."""
        judged = self.judge(read)
        recipe = self.recipe
        loss = (
            judged.cross_entropy
            + recipe.total_variation * judged.total_variation
            + recipe.confidence * judged.confidence
        )
        take_step(self.draft, self.optimiser, loss, recipe, self.step)
        self.step += 1
        return judged

    def judge(self, read: Read) -> Judged:
        """Return the losses at random blocks of the conversations."""
        blocks, wanted = self._draw_blocks(read.ids, read.trained)
        with torch.autocast(self.device.type, torch.bfloat16):
            output = self.draft(read.taps, blocks)
        places = blocks.anchors[:, :, None] + torch.arange(blocks.tokens.shape[2]).to(read.ids)
        row = torch.arange(len(read.ids), device=self.device)[:, None, None]
        # The target's logits at a token are for the next one, and so are a place's.
        places = places.clamp_max(read.ids.shape[1] - 1)
        return self._losses(output, read.logits[row, places], wanted)

    def _draw_blocks(self, ids: Tensor, trained: Tensor) -> tuple[Blocks, Tensor]:
        """Begin blocks at tokens that the assistant wrote and went on from.

        Returns the blocks, and [N, A, P] which places propose a token that the assistant wrote.
        """
        size = SPARK_MINI_DRAFT.block_size
        length = ids.shape[1]
        ids, trained = F.pad(ids, (0, size + 1)), F.pad(trained, (0, size + 1))
        weights = (trained & trained.roll(-1, 1))[:, :length].float() + 1e-9
        anchors = torch.multinomial(weights, self.recipe.anchors, replacement=True)  # [N, A]
        places = anchors[:, :, None] + torch.arange(size + 1, device=ids.device)
        row = torch.arange(len(ids), device=ids.device)[:, None, None]
        # A place counts as long as everything up to it is of one piece.
        wanted = trained[row, places].cumprod(-1)[:, :, 1:].float()
        return Blocks(anchors, ids[row, places][:, :, :-1]), wanted

    def _losses(self, output: DraftOutput, target_logits: Tensor, wanted: Tensor) -> Judged:
        """Compare distributions [N, A, P, V] where `wanted` [N, A, P] is 1."""
        p = target_logits.float().softmax(-1)
        log_q = output.logits.log_softmax(-1)
        accepted = torch.minimum(p, log_q.exp()).sum(-1)
        place = torch.arange(wanted.shape[-1], device=wanted.device)
        weights = wanted * torch.exp(-place / self.recipe.place_decay)
        weights = weights / weights.sum()
        confidence = F.binary_cross_entropy_with_logits(
            output.confidence, accepted.detach().clamp(0, 1), reduction="none"
        )
        hits = (output.logits.argmax(-1) == target_logits.argmax(-1)).float()
        whole = wanted[..., PLACES_JUDGED - 1]
        in_a_row = hits[..., :PLACES_JUDGED].cumprod(-1).sum(-1)
        return Judged(
            (-(p * log_q).sum(-1) * weights).sum(),
            ((1 - accepted) * weights).sum(),
            (confidence * weights).sum(),
            1 + (in_a_row * whole).sum() / whole.sum(),
        )

    def save(self, path: Path) -> None:
        """Write everything needed to go on."""
        state = {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "draft": self.draft.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        write_state(path, state)

    def load_from(self, path: Path) -> None:
        """Go on from a file that `save` wrote."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.recipe = replace(self.recipe, steps=state["recipe"]["steps"])
        if state["recipe"] != asdict(self.recipe):
            raise SystemExit(f"{path}: made by another recipe. Choose another --out folder.")
        self.step = state["step"]
        self.draft.load_state_dict(state["draft"])
        self.optimiser.load_state_dict(state["optimiser"])


def load_own(path: Path, folder: Path, recipe: DraftRecipe, device: torch.device) -> list[Encoded]:
    """Return the target's own replies, greedy and sampled ones, made and kept on first use."""
    if not path.exists():
        print(f"the target writes {recipe.own_conversations} replies", flush=True)
        llm = LLM(folder, device=device, max_num_seqs=256, max_model_len=recipe.max_tokens)
        sampled = int(recipe.own_conversations * recipe.own_sampled)
        own = []
        for temperature, seed, count in (
            (0.0, f"draft greedy {recipe.seed}", recipe.own_conversations - sampled),
            (1.0, f"draft sampled {recipe.seed}", sampled),
        ):

            def generate(
                prompts: list[list[int]], max_tokens: int, temperature: float = temperature
            ) -> list[list[int]]:
                params = SamplingParams(
                    temperature=temperature, max_tokens=max_tokens, seed=recipe.seed
                )
                return [list(done.token_ids) for done in llm.generate(prompts, params)]

            if count:
                own += continued(generate, recipe, seed, count)
                print(f"{len(own)} replies, {sum(len(c.ids) for c in own)} tokens", flush=True)
        ends = np.cumsum([len(conversation.ids) for conversation in own])
        np.savez(
            path,
            ids=np.concatenate([conversation.ids for conversation in own]),
            trained=np.concatenate([conversation.trained for conversation in own]),
            ends=ends,
        )
    with np.load(path) as held:
        parts = (np.split(held[name], held["ends"][:-1]) for name in ("ids", "trained"))
        return [Encoded(*pair) for pair in zip(*parts, strict=True)]


def train(
    trainer: Trainer,
    target: Target,
    own: list[Encoded],
    deadline: float,
    fit_until: float | None,
    state: Path,
) -> None:
    """Train until the recipe ends, or the deadline; write the state after every chunk."""
    own_read = by_length(target.read(own))
    print(f"{len(own)} replies read", flush=True)
    # The chunks that were read last; steps draw from them.
    chunks: deque[list[Read]] = deque(maxlen=trainer.recipe.pool_chunks)
    judged_by_kind: dict[str, Judged] = {}
    began, first = time.monotonic(), trainer.step
    while trainer.step < trainer.recipe.steps and time.monotonic() < deadline:
        recipe = trainer.recipe
        chunks.append(target.read(made(recipe, trainer.step // recipe.steps_per_chunk)))
        pool = by_length([read for chunk in chunks for read in chunk])
        for _ in range(recipe.steps_per_chunk):
            rng = np.random.default_rng((recipe.seed, trainer.step))
            kind, source = ("own", own_read) if rng.random() < recipe.own_share else ("made", pool)
            start = int(rng.integers(max(1, len(source) - recipe.rows + 1)))
            judged = trainer.train_step(Read.together(source[start : start + recipe.rows]))
            judged_by_kind[kind] = judged
        if fit_until is not None:
            now = wait(trainer.device)
            each = (now - began) / (trainer.step - first)
            left = max(0, int((fit_until - now) / each))
            trainer.recipe = replace(recipe, steps=trainer.step + left)
        report(trainer, judged_by_kind)
        trainer.save(state)


def by_length(read: list[Read]) -> list[Read]:
    """Sort, so that neighbours waste no padding."""
    return sorted(read, key=lambda conversation: conversation.ids.shape[1])


def wait(device: torch.device) -> float:
    """Return the time once the device has caught up."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def report(trainer: Trainer, judged_by_kind: dict[str, Judged]) -> None:
    """Print one line about the last steps of each kind."""
    parts = [
        f"{kind}: ce {judged.cross_entropy.item():.3f} tv {judged.total_variation.item():.3f} "
        f"confidence {judged.confidence.item():.3f} tokens {judged.tokens_per_cycle.item():.2f}"
        for kind, judged in judged_by_kind.items()
    ]
    print(f"step {trainer.step} of {trainer.recipe.steps}  {'  '.join(parts)}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train Spark-Mini's draft.")
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is written")
    parser.add_argument("--target", type=Path, default=ASSETS, help="folder of the target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after; resumable")
    parser.add_argument(
        "--fit-seconds", type=float, help="choose the steps so that all is done after so long"
    )
    parser.add_argument("--steps", type=int, default=DRAFT_RECIPE.steps)
    parser.add_argument("--own", type=int, default=DRAFT_RECIPE.own_conversations)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, or go on training, and write the checkpoint."""
    started = time.monotonic()
    arguments = parse_arguments()
    recipe = replace(DRAFT_RECIPE, steps=arguments.steps, own_conversations=arguments.own)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(arguments.device)
    target = Target(arguments.target, SPARK_MINI_DRAFT.target_layer_ids, device)
    trainer = Trainer(recipe, target, device)
    state = arguments.out / "training_state.pt"
    if state.exists():
        trainer.load_from(state)
    own = load_own(arguments.out / "own.npz", arguments.target, recipe, device)
    print(
        f"{sum(p.numel() for p in trainer.draft.parameters()):,} parameters, "
        f"{len(own)} replies of the target's own, {time.monotonic() - started:.0f} s",
        flush=True,
    )
    fit = arguments.fit_seconds
    train(
        trainer,
        target,
        own,
        started + arguments.seconds,
        None if fit is None else started + fit,
        state,
    )
    export_draft(trainer.draft, arguments.out / "checkpoint")
    print(f"{time.monotonic() - started:.0f} s in this piece, step {trainer.step}", flush=True)


if __name__ == "__main__":
    main()
