"""Settings of the HTTP server: where it listens, whom it lets in, and how much it takes on."""

from dataclasses import dataclass

from musespark.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What one server process listens to and where it draws its limits.

    Raises:
        ConfigError: a value outside its range, naming the setting.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = 8000
    """Port to listen on; 0 for a free one."""
    allowed_host: tuple[str, ...] = ()
    """Host names that requests may address; by default any, but only local names when listening
    on a local address without an API key, so that no web page can talk to the server."""
    served_model_name: str | None = None
    """The model's name in the API; None: the name it was loaded by."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body; larger ones are turned away with 413."""
    max_choices: int = 128
    """Outputs that one request may ask for: n, times its prompts."""
    stream_stall_seconds: float = 60.0
    """How long a reader may take nothing before it is cut off."""
    body_seconds: float = 30.0
    """How long a client may take to send its request body."""
    shutdown_seconds: float = 30.0
    """Time for running requests to finish after SIGTERM; then they are aborted."""
    restart_engine: bool = False
    """Start the engine's process again when it dies."""
    api_only: bool = False
    """Serve no chat page."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: must be between 0 and 65535, found {self.port}.")
        for name in ("max_body_bytes", "max_choices"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: must be 1 or more, found {value}.")
        for name in ("stream_stall_seconds", "body_seconds"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name}: must be above 0, found {value}.")
        if not 0 <= self.shutdown_seconds < float("inf"):
            raise ConfigError(
                f"shutdown_seconds: must be 0 or more, found {self.shutdown_seconds}."
            )
        object.__setattr__(self, "allowed_host", tuple(self.allowed_host))
        if self.served_model_name == "":
            raise ConfigError("served_model_name: must not be empty.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK
