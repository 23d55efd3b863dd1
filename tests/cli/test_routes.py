"""`musespark routes`, as a person calls it, against the routers' own choices."""

import json
import math
import re

import pytest
import torch
from typer.testing import CliRunner

from musespark.cli.main import app
from musespark.cli.routes import route_report
from musespark.cli.routes_page import routes_page
from musespark.errors import ConfigError, RequestError
from musespark.llm.loading import load_decoder
from musespark.testing import make_checkpoint

TOKENS = [5, 9, 5, 77, 3, 3, 12, 100, 64, 8]
MIX = ["dense", *["sparse"] * 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model", mlp_layer_types=MIX)


def run(*arguments):
    return CliRunner().invoke(app, ["routes", *map(str, arguments)])


def run_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def with_tokens(model):
    return [model, "--token-ids", ",".join(map(str, TOKENS)), "--dtype", "float32"]


def test_every_sparse_layer_is_told_and_adds_up(model):
    report = run_json(*with_tokens(model))
    assert [layer["layer"] for layer in report["layers"]] == [1, 2, 3, 4, 5]
    for layer in report["layers"]:
        assert sum(layer["load"]) == len(TOKENS) * report["top_k"]
        assert layer["never"] == layer["load"].count(0)
        assert layer["busiest"] == pytest.approx(max(layer["load"]) * 8 / sum(layer["load"]))
        assert all(len(set(ids)) == report["top_k"] for ids in layer["ids"])
        assert all(sum(weights) == pytest.approx(1, abs=1e-3) for weights in layer["weights"])
        shares = [count / sum(layer["load"]) for count in layer["load"] if count]
        entropy = -sum(share * math.log(share) for share in shares) / math.log(8)
        assert layer["entropy"] == pytest.approx(entropy, rel=1e-4)
        for one, other, count in layer["pairs"]:
            assert count == sum({one, other} <= set(ids) for ids in layer["ids"])


def test_watching_changes_nothing_and_leaves_no_hooks(model):
    decoder = load_decoder(model, dtype="float32")
    before = decoder.compute_logits(TOKENS)
    report = route_report(decoder, TOKENS, ["x"] * len(TOKENS))
    assert report == route_report(decoder, TOKENS, ["x"] * len(TOKENS))
    assert torch.equal(decoder.compute_logits(TOKENS), before)
    assert not any(module._forward_hooks for module in decoder.modules())


def test_the_table_has_a_row_for_every_layer(model):
    result = run(*with_tokens(model))
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.output.splitlines()[3:]] == list("12345")


def test_text_is_cut_to_the_tokens_asked_for():
    report = run_json("spark-mini", "--prompt", "What is 12 + 30?", "--max-tokens", 6)
    assert report["num_tokens"] == 6
    assert "".join(report["tokens"]) == "What i"


def test_the_page_stands_alone_and_holds_the_numbers(model, tmp_path):
    result = run(*with_tokens(model), "--output", tmp_path / "routes.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "routes.html").read_text()
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import", page)
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == run_json(*with_tokens(model))


def test_no_text_escapes_its_element():
    report = {"tokens": ["</script><script>alert(1)</script>"], "layers": []}
    page = routes_page(report, "<b>title</b>")
    assert page.count("</script>") == 2
    assert "<b>title" not in page


def test_the_picture_is_written(model, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(*with_tokens(model), "--output", tmp_path / "routes.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_is_refused(model, tmp_path):
    assert run(*with_tokens(model), "--output", tmp_path / "routes.pdf").exit_code == 2
    assert run(model).exit_code == 2
    result = run(*with_tokens(model), "--output", tmp_path / "none" / "routes.html")
    assert isinstance(result.exception, ConfigError)
    assert isinstance(run(model, "--token-ids", "1,128").exception, RequestError)
    dense = make_checkpoint(tmp_path / "dense", mlp_layer_types="dense")
    assert isinstance(run(dense, "--token-ids", "1").exception, ConfigError)
