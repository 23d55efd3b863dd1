"""The NVFP4 form of a packaged model, made on first use and kept in the user's cache.

So the package ships one set of weights, and its quantized form always follows from it. The
folder's name holds a digest of all it is made from: other weights, or another recipe, get another
folder.
"""

import hashlib
from pathlib import Path

from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.config.environment import cache_folder
from musespark.errors import CheckpointError

# Raised whenever the quantizer gives other bytes for the same weights.
_RECIPE = 1


def nvfp4_form(source: Path) -> Path:
    """The folder of the NVFP4 form of the packaged model in `source`; made there if need be.

    Raises:
        CheckpointError: the cache cannot be written.
    """
    folder = cache_folder() / "packaged" / f"{source.name}-nvfp4-{_digest(source)}"
    if folder.exists():
        return folder
    try:
        quantize_checkpoint(source, folder)
    except (CheckpointError, OSError) as error:
        if folder.exists():  # another process was faster
            return folder
        raise CheckpointError(
            f"{error} The NVFP4 form of {source.name} is made there on first use: set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from None
    return folder


def _digest(source: Path) -> str:
    digest = hashlib.sha256(f"recipe {_RECIPE}".encode())
    for path in sorted(source.iterdir()):
        digest.update(f"\n{path.name}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
