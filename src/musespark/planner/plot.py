"""The picture of a simulated fleet: how long requests wait, and how full it is."""

from pathlib import Path

from musespark.errors import ConfigError
from musespark.planner.simulate import FleetReport


def plot_fleet(report: FleetReport, title: str, path: Path) -> None:
    """Write a PNG (or what else the name ends in): latencies, and requests over time.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write there.
    """
    # Here, not at the top: nothing else needs matplotlib.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "plot: needs matplotlib. Install it with `pip install 'musespark[plot]'`."
        ) from None
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, middle, right = figure.subplots(1, 3)
    shares = [100 * (index + 1) / len(report.served) for index in range(len(report.served))]
    left.plot(sorted(each.first_token for each in report.served), shares)
    left.set(xlabel="seconds to the first token", ylabel="% of requests within")
    paces = sorted(each.per_token for each in report.served if each.per_token is not None)
    middle.plot([1e3 * pace for pace in paces], shares[: len(paces)], color="tab:orange")
    middle.set(xlabel="ms per token after it", ylabel="% of requests within")
    times = [time for time, _, _ in report.samples]
    right.plot(times, [running for _, running, _ in report.samples], label="running")
    right.plot(times, [waiting for _, _, waiting in report.samples], label="waiting")
    right.set(xlabel="seconds", ylabel="requests", ylim=(0, None))
    right.legend(frameon=False)
    for axes in (left, middle):
        axes.set(xlim=(0, None), ylim=(0, 101))
        for share in (50, 99):
            axes.axhline(share, color="0.8", linewidth=0.8, zorder=0)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path} cannot be written: {error}.") from None
