"""Files on disk on one side, named tensors on the other.

Reading: `source` turns what a person typed into a folder, `shards` opens its safetensors files,
`names` says what their keys mean, `load` matches them against a module's weight slots. Writing:
`write` makes the same layout. Nothing is ever unpickled.
"""
