"""Frozen dataclasses for everything that can be set; validated here and trusted elsewhere."""
