"""Modules that the decoder and its experts share: linear layers and norms.

Attributes that hold weights carry the checkpoint's names. A module that derives something from its
weights defines `finish_loading()`, which runs once, after the last weight is in place.
"""
