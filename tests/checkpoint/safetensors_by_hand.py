"""safetensors files put together byte by byte, so that each part of them can be wrong."""

import json
import struct


def file_bytes(header, data=b""):
    """A file of this header (a dict, or raw bytes) and this data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(folder, weight_map):
    content = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
