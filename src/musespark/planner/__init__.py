"""Capacity on paper: what a model takes on given GPUs, from its config alone."""
