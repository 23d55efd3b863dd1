"""What an engine and its client tell each other; plain data, in order, with no replies awaited."""

from dataclasses import dataclass

from musespark.engine.client import EngineInfo, EngineOutput, EngineRequest, EngineStats

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


ToEngine = Submit | Abort | ForgetPrefixes | Shutdown
FromEngine = Ready | Accepted | Refused | Outputs | Failed | Stopped
