"""Put a trained draft into the package, and its tokens per cycle into its model card.

python -m training.draft_install build/spark-mini-draft
"""

import json
import shutil
import sys
from pathlib import Path

from training.export import ASSETS

DRAFT_ASSETS = ASSETS.parent / "spark-mini-draft"
FILES = ("config.json", "model.safetensors")
CARD = Path(__file__).parent / "draft_card.md"


def cycle_table(tokens_per_cycle: dict[str, float]) -> str:
    """Return the model card's table: a row per task, and their mean."""
    mean = sum(tokens_per_cycle.values()) / len(tokens_per_cycle)
    lines = ["| task | tokens a cycle |", "|---|--:|"]
    lines += [f"| {task} | {mean:.2f} |" for task, mean in tokens_per_cycle.items()]
    return "\n".join([*lines, f"| **mean** | **{mean:.2f}** |"])


def main(trained: Path) -> None:
    """Copy the checkpoint's files and write README.md beside them."""
    DRAFT_ASSETS.mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(trained / "checkpoint" / name, DRAFT_ASSETS / name)
    results = json.loads((trained / "tokens_per_cycle.json").read_text())
    card = CARD.read_text()
    card = card.replace("{{cycles}}", cycle_table(results["tokens_per_cycle"]))
    card = card.replace("{{samples}}", str(results["samples"]))
    card = card.replace("{{num_tokens}}", str(results["num_tokens"]))
    (DRAFT_ASSETS / "README.md").write_text(card)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
