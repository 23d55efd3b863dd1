"""`musespark quantize`, as a person calls it."""

import pytest
from typer.testing import CliRunner

from musespark.checkpoint.shards import CheckpointReader
from musespark.cli.main import app
from musespark.errors import CheckpointError, ConfigError
from musespark.llm.loading import load_decoder
from musespark.testing import make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model")


def run(*arguments):
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_it_reports_the_error_of_every_layer(source, tmp_path):
    result = run(source, tmp_path / "target")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "%" in line]
    assert [row.split()[1] for row in rows] == ["1", "2", "3", "4"]
    assert f"{tmp_path / 'target'}: " in result.output.replace("\n", "")
    load_decoder(tmp_path / "target")


def test_layers_and_scales(source, tmp_path):
    result = run(source, tmp_path / "target", "--exclude-layers", "1-3", "--scales", "max")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "%" in line]
    assert [row.split()[1] for row in rows] == ["0", "4", "5"]


def test_calibration_by_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("What is 12 + 30? Sort these numbers: 41, 7, 19. " * 60)
    result = run("spark-mini", tmp_path / "target", "--calibrate", text)
    assert result.exit_code == 0, result.output
    with CheckpointReader.open(tmp_path / "target") as reader:
        names = [name for name in reader if name.endswith("input_scale")]
        assert names
        for name in names:
            scales = reader.read(name)
            assert ((scales > 0) & (scales != 1.0)).all()


def test_calibration_needs_a_tokenizer_and_a_text(source, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc")
    result = run(source, tmp_path / "target", "--calibrate", text)
    assert isinstance(result.exception, CheckpointError)
    assert "tokenizer.json" in str(result.exception)
    result = run(source, tmp_path / "target", "--calibrate", tmp_path / "none.txt")
    assert result.exit_code == 2


def test_errors_come_before_any_work(source, tmp_path):
    result = run(source, tmp_path / "target", "--exclude-layers", "6")
    assert isinstance(result.exception, ConfigError)
    assert run(source, tmp_path / "target", "--format", "int4").exit_code == 2
    assert not (tmp_path / "target").exists()
