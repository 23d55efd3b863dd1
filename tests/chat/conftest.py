"""Hypothesis without deadlines: on a busy machine the slowest example says nothing."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
