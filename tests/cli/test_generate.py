"""`musespark generate` and `demo`, as a person calls them."""

import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from musespark.checkpoint.source import resolve_checkpoint
from musespark.cli.main import app
from musespark.config.model import DecoderConfig
from musespark.errors import MuseSparkError
from musespark.testing import make_checkpoint, make_draft

COMMAND = [sys.executable, "-m", "musespark"]


@pytest.fixture(scope="module")
def tokenless(tmp_path_factory):
    """A checkpoint without a tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_json(*arguments):
    result = run("generate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_json_holds_one_object_with_everything():
    output = run_json("spark-mini", "--prompt", "1, 2, 3,", "--max-tokens", 5, "--ignore-eos")
    assert len(output["token_ids"]) == 5
    assert output["finish_reason"] == "length"
    assert output["prompt_token_ids"] == list(b"1, 2, 3,")
    assert isinstance(output["text"], str)
    assert output["timings"]["total"] > 0
    assert "logprobs" not in output


def test_json_tells_what_a_draft_has_brought(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = DecoderConfig.from_folder(resolve_checkpoint("spark-mini"))
    draft = make_draft(tmp_path / "draft", target, target_layer_ids=[2], block_size=3)
    arguments = ["--prompt", "1, 2, 3,", "--max-tokens", 9, "--ignore-eos", "--dtype", "float32"]
    plain = run_json(*arguments)
    guessing = run_json(*arguments, "--draft", draft, "--num-speculative-tokens", 3)
    assert guessing["token_ids"] == plain["token_ids"]
    assert "speculation" not in plain
    brought = guessing["speculation"]
    assert brought["cycles"] > 0
    assert 1 <= brought["tokens_per_cycle"] <= 4
    assert len(brought["acceptance"]) == 3
    assert brought["draft_seconds"] > 0


def test_the_packaged_model_is_the_default_and_greedy_is_repeatable():
    arguments = ["--prompt", "abc", "--max-tokens", 4, "--ignore-eos"]
    assert run_json(*arguments)["token_ids"] == run_json("spark-mini", *arguments)["token_ids"]


def test_text_streams_to_standard_output():
    expected = run_json("--prompt", "abc", "--max-tokens", 6)["text"]
    result = run("generate", "--prompt", "abc", "--max-tokens", 6)
    assert result.output == expected + "\n"


def test_a_prompt_file_is_a_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("abc", encoding="utf-8")
    from_file = run_json("--prompt-file", path, "--max-tokens", 4)
    assert from_file["token_ids"] == run_json("--prompt", "abc", "--max-tokens", 4)["token_ids"]


def test_token_ids_work_without_a_tokenizer(tokenless):
    output = run_json(tokenless, "--token-ids", "1,2,3", "--max-tokens", 4)
    assert output["prompt_token_ids"] == [1, 2, 3]
    assert len(output["token_ids"]) == 4
    assert output["text"] is None
    plain = run("generate", tokenless, "--token-ids", "1,2,3", "--max-tokens", 4)
    assert plain.output.split() == [str(token) for token in output["token_ids"]]


def test_seeded_sampling_repeats_and_logprobs_are_reported():
    arguments = ["--prompt", "abc", "--temperature", 1.5, "--seed", 7, "--max-tokens", 8]
    first = run_json(*arguments, "--logprobs", 2)
    assert first["token_ids"] == run_json(*arguments)["token_ids"]
    assert len(first["logprobs"]) == len(first["token_ids"])
    assert len(first["logprobs"][0]["top"]) == 2


def test_output_ends_before_a_stop_text():
    whole = run_json("--prompt", "abc", "--max-tokens", 12, "--ignore-eos")["text"]
    stop = whole[3:5]
    output = run_json("--prompt", "abc", "--max-tokens", 12, "--ignore-eos", "--stop", stop)
    assert output["text"] == whole[: whole.index(stop)]
    assert output["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1", "--prompt", "a"], "temperature: must be"),
        (["--token-ids", "1,999999"], "outside the model's vocabulary"),
        (["no-such-model", "--prompt", "a"], "no-such-model"),
        (["--prompt", ""], "empty"),
        (["--prompt", "a", "--max-num-seqs", "0"], "max_num_seqs"),
        (["--prompt", "a", "--dtype", "int4"], "dtype: must be one of"),
        (["--prompt", "a", "--device", "tpu"], "device: must be"),
        (["--prompt", "a", "--max-model-len", "999999999"], "max_model_len"),
        (["--prompt", "a", "--moe-backend", "w4a4"], "musespark quantize"),
        (["--prompt", "a", "--moe-backend", "fast"], "moe_backend: must be one of"),
        (["--prompt", "a", "--moe-backend", "all_to_all"], "expert_parallel"),
    ],
)
def test_our_errors_say_what_is_wrong(arguments, message):
    result = run("generate", *arguments)
    assert isinstance(result.exception, MuseSparkError)
    assert message in str(result.exception)


def test_a_text_prompt_without_a_tokenizer_says_what_works(tokenless):
    result = run("generate", tokenless, "--prompt", "a")
    assert "token ids" in str(result.exception)
    result = run("generate", tokenless, "--token-ids", "1", "--stop", "x")
    assert "stop_token_ids" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of"),
        (["--prompt", "a", "--token-ids", "1"], "exactly one of"),
        (["--token-ids", "1,x"], "whole numbers"),
        (["--prompt-file", "no/such/file"], "no/such/file"),
    ],
)
def test_wrong_usage_is_explained(arguments, message):
    result = run("generate", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_errors_reach_the_terminal_as_one_line():
    done = subprocess.run(
        [*COMMAND, "generate", "--token-ids", "999999"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: Token id 999999")
    assert "Traceback" not in done.stderr


def test_interrupting_keeps_what_was_produced():
    process = subprocess.Popen(
        [*COMMAND, "generate", "--prompt", "abc", "--ignore-eos", "--max-tokens", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)  # output has begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert len(first + rest) > 1
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_version():
    assert run("--version").output.strip().count(".") == 2


def test_demo_shows_question_reasoning_and_answer():
    result = run("demo", "--question", "What is 347 + 86?")
    assert result.exit_code == 0
    assert "? What is 347 + 86?" in result.output
    assert "433" in result.output
