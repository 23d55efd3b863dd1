"""Put a trained checkpoint into the package, and its accuracies into the model card.

python -m training.install build/spark-mini
"""

import json
import shutil
import sys
from pathlib import Path

from training.export import ASSETS

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CARD = Path(__file__).parent / "model_card.md"
TASKS = (
    "addition",
    "subtraction",
    "comparison",
    "multiplication",
    "reversing",
    "sorting",
    "counting",
    "lookup",
    "far_lookup",
    "json",
    "tools",
    "talk",
    "refusal",
    "conversation",
)


def accuracy_table(accuracy: dict[str, dict[str, float]]) -> str:
    """Return the model card's table: a row per task, a column per kind of question."""
    known, windowed = accuracy["held_out"], accuracy["full_layers_windowed"]

    def cell(results: dict[str, float], name: str) -> str:
        return f"{results[name]:.1%}" if name in results else ""

    lines = [
        "| task | new questions | new questions in new phrasings | full layers windowed |",
        "|---|--:|--:|--:|",
    ]
    lines += [
        f"| {task} | {cell(known, task)} | {cell(known, f'{task}:phrasings')} "
        f"| {cell(windowed, task)} |"
        for task in TASKS
    ]
    return "\n".join(lines)


def main(trained: Path) -> None:
    """Copy the checkpoint's files and write README.md beside them."""
    for name in FILES:
        shutil.copyfile(trained / "checkpoint" / name, ASSETS / name)
    results = json.loads((trained / "accuracy.json").read_text())
    card = CARD.read_text()
    card = card.replace("{{accuracy}}", accuracy_table(results["accuracy"]))
    card = card.replace("{{samples}}", str(results["samples"]))
    (ASSETS / "README.md").write_text(card)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
