"""`musespark bench`, as a person calls it: what it prints, not how fast this machine is."""

import json

import pytest
from typer.testing import CliRunner

from musespark.cli.bench import percentiles
from musespark.cli.main import app
from musespark.errors import CapacityError, ConfigError
from musespark.testing import make_checkpoint

SHORT = ["--input-len", 12, "--output-len", 4, "--rounds", 2, "--batch-sizes", "1,3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model")


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_json_has_a_result_for_every_batch_size(model, tmp_path):
    result = run(model, *SHORT, "--json", "--output", tmp_path / "bench.json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert json.loads((tmp_path / "bench.json").read_text()) == report
    assert [each["batch_size"] for each in report["results"]] == [1, 3]
    assert report["peak_memory_bytes"] > 2**20
    for each in report["results"]:
        assert each["rounds"] == 2
        assert each["prefill_tokens_per_second"] > 0
        assert each["decode_tokens_per_second"] > 0
        for table in (each["first_token"], each["step"]):
            assert 0 < table["p50"] <= table["p90"] <= table["p99"]
        rate = each["batch_size"] / each["step"]["p50"]
        assert each["decode_tokens_per_second"] >= rate * 0.999


def test_the_table_has_a_row_for_every_batch_size(model):
    result = run(model, *SHORT)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()][-2:]
    assert [row[0] for row in rows] == ["1", "3"]
    assert {len(row) for row in rows} == {7}
    assert "peak memory" in result.output


def test_one_output_token_has_no_decode_rate(model):
    result = run(model, *SHORT, "--output-len", 1)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].split()[2] == "-"


def test_the_picture_is_written(model, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(model, *SHORT, "--plot", tmp_path / "bench.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    result = run(model, *SHORT, "--plot", tmp_path / "none" / "bench.png")
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(
    "flags",
    [["--batch-sizes", "1,x"], ["--batch-sizes", "0"], ["--rounds", 0], ["--input-len", 0]],
    ids=str,
)
def test_wrong_usage(model, flags):
    assert run(model, *flags).exit_code == 2


def test_prompts_beyond_the_model_are_refused(model):
    result = run(model, *SHORT, "--input-len", 5000)
    assert isinstance(result.exception, CapacityError)


def test_percentiles():
    assert percentiles([float(n) for n in range(100)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {}
