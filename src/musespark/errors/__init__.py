"""Every error this package raises on purpose.

Each message says what is wrong, where (file, tensor, setting) and what to do about it.

    MuseSparkError
    ├── ConfigError        a config.json or a setting that cannot be served
    ├── CheckpointError    files that are missing, damaged or do not fit the model
    ├── RequestError       a prompt or a sampling parameter that cannot be honoured
    └── CapacityError      the model or the request does not fit into the memory given
"""

__all__ = ["CapacityError", "CheckpointError", "ConfigError", "MuseSparkError", "RequestError"]


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
