"""Where the time of one decoder layer goes: the kernels of one step, with the gaps between them.

python -m benchmarks.h200_profile --kind nvfp4 --tokens 1
"""

import argparse

import torch
from benchmarks.h200 import BF16, CONTEXT, DEVICE, fill_randomly, layer_step, released_config
from torch.profiler import ProfilerActivity, profile

from musespark.model.layer import DecoderLayer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1])
    arguments = parser.parse_args()
    layer = DecoderLayer(released_config(arguments.kind == "nvfp4"), 0, dtype=BF16, device=DEVICE)
    fill_randomly(layer)
    for T in arguments.tokens:
        with torch.inference_mode():
            profile_step(layer, T)


def profile_step(layer: DecoderLayer, T: int) -> None:
    """Print the kernels of one replay of a step of T sequences, in order of their start."""
    run = layer_step(T, CONTEXT)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(layer)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run(layer)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph.replay()
        torch.cuda.synchronize()
    events = sorted(
        (event for event in profiled.events() if event.device_type.name == "CUDA"),
        key=lambda event: event.time_range.start,
    )
    start = end = events[0].time_range.start
    print(f"T = {T}: start, gap before it, duration in us")
    for event in events:
        span = event.time_range
        gap, length = span.start - end, span.end - span.start
        print(f"{span.start - start:8.1f}{gap:8.1f}{length:8.1f}  {event.name[:80]}")
        end = max(end, span.end)
    print(f"{end - start:8.1f} in all", flush=True)


if __name__ == "__main__":
    main()
