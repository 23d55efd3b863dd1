"""What is read from environment variables: only here."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where files go that can be made again: $XDG_CACHE_HOME/musespark, or ~/.cache/musespark."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "musespark"
