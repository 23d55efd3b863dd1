"""`musespark plan`, as a person calls it."""

import json

import pytest
from tests.planner.released import FIELDS
from typer.testing import CliRunner

from musespark.cli.main import app
from musespark.errors import ConfigError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(FIELDS))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def run_json(*arguments):
    result = run(*arguments, "--json")
    return result.exit_code, json.loads(result.output)


def test_the_released_model_in_nvfp4_fits_eight_h200(config):
    result = run("--config", config, "--format", "nvfp4", "--gpus", 8, "--kv-dtype", "fp8")
    assert result.exit_code == 0, result.output
    assert "528.9 GB in all, 66.1 GB a GPU" in result.output
    assert "It fits" in result.output
    assert "<- the limit" in result.output
    assert "layouts, best first" in result.output


def test_on_eight_h100_it_says_by_how_little(config):
    arguments = ["--config", config, "--format", "nvfp4", "--gpus", 8, "--gpu", "h100-80g"]
    result = run(*arguments, "--tp", 8, "--ep", 8, "--context", 8192)
    assert result.exit_code == 0, result.output
    assert "GB more could be had" in result.output
    result = run(*arguments, "--tp", 8, "--ep", 8, "--kv-dtype", "fp8")
    assert result.exit_code == 1
    assert "It does not fit" in result.output
    assert "GB lack." in result.output


def test_json_has_every_layout_and_adds_up(config):
    code, report = run_json("--config", config, "--format", "nvfp4", "--gpus", 8)
    assert code == 0
    assert report["fits"]
    assert len(report["plans"]) > 10
    for plan in report["plans"]:
        memory = plan["memory"]
        assert sum(memory["weights"].values()) == memory["weight_bytes"]
        for name in ("decode", "prefill"):
            step = plan[name]
            assert sum(step["by_cause"].values()) == pytest.approx(step["seconds"])
            assert step["limit"] in step["by_cause"]


def test_one_layout_is_not_ranked(config):
    code, report = run_json("--config", config, "--format", "nvfp4", "--gpus", 8, "--tp", 8)
    assert code == 0
    assert [plan["layout"] for plan in report["plans"]] == ["tp8"]


def test_two_nodes_hold_bf16(config):
    arguments = ["--config", config, "--format", "bf16", "--gpus", 8]
    assert run(*arguments).exit_code == 1
    result = run(*arguments, "--nodes", 2)
    assert result.exit_code == 0
    assert "2 x 8 x h200" in result.output


def test_the_packaged_model_on_a_cpu():
    code, report = run_json("spark-mini", "--gpu", "cpu", "--memory-gib", 2, "--concurrency", 4)
    assert code == 0
    assert report["total_weight_bytes"] < 2e7
    assert report["workload"]["context"] == 4096


def test_layouts_that_the_engine_refuses_are_refused(config):
    assert run("--config", config, "--memory-gib", -3).exit_code == 2
    for flags in (
        ["--tp", 3, "--gpus", 3],
        ["--gpus", 8, "--tp", 4, "--ep", 3],
        ["--gpu", "h20"],
        ["--context", 2**21],
    ):
        result = run("--config", config, *flags)
        assert isinstance(result.exception, ConfigError)


FLEET = ["--format", "nvfp4", "--gpus", 8, "--tp", 8, "--context", 4096]


def test_a_fleet_is_simulated(config, tmp_path):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("500,20\n2000,30\n")
    arguments = ["--config", config, *FLEET, "--arrival-rate", 4, "--lengths", lengths]
    arguments += ["--requests", 40, "--replicas", 2]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "fleet: 2 replicas, 40 requests at 4 a second" in result.output
    assert "time to first token" in result.output
    code, report = run_json(*arguments)
    assert code == 0
    assert report["fleet"]["first_token_p50"] <= report["fleet"]["first_token_p99"]
    assert report["fleet"]["output_tokens_per_second"] > 0


@pytest.mark.parametrize(
    "flags", [["--arrival-rate", 1], ["--plot", "a.png"], ["--replicas", 0]], ids=str
)
def test_half_a_simulation_is_wrong_usage(config, flags):
    assert run("--config", config, *FLEET, *flags).exit_code == 2
