"""Small checkpoints for tests and experiments: random, but well conditioned.

Needs torch alone, so that anything that reads checkpoints can be tried without a download.
"""

from musespark.testing.checkpoints import config_json, make_checkpoint, tensor_shapes
from musespark.testing.configs import tiny_config
from musespark.testing.drafts import draft_fields, make_draft

__all__ = [
    "config_json",
    "draft_fields",
    "make_checkpoint",
    "make_draft",
    "tensor_shapes",
    "tiny_config",
]
