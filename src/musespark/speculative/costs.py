"""Measuring what steps take, and remembering it from one start to the next."""

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
        started = clock()
        run(size)
        return clock() - started

    points: list[tuple[int, float, float, float]] = []
    for size in sizes:
        # In turn, so that all three meet the machine in the same mood.
        times = [
            (seconds(plain, size), seconds(verify, size), seconds(draft, size))
            for _ in range(_WARM_UPS + _RUNS)
        ]
        fastest = [min(each) for each in zip(*times[_WARM_UPS:], strict=True)]
        points.append((size, fastest[0], max(fastest[:2]), fastest[2]))
    return StepCosts(
        plain=smoothed([(size, seconds) for size, seconds, _, _ in points]),
        verify=smoothed([(size * rows, seconds) for size, _, seconds, _ in points]),
        draft=smoothed([(size, seconds) for size, _, _, seconds in points]),
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
