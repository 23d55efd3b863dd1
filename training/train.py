"""Train Spark-Mini. README.md beside this file says how; config.py holds every number.

python -m training.train --out build/spark-mini
python -m training.train --out build/spark-mini --seconds 500    # a piece; run it again
"""

import argparse
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.config import RECIPE, SPARK_MINI, Recipe
from training.data import Chunk, ChunkStream
from training.export import export
from training.model import Decoder, Masks
from training.optimisation import make_optimiser, take_step, write_state

LOG_EVERY = 200
SAVE_EVERY = 1_000


@dataclass(frozen=True)
class StepResult:
    """What one step measured: mean loss and accuracy of the trained tokens, load per expert."""

    loss: Tensor
    accuracy: Tensor
    load: Tensor  # [layers, E], tokens


class Trainer:
    """The model, its optimiser and the step they have reached."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        """Draw the initial weights from the recipe's seed."""
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.recipe = recipe
        self.device = device
        self.model = Decoder(SPARK_MINI, recipe).to(device)
        self.optimiser = make_optimiser(self.model, recipe, device)
        self.step = 0
        self.load = torch.zeros(
            SPARK_MINI.num_hidden_layers, SPARK_MINI.num_local_experts, device=device
        )

    def train_step(self, ids: Tensor, trained: Tensor, document: Tensor) -> StepResult:
        """Take one step on rows of tokens, all [rows, row_tokens]."""
        result = self._loss(ids, trained, document)
        take_step(self.model, self.optimiser, result.loss, self.recipe, self.step)
        self._balance(result.load, self.recipe.rate(self.step))
        self.step += 1
        return result

    def _loss(self, ids: Tensor, trained: Tensor, document: Tensor) -> StepResult:
        positions = torch.arange(ids.shape[1], device=ids.device)
        window = SPARK_MINI.sliding_window
        masks = Masks.within_documents(document, document, positions, positions, window)
        on_gpu = self.device.type == "cuda"
        masks = masks.additive(torch.bfloat16 if on_gpu else torch.float32)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            logits, choices = self.model(ids, masks, positions)
        # The logits at a token are for the next one.
        wanted = trained[:, 1:].float()
        targets = ids[:, 1:]
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="none")
        loss = (losses.view_as(wanted) * wanted).sum() / wanted.sum()
        hits = (logits[:, :-1].argmax(-1) == targets).float()
        real = (document > 0).unsqueeze(-1)
        load = torch.stack([(chosen * real).sum((0, 1)) for chosen in choices])
        return StepResult(loss, (hits * wanted).sum() / wanted.sum(), load)

    @torch.no_grad()
    def _balance(self, load: Tensor, share: float) -> None:
        """Raise the bias of experts with less than the mean load, lower that of the others."""
        below = torch.sign(load.mean(-1, keepdim=True) - load)
        rate = self.recipe.balance_rate * min(1.0, share)
        for router, direction in zip(self.model.routers(), below, strict=True):
            router.e_score_correction_bias.add_(direction, alpha=rate)
        self.load.lerp_(load / load.mean(-1, keepdim=True), 0.02 if self.step else 1.0)

    def save(self, path: Path) -> None:
        """Write everything needed to go on."""
        state = {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "load": self.load,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        write_state(path, state)

    def load_from(self, path: Path) -> None:
        """Go on from a file that `save` wrote under the same recipe."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise SystemExit(f"{path}: made by another recipe. Choose another --out folder.")
        self.step = state["step"]
        self.load = state["load"]
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])


def to_device(chunk: Chunk, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's arrays as tensors."""
    return (
        torch.from_numpy(chunk.ids.astype("int64")).to(device),
        torch.from_numpy(chunk.trained).to(device),
        torch.from_numpy(chunk.document).to(device),
    )


def train(trainer: Trainer, processes: int, deadline: float, state: Path) -> None:
    """Train until the recipe ends, or the deadline, and write the state now and then."""
    recipe = trainer.recipe
    chunks = ChunkStream(recipe, trainer.step // recipe.steps_per_chunk, processes)
    last_time, last_step = time.monotonic(), trainer.step
    next_save = trainer.step + SAVE_EVERY
    try:
        for chunk in chunks:
            batches = [part.split(recipe.rows) for part in to_device(chunk, trainer.device)]
            for ids, trained, document in zip(*batches, strict=True):
                if trainer.step == recipe.steps:
                    break
                result = trainer.train_step(ids, trained, document)
                if trainer.step % LOG_EVERY == 0 or trainer.step == 1:
                    now = time.monotonic()
                    each = (now - last_time) / (trainer.step - last_step)
                    last_time, last_step = now, trainer.step
                    report(trainer, result, each)
            if time.monotonic() > deadline:
                break
            if trainer.step >= next_save:
                trainer.save(state)
                next_save = trainer.step + SAVE_EVERY
    finally:
        chunks.close()
    trainer.save(state)


def report(trainer: Trainer, result: StepResult, seconds: float) -> None:
    """Print one line about a step."""
    load = trainer.load
    print(
        f"step {trainer.step}  loss {result.loss.item():.4f}  "
        f"token accuracy {result.accuracy.item():.4f}  {seconds * 1e3:.1f} ms/step  "
        f"expert load {load.min().item():.2f} to {load.max().item():.2f} of the mean",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train Spark-Mini.")
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is written")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after; resumable")
    parser.add_argument("--processes", type=int, default=6, help="that make data")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--rows", type=int, default=RECIPE.rows)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train, or go on training, and write the checkpoint."""
    started = time.monotonic()
    arguments = parse_arguments()
    recipe = replace(RECIPE, steps=arguments.steps, rows=arguments.rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, torch.device(arguments.device))
    state = arguments.out / "training_state.pt"
    if state.exists():
        trainer.load_from(state)
    print(
        f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters, step {trainer.step} "
        f"of {recipe.steps}",
        flush=True,
    )
    if not arguments.no_compile:
        for layer in trainer.model.layers:
            layer.compile()
    train(trainer, arguments.processes, started + arguments.seconds, state)
    export(trainer.model, arguments.out / "checkpoint")
    print(f"{time.monotonic() - started:.0f} s in this piece, step {trainer.step}", flush=True)
    if trainer.step < recipe.steps:
        print("Not finished: run the same command again to go on.")


if __name__ == "__main__":
    main()
