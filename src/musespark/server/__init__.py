"""The HTTP server: OpenAI's API, metrics and a chat page, in front of the engine's process.

The only package that sees the web framework. It owns what happens to a request between the
socket and the engine: reading and checking it, rendering and tokenizing, turning tokens back into
reasoning, answer and tool calls, and ending whatever nobody waits for any more. It computes
nothing itself, and is tested with an engine that is a script.
"""
