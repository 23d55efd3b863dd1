"""Flags are made from dataclasses, so a setting cannot be forgotten on the command line."""

import dataclasses

from typer.testing import CliRunner

from musespark.cli.main import app
from musespark.cli.options import _field_docs, pick
from musespark.config.engine import EngineConfig
from musespark.config.sampling import SamplingParams


def test_every_setting_has_a_flag_and_help():
    text = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    left_out = {"n", "prompt_logprobs"}  # one prompt, one stream
    for config in (SamplingParams, EngineConfig):
        docs = _field_docs(config)
        for field in dataclasses.fields(config):
            if field.name in left_out or not field.metadata.get("flag", True):
                continue
            assert f"--{field.name.replace('_', '-')}" in text
            assert docs.get(field.name), f"{config.__name__}.{field.name} has no docstring"


def test_pick_takes_the_fields_of_one_config():
    settings = {"temperature": 0.5, "seed": 3, "max_num_seqs": 2, "other": 1}
    assert pick(SamplingParams, settings) == {"temperature": 0.5, "seed": 3}
    assert pick(EngineConfig, settings) == {"max_num_seqs": 2}
