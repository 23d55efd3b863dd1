"""Evaluate a trained model on the GPU it was trained on, with the product's own questions."""

import json
import shutil
from pathlib import Path

from musespark.chat import ChatFormat, Tokenizer
from musespark.evals.run import PHRASING_TASKS, TASKS, EvalReport, evaluate
from training.generation import Generator
from training.model import Decoder
from training.tokenizer import main as write_tokenizer

ASSETS = Path(__file__).parent.parent / "src/musespark/assets/spark-mini"
SEED = 1
MISSES_SHOWN = 4
WINDOWED_TASKS = ("lookup", "far_lookup")
"""Asked once more with the full-attention layers windowed, which must make them fail."""


def evaluate_all(model: Decoder, checkpoint: Path, samples: int, results: Path) -> None:
    """Complete the checkpoint with its tokenizer and write accuracies as they come.

    `results` maps "held_out" and "full_layers_windowed" to {task: accuracy}.
    """
    for layer in model.layers:
        layer._compiled_call_impl = None  # generation's shapes are many; it runs uncompiled
    model.eval()
    for name in ("chat_template.jinja", "generation_config.json"):
        shutil.copy(ASSETS / name, checkpoint)
    write_tokenizer(checkpoint)
    tokenizer = Tokenizer.from_folder(checkpoint)
    chat = ChatFormat.from_folder(checkpoint, tokenizer)
    pad_id = tokenizer.special_id("<|pad|>")
    accuracies: dict[str, dict[str, float]] = {}
    for name, tasks, asked in (
        ("held_out", (*TASKS, *PHRASING_TASKS), samples),
        ("full_layers_windowed", WINDOWED_TASKS, samples // 4),
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
