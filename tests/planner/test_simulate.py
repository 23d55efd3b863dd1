"""A simulated fleet: it serves everything, and behaves as queues do."""

import itertools
import statistics

import pytest
from tests.planner.released import released

from musespark.errors import CapacityError, ConfigError
from musespark.planner.devices import DEVICES
from musespark.planner.layout import make_layout
from musespark.planner.memory import Workload
from musespark.planner.plot import plot_fleet
from musespark.planner.roofline import prefill_time, step_time
from musespark.planner.simulate import Arrival, make_arrivals, read_lengths, simulate

H200 = DEVICES["h200"]
LAYOUT = make_layout(gpus=8, nodes=1, tp=8, ep=8, pp=None, dp=None)
WORKLOAD = Workload(8192, 16, "fp8_e4m3")
LENGTHS = [(1000, 60), (3000, 20), (200, 40)]


def run(rate, count=60, replicas=1, workload=WORKLOAD):
    arrivals = make_arrivals(LENGTHS, rate, count)
    return simulate(released(), LAYOUT, H200, workload, arrivals, replicas)


def test_every_request_is_served_once():
    report = run(5, replicas=2)
    arrivals = make_arrivals(LENGTHS, 5, 60)
    assert [each.arrival for each in report.served] == [each.time for each in arrivals]
    assert report.output_tokens == sum(each.output for each in arrivals)
    assert all(each.first_token > 0 for each in report.served)


def test_a_single_request_takes_what_the_time_model_says():
    report = simulate(released(), LAYOUT, H200, WORKLOAD, [Arrival(1.0, 2048, 101)])
    (served,) = report.served
    prefill = prefill_time(released(), LAYOUT, H200, WORKLOAD, 2048).total
    decode = step_time(released(), LAYOUT, H200, WORKLOAD, tokens=1, sequences=1, context=2100)
    assert served.first_token == pytest.approx(prefill, rel=0.1)
    assert served.per_token == pytest.approx(decode.total, rel=0.02)
    assert report.num_steps == 101


def test_more_load_waits_longer_and_more_replicas_less():
    calm, busy, helped = run(1), run(100), run(100, replicas=4)
    assert calm.percentile("first_token", 0.5) < busy.percentile("first_token", 0.5)
    assert helped.percentile("first_token", 0.99) < busy.percentile("first_token", 0.99)
    assert calm.keeps_up
    assert busy.most_running <= WORKLOAD.concurrency


def test_a_fleet_that_is_too_small_says_so():
    assert not run(100, count=200).keeps_up
    assert run(1, count=100).keeps_up


def test_repeatable():
    assert run(5).to_dict() == run(5).to_dict()


def test_arrivals_come_at_the_rate_asked_for():
    times = [each.time for each in make_arrivals(LENGTHS, 4.0, 4000)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)


def test_requests_longer_than_the_context_are_refused():
    with pytest.raises(CapacityError, match="Raise --context"):
        run(1, workload=Workload(1024, 4))


def test_lengths_are_read_and_bad_lines_named(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("# prompt, output\n100,20\n\n7 8  # spaces do as well\n")
    assert read_lengths(path) == [(100, 20), (7, 8)]
    for text, named in (("1,2\n3\n", "line 2"), ("", "no pair"), ("0,4\n", "line 1")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=named):
            read_lengths(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lengths(tmp_path / "none")


def test_rates_must_be_above_zero():
    for rate, count in ((0, 1), (float("nan"), 1), (1, 0)):
        with pytest.raises(ConfigError):
            make_arrivals(LENGTHS, rate, count)


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    plot_fleet(run(5), "eight GPUs", tmp_path / "fleet.png")
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_fleet(run(5), "eight GPUs", tmp_path / "none" / "fleet.png")
