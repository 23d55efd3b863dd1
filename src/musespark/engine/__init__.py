"""From requests to batches to tokens.

One step: schedule (who runs, with how many tokens), build the inputs, run the decoder, sample,
commit. The host core (request, kv_blocks and what it stands on, scheduler) knows no tensors. The
engine knows tokens only; text belongs to whoever calls it: `LLM` directly, servers through the
`EngineClient` of client.py.
"""
