"""Draws what h200.py measured: rooflines, and the bandwidth of operations that only move bytes.

python -m benchmarks.h200_plot benchmarks/results/h200.json docs/images/h200-roofline.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

PRODUCTS = {
    "qkvg_proj": "q, k, v, gate projection",
    "pooler": "pooler",
    "router_gemm": "router",
    "decode_full": "attention, decode",
    "prefill_full": "attention, prefill",
    "layer_nvfp4": "a layer, NVFP4 experts",
    "layer_bf16": "a layer, BF16 experts",
}
STREAMS = {
    "boundary": "residual boundary",
    "finalize": "finalize",
    "qk_rope_kv": "QK-norm, RoPE, insert",
    "output_gate": "output gate",
    "rms_norm": "norm",
    "soft_cap": "soft cap",
}


def main() -> None:
    report = json.loads(Path(sys.argv[1]).read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    draw_roofline(left, report)
    draw_bandwidth(right, report)
    figure.suptitle(f"{report['gpu']}, torch {report['torch']}: T tokens from 1 to 4096")
    figure.savefig(sys.argv[2], dpi=110)


def of(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return sorted((r for r in report["results"] if r["name"] == name), key=lambda r: r["tokens"])


def draw_roofline(axes: Axes, report: dict[str, Any]) -> None:
    bandwidth, rate = report["bytes_per_us"], report["flop_per_us"]
    intensities = [0.5, rate / bandwidth, 1e4]
    roof = [min(rate, bandwidth * x) / 1e6 for x in intensities]
    axes.plot(intensities, roof, color="black", label="what the card reached")
    for name, label in PRODUCTS.items():
        rows = of(report, name)
        points = [(r["flops"] / r["num_bytes"], r["flops"] / r["us"] / 1e6) for r in rows]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s",
        title="Products and whole layers", xlim=(0.5, 1e4), ylim=(0.5, 1500),
    )  # fmt: skip
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")


def draw_bandwidth(axes: Axes, report: dict[str, Any]) -> None:
    axes.axhline(report["bytes_per_us"] / 1e6, color="black", label="what the card reached")
    for name, label in STREAMS.items():
        rows = of(report, name)
        tokens = [r["tokens"] for r in rows]
        rates = [r["num_bytes"] / r["us"] / 1e6 for r in rows]
        axes.plot(tokens, rates, marker="o", markersize=4, linewidth=1, label=label)
    axes.set(
        xscale="log", xlabel="T", ylabel="TB/s", title="Operations that only move bytes",
        ylim=(0, 4.6),
    )  # fmt: skip
    axes.set_xticks([1, 4, 16, 64, 256, 1024, 4096], ["1", "4", "16", "64", "256", "1024", "4096"])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")


if __name__ == "__main__":
    main()
