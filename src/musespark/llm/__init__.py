"""The front door of the Python API: a model by name, text in, text out."""
