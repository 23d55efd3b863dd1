"""Measuring what steps take, and remembering it from one start to the next."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from musespark.speculative.budget import StepCosts, check_costs, smoothed

# Runs of each size: the first ones compile, record and warm up; of the others the fastest counts,
# since whatever else the machine does only ever adds.
_WARM_UPS, _RUNS = 2, 7

Step = Callable[[int, int, int], None]
"""Runs alike steps: (sequences, tokens of each, how many steps); waits until all are done."""


def measure_costs(
    step: Step,
    draft: Callable[[int], None],
    sizes: Iterable[int],
    num_guesses: int,
    *,
    plain_steps: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Time the parts of speculative decoding, for each number of sequences in `sizes`.

    Args:
        step: steps of the target; behind one of several tokens the draft takes them in.
        draft: guessing.
        sizes: numbers of sequences, ascending.
        num_guesses: tokens guessed for each sequence.
        plain_steps: without guesses, this many begin before one is waited for; more than 1 where a
            step begins before the one ahead has ended.
        clock: seconds.
    """

    def seconds(run: Callable[..., None], *arguments: int) -> float:
        started = clock()
        run(*arguments)
        return clock() - started

    sizes = list(sizes)
    fastest = []
    # The largest first: it makes the C library keep memory that smaller steps then need not ask the
    # system for, as prompts do later.
    for size in reversed(sizes):
        # In turn, so that all of them meet the machine in the same mood.
        times = [
            (
                seconds(step, size, 1, plain_steps) / plain_steps,
                seconds(step, size, 2, 1),
                seconds(step, size, 1 + num_guesses, 1),
                seconds(draft, size),
            )
            for _ in range(_WARM_UPS + _RUNS)
        ]
        fastest.append([min(each) for each in zip(*times[_WARM_UPS:], strict=True)])
    plain, one, every, drafting = (
        smoothed(list(zip(sizes, reversed(kind), strict=True)))
        for kind in zip(*fastest, strict=True)
    )
    return StepCosts(plain, one, every, drafting, num_guesses)


def cached_costs(
    folder: Path, key: Mapping[str, Any], measure: Callable[[], StepCosts]
) -> StepCosts:
    """The costs remembered in `folder` under `key`, all that they depend on; measured if there are
    none, or none that can be read."""
    name = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()
    path = folder / f"{name}.json"
    if (costs := _read(path)) is not None:
        return costs
    costs = measure()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fields = dataclasses.asdict(costs)
        # Whole or not at all, whoever else starts now.
        part = path.with_suffix(f".{time.time_ns()}")
        part.write_text(json.dumps({"key": dict(key), **fields}, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError:
        pass  # measured again next time
    return costs


def _read(path: Path) -> StepCosts | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        plain, one, every, draft = (
            tuple((int(size), float(seconds)) for size, seconds in fields[name])
            for name in ("plain", "verify_one", "verify_all", "draft")
        )
        costs = StepCosts(plain, one, every, draft, int(fields["num_guesses"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return costs if check_costs(costs) else None
