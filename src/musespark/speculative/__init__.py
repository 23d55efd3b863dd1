"""Speculative decoding: a draft guesses tokens, the target verifies them in one step."""
