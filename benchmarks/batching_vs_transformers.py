"""Many requests at once, beside transformers' continuous batching: same checkpoint, same machine.

    python -m benchmarks.batching_vs_transformers [--spark-mini] [--rounds 2] [--output FILE]

32 requests with prompts of mixed lengths arrive together and generate greedily to a fixed length:
`LLM.generate` here, `model.generate_batch` there, in turn. The figure is output tokens over the
time until the last one. Both run in float32: in bfloat16 transformers' continuous batching gives
wrong tokens for this model. The tokens of both are compared.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.cpu_vs_transformers import MODEL, packaged_checkpoint, prompts
from transformers import GenerationConfig, MuseSparkForConditionalGeneration

from musespark import LLM, SamplingParams
from musespark.testing import make_checkpoint

NUM_REQUESTS = 32
PROMPT_LENGTHS = (16, 64, 256)
NEW_TOKENS = 48


def requests(seed: int) -> list[list[int]]:
    """Prompts of mixed lengths."""
    chooser = random.Random(seed)
    return [
        prompts(1, chooser.choice(PROMPT_LENGTHS), seed * NUM_REQUESTS + number)[0]
        for number in range(NUM_REQUESTS)
    ]


class Ours:
    """This project."""

    def __init__(self, folder: Path) -> None:
        self._llm = LLM(folder, dtype="float32", device="cpu", enable_prefix_caching=False)

    def run(self, batch: list[list[int]]) -> list[list[int]]:
        """The output tokens of every request."""
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        return [completion.token_ids for completion in self._llm.generate(batch, params)]


class Theirs:
    """transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = MuseSparkForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._model.set_experts_implementation("grouped_mm")

    def run(self, batch: list[list[int]]) -> list[list[int]]:
        """The output tokens of every request."""
        config = GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        done = self._model.generate_batch(
            inputs=batch, generation_config=config, progress_bar=False
        )
        in_order = sorted(done.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        return [output.generated_tokens for _, output in in_order]


def measure(ours: Ours, theirs: Theirs, rounds: int) -> dict[str, Any]:
    """Output tokens per second of both, and how many requests got the same tokens."""
    rates: dict[str, list[float]] = {"ours": [], "transformers": []}
    equal = total = 0
    for turn in range(rounds):
        batch, outputs = requests(turn), []
        for name, side in (("ours", ours), ("transformers", theirs)):
            if turn == 0:
                side.run(batch[:2])  # warms up
            started = time.perf_counter()
            outputs.append(side.run(batch))
            seconds = time.perf_counter() - started
            rates[name].append(sum(map(len, outputs[-1])) / seconds)
        equal += sum(a == b for a, b in zip(*outputs, strict=True))
        total += len(batch)
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    return {
        "ours": statistics.median(rates["ours"]),
        "transformers": statistics.median(rates["transformers"]),
        "ratio": statistics.median(ratios),
        "requests": total,
        "requests_with_equal_tokens": equal,
    }


def main() -> None:
    """Run one model and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--spark-mini", action="store_true", help="measure the packaged model")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        packaged = arguments.spark_mini
        checkpoint = packaged_checkpoint(place) if packaged else make_checkpoint(place, **MODEL)
        report = {
            "model": "spark-mini" if packaged else MODEL,
            "requests": NUM_REQUESTS,
            "prompt_tokens": PROMPT_LENGTHS,
            "output_tokens": NEW_TOKENS,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "result": measure(Ours(checkpoint), Theirs(checkpoint), arguments.rounds),
        }
    print(json.dumps(report["result"]))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
