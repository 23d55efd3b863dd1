"""Settings of the server, where it listens, and what a checkpoint advises."""

import json
from pathlib import Path
from typing import Any

import pytest

from musespark.config.sampling_defaults import SamplingDefaults
from musespark.config.server import ServerConfig
from musespark.errors import ConfigError
from musespark.server.run import listen, url_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("max_body_bytes", 0),
        ("max_choices", 0),
        ("stream_stall_seconds", 0.0),
        ("stream_stall_seconds", float("nan")),
        ("body_seconds", float("inf")),
        ("shutdown_seconds", -1.0),
        ("served_model_name", ""),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: "):
        ServerConfig(**{name: value})


def test_addresses() -> None:
    for host, prefix in (("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")):
        with listen(host, 0) as listener:
            assert url_of(listener) == f"{prefix}{listener.getsockname()[1]}"
    assert ServerConfig(host="localhost").is_local
    assert not ServerConfig(host="0.0.0.0").is_local
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="--port"):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="host: "):
        listen("not:an:address", 0)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (None, SamplingDefaults()),
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": None}, SamplingDefaults(0.6, 0.9)),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(temperature=0.0)),
        ({"do_sample": True, "top_k": 64}, SamplingDefaults(top_k=64)),
    ],
)
def test_a_checkpoints_advice(tmp_path: Path, stored: Any, expected: SamplingDefaults) -> None:
    if stored is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    assert SamplingDefaults.from_folder(tmp_path) == expected


@pytest.mark.parametrize("stored", [{"top_p": 7}, {"temperature": "hot"}])
def test_bad_advice_is_told(tmp_path: Path, stored: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="generation_config"):
        SamplingDefaults.from_folder(tmp_path)
