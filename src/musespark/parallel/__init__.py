"""How work and weights are spread over processes."""
