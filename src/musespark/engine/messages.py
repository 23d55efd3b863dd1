"""What an engine, its client and its processes tell each other; plain data, in order.

No sender waits for a reply.
"""

from dataclasses import dataclass

from musespark import errors
from musespark.engine.client import EngineInfo, EngineOutput, EngineRequest, EngineStats
from musespark.engine.step_plan import StepPlan
from musespark.errors import EngineDeadError, MuseSparkError

# --- to the engine


@dataclass(frozen=True, slots=True)
class Submit:
    """Take this request; answered by `Accepted` or `Refused`."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or one of its outputs."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class ForgetPrefixes:
    """Empty the prefix cache."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Abort what runs and end."""


# --- from the engine


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message: the model is loaded."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request is in the queue."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A request is not."""

    request_id: str
    error: str
    """Name of the class in musespark.errors."""
    message: str


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step, or an abort, has led to."""

    outputs: list[EngineOutput]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The last message of an engine that did not start, or died."""

    error: str
    """Name of the class in musespark.errors; EngineDeadError for whatever is not ours."""
    message: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last message of an engine that was shut down."""


# --- between the processes of a model that is spread over several


@dataclass(frozen=True, slots=True)
class Hosting:
    """From rank 0: where the ranks find each other is at this port."""

    port: int


@dataclass(frozen=True, slots=True)
class Join:
    """To the other ranks: where they find each other."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Loading:
    """From rank 0: how far its share of the weights is read."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """From each rank: it holds its share, in so much memory."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """From a replica's driver to its other ranks: run this."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class End:
    """From a replica's driver to its other ranks: there are no further steps."""


ToEngine = Submit | Abort | ForgetPrefixes | Shutdown
FromEngine = Ready | Accepted | Refused | Outputs | Failed | Stopped
ToRank = ToEngine | Join
FromRank = FromEngine | Hosting | Loading | Loaded
FromDriver = Step | End
Message = ToRank | FromRank | FromDriver


def error_of(message: Refused | Failed) -> MuseSparkError:
    """The error of the class that the engine named."""
    kind = getattr(errors, message.error, EngineDeadError)
    assert issubclass(kind, MuseSparkError)
    return kind(message.message)
