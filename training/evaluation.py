"""Evaluate a trained model on the GPU it was trained on, with the product's own questions."""

import shutil
from pathlib import Path

from musespark.chat import ChatFormat, Tokenizer
from musespark.evals.run import PHRASING_TASKS, TASKS, EvalReport, evaluate
from training.generation import Generator
from training.model import Decoder
from training.tokenizer import main as write_tokenizer

ASSETS = Path(__file__).parent.parent / "src/musespark/assets/spark-mini"
SEED = 1
BATCH = 1000
MISSES_SHOWN = 4


def evaluate_all(model: Decoder, checkpoint: Path, samples: int) -> dict[str, object]:
    """Ask all tasks in familiar and in new phrasings, and far look-ups through the window."""
    for layer in model.layers:
        layer._compiled_call_impl = None  # generation's shapes are many; it runs uncompiled
    model.eval()
    shutil.copy(ASSETS / "chat_template.jinja", checkpoint)
    shutil.copy(ASSETS / "generation_config.json", checkpoint)
    write_tokenizer(checkpoint)
    tokenizer = Tokenizer.from_folder(checkpoint)
    chat = ChatFormat.from_folder(checkpoint, tokenizer)
    pad = tokenizer.special_id("<|pad|>")

    def ask(tasks: tuple[str, ...], samples: int, *, windowed: bool = False) -> EvalReport:
        generator = Generator(model, pad, windowed=windowed)
        return evaluate(generator, chat, tasks=tasks, samples=samples, seed=SEED, batch_size=BATCH)

    reports = {
        "held_out": ask((*TASKS, *PHRASING_TASKS), samples),
        "full_layers_windowed": ask(("lookup", "far_lookup"), samples // 2, windowed=True),
    }
    for name, report in reports.items():
        print_report(name, report)
    return {name: report.to_json("spark-mini") for name, report in reports.items()}


def print_report(name: str, report: EvalReport) -> None:
    """Print accuracies and some of the misses."""
    for task, accuracy, samples in report.rows():
        print(f"{name}  {task}  {accuracy} of {samples}")
        for miss in [m for m in report.misses if m.task == task][:MISSES_SHOWN]:
            print(f"    {miss.phrasing}: {miss.question!r}")
            print(f"        expected {miss.expected!r}, got {miss.reply!r}")
