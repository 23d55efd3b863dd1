"""One plan: a layout, its memory, what is the most it serves, and how fast."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from musespark.config.model import DecoderConfig
from musespark.errors import ConfigError
from musespark.planner.devices import Device
from musespark.planner.layout import Layout
from musespark.planner.memory import (
    MemoryPlan,
    Workload,
    largest_concurrency,
    largest_context,
    plan_memory,
)
from musespark.planner.roofline import StepTime, decode_time, prefill_time


@dataclass(frozen=True, slots=True)
class Plan:
    """What one layout gives."""

    layout: Layout
    workload: Workload
    memory: MemoryPlan
    largest_context: int
    """At the concurrency asked for."""
    largest_concurrency: int
    """At the context asked for."""
    decode: StepTime
    prefill: StepTime
    """Of one prompt as long as the context."""

    @property
    def decode_rate(self) -> float:
        """Tokens per second over all requests."""
        return self.workload.concurrency / self.decode.total

    def to_dict(self) -> dict[str, Any]:
        """As JSON objects."""
        memory = self.memory
        totals = {
            "fits": memory.fits,
            "margin": memory.margin,
            "weight_bytes": memory.weight_bytes,
            "used": memory.used,
        }
        steps = {
            name: {
                "seconds": step.total,
                "limit": step.limit,
                "by_cause": step.seconds,
                "collective_bytes": step.collective_bytes,
            }
            for name, step in (("decode", self.decode), ("prefill", self.prefill))
        }
        return {
            "layout": self.layout.name,
            "parallelism": asdict(self.layout.parallelism),
            "memory": asdict(memory) | totals,
            "largest_context": self.largest_context,
            "largest_concurrency": self.largest_concurrency,
            "decode_tokens_per_second": self.decode_rate,
            **steps,
        }


def make_plan(config: DecoderConfig, layout: Layout, device: Device, workload: Workload) -> Plan:
    """Plan one layout.

    Raises:
        ConfigError: the engine would refuse it.
    """
    layout.check(config)
    if workload.context > config.max_position_embeddings:
        raise ConfigError(
            f"context: {workload.context} exceeds the {config.max_position_embeddings} positions "
            "the model was made for (max_position_embeddings)."
        )
    return Plan(
        layout=layout,
        workload=workload,
        memory=plan_memory(config, layout, device, workload),
        largest_context=largest_context(config, layout, device, workload),
        largest_concurrency=largest_concurrency(config, layout, device, workload),
        decode=decode_time(config, layout, device, workload),
        prefill=prefill_time(config, layout, device, workload, workload.context),
    )


def rank_plans(plans: Iterable[Plan]) -> list[Plan]:
    """Those that fit first, the fastest to decode first; of the others, those that lack least."""

    def order(plan: Plan) -> tuple[bool, float]:
        fits = plan.memory.fits
        return not fits, plan.decode.total if fits else -plan.memory.margin

    return sorted(plans, key=order)
