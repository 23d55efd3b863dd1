"""Evaluate a trained model with the product's own questions, all of a task at a time.

python -m training.evaluation build/spark-mini
"""

import argparse
import json
from pathlib import Path

import torch

from musespark.chat import ChatFormat, Tokenizer
from musespark.evals.run import PHRASING_TASKS, TASKS, EvalReport, evaluate
from training.config import RECIPE, SPARK_MINI
from training.export import load_exported
from training.generation import Generator
from training.model import Decoder

SEED = 1
MISSES_SHOWN = 4
WINDOWED_TASKS = ("lookup", "far_lookup")
"""Asked once more with the full-attention layers windowed, which must make them fail."""


def evaluate_all(model: Decoder, checkpoint: Path, samples: int, results: Path) -> None:
    """Write the accuracies to a file as they come.

    It maps "held_out" and "full_layers_windowed" to {task: accuracy}.
    """
    tokenizer = Tokenizer.from_folder(checkpoint)
    chat = ChatFormat.from_folder(checkpoint, tokenizer)
    pad_id = tokenizer.special_id("<|pad|>")
    accuracies: dict[str, dict[str, float]] = {}
    for name, tasks, asked in (
        ("full_layers_windowed", WINDOWED_TASKS, samples // 4),
        ("held_out", (*TASKS, *PHRASING_TASKS), samples),
    ):
        generate = Generator(model, pad_id, windowed=name == "full_layers_windowed")
        accuracies[name] = {}
        for task in tasks:
            report = evaluate(
                generate, chat, tasks=[task], samples=asked, seed=SEED, batch_size=asked
            )
            accuracies[name][task] = report.tasks[task].accuracy
            print_report(name, report)
            data = {"samples": samples, "seed": SEED, "accuracy": accuracies}
            results.write_text(json.dumps(data, indent=2) + "\n")


def print_report(name: str, report: EvalReport) -> None:
    """Print one task's accuracy and some of its misses."""
    for task, accuracy, samples in report.rows():
        print(f"{name}  {task}  {accuracy} of {samples}", flush=True)
    for miss in report.misses[:MISSES_SHOWN]:
        print(f"    {miss.phrasing}: {miss.question!r}")
        print(f"        expected {miss.expected!r}, got {miss.reply[:300]!r}")


def main() -> None:
    """Read the command line, load the checkpoint and evaluate it."""
    parser = argparse.ArgumentParser(description="Evaluate Spark-Mini.")
    parser.add_argument("trained", type=Path, help="the folder that training wrote into")
    parser.add_argument("--samples", type=int, default=200, help="questions a task")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    checkpoint = arguments.trained / "checkpoint"
    model = Decoder(SPARK_MINI, RECIPE)
    load_exported(model, checkpoint)
    model.to(arguments.device).eval()
    evaluate_all(model, checkpoint, arguments.samples, arguments.trained / "accuracy.json")


if __name__ == "__main__":
    main()
