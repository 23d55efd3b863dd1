import threading

import pytest

from musespark.checkpoint import derive, source
from musespark.checkpoint.source import packaged_models, resolve_checkpoint
from musespark.errors import CheckpointError
from musespark.llm.loading import load_decoder
from musespark.testing import make_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def assets(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_ASSETS", tmp_path / "assets")
    make_checkpoint(tmp_path / "assets" / "little")
    return tmp_path / "assets"


def test_spark_mini_has_an_nvfp4_form(cache):
    assert "spark-mini-nvfp4" in packaged_models()
    folder = resolve_checkpoint("spark-mini-nvfp4")
    assert cache in folder.parents
    assert (folder / "tokenizer.json").exists()
    plain, packed = load_decoder("spark-mini"), load_decoder("spark-mini-nvfp4")
    ids = list(b"What is 12 + 30?")
    expected, found = plain.compute_logits(ids), packed.compute_logits(ids)
    assert (found - expected).norm() / expected.norm() < 0.1


@pytest.mark.usefixtures("assets")
def test_it_is_made_once(monkeypatch):
    assert packaged_models() == ("little", "little-nvfp4")
    folder = resolve_checkpoint("little-nvfp4")
    monkeypatch.setattr(derive, "quantize_checkpoint", None)
    assert resolve_checkpoint("little-nvfp4") == folder


def test_other_weights_get_another_folder(assets):
    before = resolve_checkpoint("little-nvfp4")
    weights = assets / "little" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert resolve_checkpoint("little-nvfp4") != before


@pytest.mark.usefixtures("assets")
def test_two_processes_at_once():
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(resolve_checkpoint("little-nvfp4")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


@pytest.mark.usefixtures("assets")
def test_a_cache_that_cannot_be_written(cache):
    cache.write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME"):
        resolve_checkpoint("little-nvfp4")


@pytest.mark.usefixtures("assets")
def test_it_has_no_revision():
    with pytest.raises(CheckpointError, match="so it has no revision 'main'"):
        resolve_checkpoint("little-nvfp4", "main")
