"""Every error this package raises on purpose.

Each message says what is wrong, where (file, tensor, setting) and what to do about it.

    MuseSparkError
    ├── ConfigError        a config.json or a setting that cannot be served
    ├── CheckpointError    files that are missing, damaged or do not fit the model
    ├── RequestError       a prompt or a sampling parameter that cannot be honoured
    ├── CapacityError      the model or the request does not fit into the memory given
    └── EngineError        the engine cannot take or finish a request now
        ├── EngineNotReadyError    it is still starting, or shutting down
        ├── QueueFullError         too many requests wait already
        └── EngineDeadError        it has died
"""

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "EngineDeadError",
    "EngineError",
    "EngineNotReadyError",
    "MuseSparkError",
    "QueueFullError",
    "RequestError",
]


class MuseSparkError(Exception):
    """Base of all errors meant for people; the command line prints it without a traceback."""


class ConfigError(MuseSparkError):
    """A config.json or a setting that cannot be served, with the field and the file named."""


class CheckpointError(MuseSparkError):
    """Checkpoint files that are missing, damaged, or do not fit the model."""


class RequestError(MuseSparkError, ValueError):
    """A prompt or a sampling parameter that cannot be honoured."""


class CapacityError(MuseSparkError):
    """The model, the context or the request does not fit into the memory given."""


class EngineError(MuseSparkError):
    """The engine cannot take or finish a request now; the request itself may be fine."""


class EngineNotReadyError(EngineError):
    """The engine is still starting, or shutting down."""


class QueueFullError(EngineError):
    """Too many requests wait already."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        """`retry_after` is a guess, in seconds, at when there may be room."""
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(EngineError):
    """The engine has died; what ran in it is lost."""
