"""The figures in docs/deployment.md are what `musespark plan` prints."""

import json
import shlex
from pathlib import Path

import pytest
from tests.planner.released import FIELDS
from typer.testing import CliRunner

from musespark.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
BLOCKS = [
    block.strip().splitlines()
    for block in PAGE.split("```")
    if block.strip().startswith("$ musespark plan")
]


def test_both_large_deployments_are_planned():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0][-40:])
def test_each_line_is_printed_in_this_order(block, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FIELDS))
    command = block[0].replace("config.json", str(config))
    result = CliRunner().invoke(app, shlex.split(command)[2:])
    assert result.exit_code == 0, result.output
    printed = iter(result.output.splitlines())
    for line in block[1:]:
        assert line in printed, f"not printed, or in another place: {line}"


def test_the_times_of_cut_and_of_whole_experts(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FIELDS))
    arguments = ["--config", str(config), "--format", "nvfp4", "--gpus", "8", "--kv-dtype", "fp8"]
    result = CliRunner().invoke(app, ["plan", "--json", *arguments])
    plans = {plan["layout"]: plan for plan in json.loads(result.output)["plans"]}
    decode, prefill = (
        [plans[name][phase]["seconds"] for name in ("tp8", "tp8 ep8")]
        for phase in ("decode", "prefill")
    )
    text = " ".join(PAGE.split())
    assert f"({decode[0] * 1e3:.2f} instead of {decode[1] * 1e3:.2f} ms by the plan)" in text
    assert f"({prefill[0]:.1f} instead of {prefill[1]:.1f} s)" in text
