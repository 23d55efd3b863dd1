"""Several engines behind one front: who gets a request, and what all of them together say."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from musespark.engine.client import EngineInfo, EngineRequest, EngineStats
from musespark.engine.messages import Abort, FromEngine, Outputs, Ready, Refused, Submit, ToEngine


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    replica: int
    num_outputs: int
    num_tokens: int


class Replicas:
    """Spreads requests over replicas, and joins what these tell into one engine's words."""

    def __init__(self, count: int) -> None:
        self._open: dict[str, _Open] = {}
        self._load = [(0, 0)] * count
        self._infos: dict[int, EngineInfo] = {}
        self._stats = [EngineStats()] * count

    def route(self, message: ToEngine) -> list[int]:
        """The replicas that a message is for; a request goes to the one with the least to do."""
        if isinstance(message, Submit):
            return [self._choose(message.request)]
        if isinstance(message, Abort):
            found = self._open.get(message.request_id)
            return [] if found is None else [found.replica]
        return list(range(len(self._load)))

    def join(self, replica: int, message: FromEngine) -> FromEngine | None:
        """What a replica's message means for the whole; None: nothing yet."""
        if isinstance(message, Ready):
            self._infos[replica] = message.info
            if len(self._infos) < len(self._load):
                return None
            return Ready(join_infos([self._infos[index] for index in range(len(self._load))]))
        if isinstance(message, Refused):
            self._end_outputs(message.request_id)
        elif isinstance(message, Outputs):
            self._stats[replica] = message.stats.following(self._stats[replica])
            for output in message.outputs:
                if output.finish_reason is not None:
                    self._end_outputs(output.request_id, 1)
            return Outputs(message.outputs, join_stats(self._stats))
        return message

    def _choose(self, request: EngineRequest) -> int:
        """Fewest outputs that run or wait, then fewest tokens of prompts behind them."""
        replica = min(range(len(self._load)), key=self._load.__getitem__)
        entry = _Open(replica, request.params.n, len(request.prompt_token_ids))
        self._open[request.request_id] = entry
        self._add(replica, entry.num_outputs, entry.num_tokens)
        return replica

    def _end_outputs(self, request_id: str, count: int | None = None) -> None:
        """Some outputs of a request have ended; None: all of them."""
        if (entry := self._open.get(request_id)) is None:
            return
        count = entry.num_outputs if count is None else count
        entry.num_outputs -= count
        is_last = entry.num_outputs == 0
        self._add(entry.replica, -count, -entry.num_tokens if is_last else 0)
        if is_last:
            del self._open[request_id]

    def _add(self, replica: int, num_outputs: int, num_tokens: int) -> None:
        outputs, tokens = self._load[replica]
        self._load[replica] = outputs + num_outputs, tokens + num_tokens


def join_infos(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What replicas serve together: alike, but for how many requests and blocks there are."""
    count = len(infos)
    first = infos[0]
    return dataclasses.replace(
        first,
        max_num_seqs=first.max_num_seqs * count,
        num_full_blocks=first.num_full_blocks * count,
        num_sliding_blocks=first.num_sliding_blocks * count,
    )


def join_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Sums; shares and times are the mean over replicas, which work side by side."""
    joined: EngineStats = _join("", stats)
    return joined


def _join(name: str, values: Sequence[Any]) -> Any:
    """Values of one field `name`, in all shapes that statistics have, as one."""
    values = [value for value in values if value is not None]
    if len(values) < 2:
        return values[0] if values else None
    first = values[0]
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first,  # type: ignore[type-var]
            **{each: _join(each, [getattr(value, each) for value in values]) for each in names},
        )
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _join(name, [value.get(key) for value in values]) for key in keys}
    if isinstance(first, list):
        return [_join(name, column) for column in zip_longest(*values)]
    is_mean = name == "kv_cache_usage" or name.endswith("_seconds")
    return sum(values) / len(values) if is_mean else sum(values)
