"""A fleet on paper: the engine's own scheduler, with the time model in place of the model.

Each replica schedules, "runs" a step for as long as the roofline says, and commits it. Requests go
to the replica with the fewest of them. There is no prefix cache: every prompt is new.
"""

import dataclasses
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from musespark.config.engine import EngineConfig
from musespark.config.model import DecoderConfig
from musespark.config.sampling import SamplingParams
from musespark.engine.capacity import plan_kv_cache
from musespark.engine.kv_blocks import CacheLayout
from musespark.engine.request import Request, RequestStatus
from musespark.engine.scheduler import ScheduledRequest, Scheduler
from musespark.errors import CapacityError, ConfigError
from musespark.planner.devices import Device
from musespark.planner.layout import Layout
from musespark.planner.memory import Workload, plan_memory
from musespark.planner.roofline import step_time

# Times of steps that differ by less than this share are taken for the same, and computed once.
_GRAIN = 0.05


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    time: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request; times in seconds."""

    arrival: float
    first_token: float
    """Since its arrival."""
    per_token: float | None
    """After the first; None for a single token."""
    end: float


@dataclass(frozen=True, slots=True)
class FleetReport:
    """How a fleet did."""

    served: tuple[Served, ...]
    prompt_tokens: int
    output_tokens: int
    seconds: float
    """From the first arrival to the last token."""
    arrival_seconds: float
    num_steps: int
    num_preemptions: int
    most_running: int
    """In one replica."""
    samples: tuple[tuple[float, int, int], ...]
    """(time, running, waiting) over all replicas, at each arrival."""

    @property
    def keeps_up(self) -> bool:
        """Whether the queue drains about as fast as it fills."""
        slack = max(served.end - served.arrival for served in self.served)
        half = len(self.samples) // 2
        early, late = (
            statistics.fmean(waiting for _, _, waiting in part)
            for part in (self.samples[:half] or self.samples, self.samples[half:])
        )
        return late <= 2 * early + 4 and self.seconds <= self.arrival_seconds + 2 * slack

    def percentile(self, name: str, share: float) -> float:
        """Of `first_token` or `per_token`, the value that `share` of the requests stay below."""
        values = sorted(
            value for served in self.served if (value := getattr(served, name)) is not None
        )
        return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON objects; single requests left out."""
        latencies = {
            f"{name}_p{int(share * 100)}": self.percentile(name, share)
            for name in ("first_token", "per_token")
            for share in (0.5, 0.99)
        }
        return {
            "requests": len(self.served),
            "seconds": self.seconds,
            "prompt_tokens_per_second": self.prompt_tokens / self.seconds,
            "output_tokens_per_second": self.output_tokens / self.seconds,
            **latencies,
            "keeps_up": self.keeps_up,
            "steps": self.num_steps,
            "preemptions": self.num_preemptions,
            "most_running": self.most_running,
        }


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """(prompt, output) tokens, one pair of numbers a line; `#` begins a comment.

    Raises:
        ConfigError: names the line that is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"lengths: {path} cannot be read: {error}.") from None
    pairs = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise ConfigError(
                f"lengths: {path}, line {number}: must be two numbers above 0, the tokens of a "
                f"prompt and of its output; found {line!r}."
            )
        pairs.append((int(words[0]), int(words[1])))
    if not pairs:
        raise ConfigError(f"lengths: {path} holds no pair of numbers.")
    return pairs


def make_arrivals(
    lengths: Sequence[tuple[int, int]], rate: float, count: int, seed: int = 0
) -> list[Arrival]:
    """`count` requests at random times, `rate` a second on average, of lengths drawn at random."""
    if not rate > 0 or count < 1:
        raise ConfigError(f"arrival_rate and requests: must be above 0, found {rate} and {count}.")
    generator = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        arrivals.append(Arrival(now, *generator.choice(lengths)))
    return arrivals


def simulate(
    config: DecoderConfig,
    layout: Layout,
    device: Device,
    workload: Workload,
    arrivals: Sequence[Arrival],
    replicas: int = 1,
) -> FleetReport:
    """Serve `arrivals` with `replicas` copies of one layout; `concurrency` is each one's limit.

    Raises:
        CapacityError: a request is longer than `context`, or the layout has no room for one.
    """
    longest = max(arrival.prompt + arrival.output for arrival in arrivals)
    if longest > workload.context:
        raise CapacityError(
            f"lengths: a request of {longest} tokens exceeds the context of {workload.context}. "
            "Raise --context or leave it out."
        )
    cache = _cache_layout(config, layout, device, workload)
    times = _StepTimes(config, layout, device, workload)
    fleet = [_Replica(cache, workload, times) for _ in range(replicas)]
    samples = []
    for number, arrival in enumerate(arrivals):
        for replica in fleet:
            replica.run_until(arrival.time)
        min(fleet, key=lambda replica: replica.load).take(number, arrival)
        running = sum(len(replica.scheduler.running) for replica in fleet)
        samples.append((arrival.time, running, sum(replica.load for replica in fleet) - running))
    for replica in fleet:
        replica.run_until(float("inf"))
    served = [each for replica in fleet for each in replica.served]
    first = arrivals[0].time
    return FleetReport(
        served=tuple(sorted(served, key=lambda each: each.arrival)),
        prompt_tokens=sum(arrival.prompt for arrival in arrivals),
        output_tokens=sum(arrival.output for arrival in arrivals),
        seconds=max(each.end for each in served) - first,
        arrival_seconds=arrivals[-1].time - first,
        num_steps=sum(replica.num_steps for replica in fleet),
        num_preemptions=sum(replica.scheduler.num_preemptions for replica in fleet),
        most_running=max(replica.most_running for replica in fleet),
        samples=tuple(samples),
    )


def _cache_layout(
    config: DecoderConfig, layout: Layout, device: Device, workload: Workload
) -> CacheLayout:
    """The blocks that the engine would make on one rank, over all replicas of the attention."""
    memory = plan_memory(config, layout, device, workload)
    stage = next(iter(layout.stages(config)))
    rank = dataclasses.replace(
        config, num_key_value_heads=layout.kv_heads(config), layers=stage.layers
    )
    engine = EngineConfig(
        max_num_seqs=-(-workload.concurrency // layout.dp),
        max_model_len=workload.context,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        block_size=workload.block_size,
        gpu_memory_utilization=1.0,
        kv_cache_dtype=workload.kv_dtype,
    )
    spec = plan_kv_cache(rank, engine, torch.bfloat16, max(0, memory.kv_budget)).spec
    return CacheLayout(
        block_size=spec.block_size,
        num_full_blocks=spec.num_full_blocks * layout.dp,
        num_sliding_blocks=spec.num_sliding_blocks * layout.dp,
        sliding_window=config.sliding_window,
    )


class _StepTimes:
    """Seconds of a step, remembered by its rounded size."""

    def __init__(
        self, config: DecoderConfig, layout: Layout, device: Device, workload: Workload
    ) -> None:
        self._config, self._layout, self._device = config, layout, device
        self._workload = workload
        self._known: dict[tuple[int, int, int], float] = {}

    def __call__(self, scheduled: Sequence[ScheduledRequest]) -> float:
        tokens = sum(item.num_new_tokens for item in scheduled)
        seen = sum(item.request.num_computed_tokens + item.num_new_tokens for item in scheduled)
        dp, sequences = self._layout.dp, len(scheduled)
        key = (
            _rounded(-(-tokens // dp)),
            _rounded(-(-sequences // dp)),
            _rounded(seen // sequences),
        )
        if key not in self._known:
            self._known[key] = step_time(
                self._config, self._layout, self._device, self._workload,
                tokens=key[0], sequences=key[1], context=max(1, key[2]),
            ).total  # fmt: skip
        return self._known[key]


def _rounded(number: int) -> int:
    grain = max(1, int(number * _GRAIN))
    return -(-number // grain) * grain


@dataclass
class _Replica:
    """One engine, its clock, and what it has served."""

    cache: CacheLayout
    workload: Workload
    times: _StepTimes
    now: float = 0.0
    num_steps: int = 0
    most_running: int = 0
    served: list[Served] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.cache,
            self.workload.concurrency,
            self.workload.max_num_batched_tokens,
            prefix_caching=False,
        )
        self._arrivals: dict[int, Arrival] = {}
        self._first: dict[int, float] = {}

    @property
    def load(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def take(self, number: int, arrival: Arrival) -> None:
        self._arrivals[number] = arrival
        params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
        total = arrival.prompt + arrival.output
        prompt = (0,) * arrival.prompt
        self.scheduler.add(Request(number, prompt, params, frozenset(), total))

    def run_until(self, time: float) -> None:
        """Steps that begin before `time`."""
        while self.scheduler.has_work and self.now < time:
            self._step()
        if self.now < time < float("inf"):
            self.now = time

    def _step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.now += self.times(scheduled)
        self.num_steps += 1
        self.most_running = max(self.most_running, len(self.scheduler.running))
        for item in scheduled:
            self.scheduler.commit(item, (0,) if item.samples else ())
            request = item.request
            if len(request.output_token_ids) == 1:
                self._first.setdefault(request.request_id, self.now)
            if request.status is RequestStatus.FINISHED:
                self._end(request)

    def _end(self, request: Request) -> None:
        arrival = self._arrivals.pop(request.request_id)
        first = self._first.pop(request.request_id)
        others = arrival.output - 1
        self.served.append(
            Served(
                arrival=arrival.time,
                first_token=first - arrival.time,
                per_token=(self.now - first) / others if others else None,
                end=self.now,
            )
        )
