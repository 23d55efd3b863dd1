"""CPU speed beside transformers: the same checkpoint, the same machine, alternating runs.

    python -m benchmarks.cpu_vs_transformers [--spark-mini] [--rounds 5] [--output FILE]

Both sides go through the public way to generate: `LLM.stream` here, `model.generate` there, with
the fastest `experts_implementation` that transformers has for each case. A decode figure is batch
size over the median time between two tokens of the batch; a prefill figure is prompt length over
the time to the first token. Figures are medians over rounds, and ratios are taken within a round.
"""

import argparse
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MuseSparkForConditionalGeneration, StoppingCriteria

from musespark import LLM
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.model import DecoderConfig
from musespark.llm.timing import time_generation
from musespark.testing import config_json, make_checkpoint

CONTEXT = 512
SMALLEST_VOCABULARY = 256
NEW_TOKENS = 33
DECODE_BATCHES = (1, 8, 32)
PREFILL_LENGTHS = (512, 2048)
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")

MODEL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "sliding_window": 256,
    "max_position_embeddings": 4096,
}


def prompts(batch: int, length: int, seed: int) -> list[list[int]]:
    """Random prompts; both sides get the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SMALLEST_VOCABULARY, (batch, length), generator=generator).tolist()


def decode_rate(steps: Sequence[float], batch: int) -> float:
    """Decoded tokens per second."""
    return batch / statistics.median(steps) if steps else float("nan")


def packaged_checkpoint(folder: Path) -> Path:
    """Spark-Mini with a config.json that transformers has a class with an lm_head for."""
    source = resolve_checkpoint("spark-mini")
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    config = config_json(DecoderConfig.from_folder(source), torch.bfloat16, text_only=False)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Ours:
    """This project."""

    def __init__(self, folder: Path) -> None:
        self._llm = LLM(
            folder,
            dtype="bfloat16",
            device="cpu",
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
        )

    def run(self, batch: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """(seconds to the first tokens, decoded tokens per second), greedy."""
        times = time_generation(self._llm, batch, new_tokens)
        # Until every prompt has its first token, as transformers has it.
        return max(times.first_tokens), decode_rate(times.steps, len(batch))


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Stamps every step of transformers' generate."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        self.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Theirs:
    """transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = MuseSparkForConditionalGeneration.from_pretrained(
            folder, dtype=torch.bfloat16
        ).eval()

    def choose(self, implementation: str) -> None:
        """Switch how experts are computed."""
        self._model.set_experts_implementation(implementation)

    def run(self, batch: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """(seconds to the first tokens, decoded tokens per second), greedy."""
        clock, ids = Clock(), torch.tensor(batch)
        started = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        steps = [after - before for before, after in itertools.pairwise(clock.stamps)]
        return clock.stamps[0] - started, decode_rate(steps, len(batch))


def best_implementation(theirs: Theirs, batch: list[list[int]], new_tokens: int) -> str:
    """The fastest way for transformers to compute experts in this case."""
    seconds = {}
    for implementation in EXPERTS_IMPLEMENTATIONS:
        if implementation == "batched_mm" and len(batch) * len(batch[0]) > 1024:
            continue  # it copies the weights of every token's experts: tens of GB here
        theirs.choose(implementation)
        theirs.run(batch, 2)
        first, rate = theirs.run(batch, new_tokens)
        seconds[implementation] = first if new_tokens == 1 else 1 / rate
    return min(seconds, key=seconds.__getitem__)


def measure(ours: Ours, theirs: Theirs, rounds: int) -> list[dict[str, Any]]:
    """Every case, both sides in turn."""
    cases = [("decode", size, CONTEXT, NEW_TOKENS) for size in DECODE_BATCHES]
    cases += [("prefill", 1, length, 1) for length in PREFILL_LENGTHS]
    rows = []
    for kind, batch_size, length, new_tokens in cases:
        implementation = best_implementation(theirs, prompts(batch_size, length, 0), new_tokens)
        theirs.choose(implementation)
        figures: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(-1, rounds):  # the first round warms both up
            batch = prompts(batch_size, length, 1 + turn)
            for name, side in (("ours", ours), ("theirs", theirs)):
                first, rate = side.run(batch, new_tokens)
                if turn >= 0:
                    figures[name].append(rate if kind == "decode" else length / first)
        ratios = [a / b for a, b in zip(figures["ours"], figures["theirs"], strict=True)]
        rows.append(
            {
                "case": f"{kind} {'batch ' if kind == 'decode' else ''}"
                f"{batch_size if kind == 'decode' else length}",
                "ours": statistics.median(figures["ours"]),
                "transformers": statistics.median(figures["theirs"]),
                "experts_implementation": implementation,
                "ratio": statistics.median(ratios),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Run everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spark-mini", action="store_true", help="measure the packaged model")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        packaged = arguments.spark_mini
        checkpoint = packaged_checkpoint(place) if packaged else make_checkpoint(place, **MODEL)
        rows = measure(Ours(checkpoint), Theirs(checkpoint), arguments.rounds)
    report = {
        "model": "spark-mini" if arguments.spark_mini else MODEL,
        "context": CONTEXT,
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
