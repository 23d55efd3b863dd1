"""The shapes that travel over HTTP, as OpenAI's clients know them. Runs without torch."""
