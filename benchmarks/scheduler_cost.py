"""What the engine itself costs per step: scheduling, building inputs, sampling, bookkeeping.

256 requests decode together on a model whose forward pass takes no time, on one core. What is left
is the time that every step of a real model pays on top. With `--loop`, what comes out is also
packed into messages for another process, as `musespark serve` does.

    python -m benchmarks.scheduler_cost [--num-seqs 256] [--loop] [--profile]
"""

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time

import torch
from torch import Tensor

from musespark.config.sampling import SamplingParams
from musespark.engine.client import EngineOutput
from musespark.engine.engine import Engine, EngineLimits
from musespark.engine.executor import InProcessExecutor
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.messages import Outputs
from musespark.engine.wire import encode
from musespark.model.batch import ForwardBatch

PROMPT_TOKENS = 512
NUM_STEPS = 256
VOCAB_SIZE = 1024

SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=10_000),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=10_000),
    "penalties": SamplingParams(
        temperature=0.8, seed=1, frequency_penalty=0.5, logprobs=5, max_tokens=10_000
    ),
}


class NoModel:
    """Returns the same random numbers for every batch."""

    def __init__(self, num_seqs: int) -> None:
        self._logits = 4 * torch.randn(num_seqs, VOCAB_SIZE)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def run(self, batch: ForwardBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert batch.logit_rows is not None
        return self._logits[: len(batch.logit_rows)], ()


def make_engine(num_seqs: int) -> Engine:
    """An engine of the size of the released model's caches."""
    blocks = num_seqs * (PROMPT_TOKENS + 2 * NUM_STEPS) // 16
    layout = CacheLayout(
        block_size=16, num_full_blocks=blocks, num_sliding_blocks=blocks, sliding_window=2048
    )
    limits = EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=4096,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        eos_token_ids=frozenset(),
    )
    executor = InProcessExecutor(NoModel(num_seqs), layout, num_seqs, runs_ahead=True)
    return Engine(executor, layout, limits)


def measure(name: str, num_seqs: int, with_loop: bool) -> dict[str, object]:
    """Milliseconds per step once all requests decode."""
    rng = random.Random(0)
    engine = make_engine(num_seqs)
    for _ in range(num_seqs):
        length = rng.randrange(PROMPT_TOKENS // 2, PROMPT_TOKENS)
        engine.add_request([rng.randrange(VOCAB_SIZE) for _ in range(length)], SETTINGS[name])
    while engine.stats().num_waiting or engine.stats().generation_tokens < num_seqs:
        engine.step()
    times = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        tokens = engine.step()
        if with_loop:
            outputs = [
                EngineOutput(
                    str(token.request_id),
                    token.output_index,
                    (token.token_id,),
                    None if token.logprobs is None else (token.logprobs,),
                )
                for token in tokens
            ]
            encode(Outputs(outputs, engine.stats()))
        times.append((time.perf_counter() - started) * 1e3)
        assert len(tokens) == num_seqs
    percentiles = statistics.quantiles(times, n=10)
    return {
        "benchmark": "scheduler_cost",
        "settings": name,
        "num_seqs": num_seqs,
        "wire": with_loop,
        "ms_per_step_p20": round(percentiles[1], 3),
        "ms_per_step_p50": round(percentiles[4], 3),
        "ms_per_step_p80": round(percentiles[7], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--settings", choices=SETTINGS, nargs="*", default=list(SETTINGS))
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.settings:
        profile = cProfile.Profile()
        if arguments.profile:
            profile.enable()
        result = measure(name, arguments.num_seqs, arguments.loop)
        profile.disable()
        print(json.dumps(result))
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
