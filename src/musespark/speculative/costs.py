"""Measuring what steps take, and remembering it from one start to the next."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

from musespark.speculative.budget import StepCosts, check_costs, smoothed

# Runs of each size: the first ones compile, record and warm up.
_WARM_UPS, _RUNS = 2, 5

Run = Callable[[int], None]
"""Runs something for so many sequences, and waits until it is done."""


def measure_costs(
    plain: Run,
    verify: Run,
    draft: Run,
    sizes: Iterable[int],
    rows: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Time the three parts of speculative decoding, for each number of sequences in `sizes`.

    Args:
        plain: a step with one token of each sequence.
        verify: a step with `rows` tokens of each.
        draft: guessing.
        sizes: numbers of sequences, ascending.
        rows: tokens of each sequence in `verify`.
        clock: seconds.
    """

    def seconds(run: Run, size: int) -> float:
        times = []
        for _ in range(_WARM_UPS + _RUNS):
            started = clock()
            run(size)
            times.append(clock() - started)
        return median(times[_WARM_UPS:])

    sizes = list(sizes)
    return StepCosts(
        plain=smoothed([(size, seconds(plain, size)) for size in sizes]),
        verify=smoothed([(size * rows, seconds(verify, size)) for size in sizes]),
        draft=smoothed([(size, seconds(draft, size)) for size in sizes]),
    )


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
        fields = {"plain": costs.plain, "verify": costs.verify, "draft": costs.draft}
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
        costs = StepCosts(
            *(
                tuple((int(size), float(seconds)) for size, seconds in fields[name])
                for name in ("plain", "verify", "draft")
            )
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return costs if check_costs(costs) else None
