"""How long generating takes: what `musespark bench` and the scripts in benchmarks/ measure with."""

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from musespark.config.sampling import SamplingParams
from musespark.llm.llm import LLM


@dataclass(frozen=True, slots=True)
class GenerationTimes:
    """One batch, timed; seconds."""

    first_tokens: tuple[float, ...]
    """From the start until each prompt's first token."""
    steps: tuple[float, ...]
    """Between two moments at which every prompt has got a token, or several in one step."""
    rest_seconds: float
    """From the last of the first tokens to the end."""


def time_generation(
    llm: LLM, prompts: Sequence[Sequence[int]], num_new_tokens: int
) -> GenerationTimes:
    """Generate `num_new_tokens` for each prompt together, greedy and without end tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
    firsts: dict[int, float] = {}
    stamps: list[float] = []
    in_step: set[int] = set()
    last_step: dict[int, int] = {}
    gc.collect()
    started = now = time.perf_counter()
    with llm.stream([list(prompt) for prompt in prompts], params) as generation:
        for delta in generation:
            now = time.perf_counter()
            firsts.setdefault(delta.index, now - started)
            number = llm.stats().steps
            if last_step.get(delta.index) == number:
                continue  # a guess that was right came along with the token before
            last_step[delta.index] = number
            if delta.index in in_step:
                in_step.clear()
            in_step.add(delta.index)
            if len(in_step) == len(prompts):
                stamps.append(now)
    steps = tuple(later - earlier for earlier, later in itertools.pairwise(stamps))
    rest = now - started - max(firsts.values())
    return GenerationTimes(tuple(firsts.values()), steps, rest)
