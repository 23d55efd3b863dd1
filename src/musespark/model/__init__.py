"""The Muse Spark text decoder."""
