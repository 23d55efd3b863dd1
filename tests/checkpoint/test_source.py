import os
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from musespark.checkpoint import source
from musespark.checkpoint.source import packaged_draft, packaged_models, resolve_checkpoint
from musespark.config.model import DecoderConfig
from musespark.errors import CheckpointError


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of an offline hub."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


# What a broken connection raises, whichever HTTP library huggingface_hub uses.
TRANSPORT_ERROR = next(
    kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"
)


def error_of(model, revision=None):
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(model, revision)
    return str(caught.value)


def add_to_cache(cache, repository, commit, revision="main"):
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_packaged_model():
    assert "spark-mini" in packaged_models()
    folder = resolve_checkpoint("spark-mini")
    assert DecoderConfig.from_folder(folder).hidden_size > 0


def test_a_packaged_draft_is_no_model_but_found_by_name(tmp_path, monkeypatch):
    for name in ("little", "little-draft", "alone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr(source, "_ASSETS", tmp_path)
    assert packaged_models() == ("alone", "alone-nvfp4", "little", "little-nvfp4")
    assert resolve_checkpoint("little-draft") == tmp_path / "little-draft"
    assert packaged_draft("little") == packaged_draft("little-nvfp4") == "little-draft"
    assert packaged_draft("alone") is None
    assert packaged_draft(str(tmp_path / "little")) is None


def test_local_folder(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    # A folder that is there goes before a repository of the same name.
    assert resolve_checkpoint("owner/name").absolute() == tmp_path / "owner" / "name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/owner") == tmp_path / "owner"


def test_a_folder_called_like_a_packaged_model(tmp_path, monkeypatch):
    (tmp_path / "spark-mini").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("./spark-mini").absolute() == tmp_path / "spark-mini"
    assert resolve_checkpoint("spark-mini").absolute() != tmp_path / "spark-mini"


@pytest.mark.parametrize("model", ["/no/where", "./nowhere", "../nowhere", "~/nowhere", "a/b/c"])
def test_local_folder_that_is_not_there(model):
    message = error_of(model)
    assert message.startswith(repr(model))
    assert "no such folder (looked for " in message
    assert os.path.abspath(os.path.expanduser(model)) in message or ".." in model


def test_file_for_a_folder(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("")
    assert "is a file. Give the folder that holds it." in error_of(str(path))


def test_misspelt_packaged_model():
    message = error_of("spark-mimi")
    assert "no folder and no packaged model of that name. Packaged models: spark-mini" in message
    assert "Did you mean 'spark-mini'?" in message
    assert "owner/name" in message


@pytest.mark.parametrize("model", ["spark-mini", "."])
def test_revision_of_something_local(model):
    assert "has no revision 'v2'. Leave the revision out." in error_of(model, "v2")


def test_unknown_repository_while_offline(hub_cache):
    message = error_of("nobody/nothing")
    assert message.startswith("nobody/nothing: no such folder here, not in the local cache")
    assert "unset HF_HUB_OFFLINE" in message
    assert list(hub_cache.iterdir()) == []


def test_cached_repository_while_offline(hub_cache):
    main = add_to_cache(hub_cache, "meta-models/Spark", "a" * 40)
    tagged = add_to_cache(hub_cache, "meta-models/Spark", "b" * 40, "v2")
    assert resolve_checkpoint("meta-models/Spark") == main
    assert resolve_checkpoint("meta-models/Spark", "v2") == tagged
    assert resolve_checkpoint("meta-models/Spark", "b" * 40) == tagged
    assert "meta-models/Spark@v3: " in error_of("meta-models/Spark", "v3")


def test_only_weights_and_settings_are_downloaded(monkeypatch, tmp_path):
    asked: dict[str, Any] = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("owner/name", "main") == tmp_path
    assert asked == {
        "repository": "owner/name",
        "revision": "main",
        "allow_patterns": ["*.json", "*.safetensors", "*.jinja"],
    }


def hub_error(kind):
    """An error of the hub, without the response that its own constructor wants."""
    return kind.__new__(kind, "the hub says no")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (hub_error(errors.RepositoryNotFoundError), "no such repository on the Hugging Face hub"),
        (hub_error(errors.GatedRepoError), "Ask for it on https://huggingface.co/owner/name"),
        (hub_error(errors.RevisionNotFoundError), "no such revision. Give a branch"),
        (errors.LocalEntryNotFoundError("no network"), "offline or out of reach"),
        (errors.OfflineModeIsEnabled("offline"), "unset HF_HUB_OFFLINE"),
        (hub_error(errors.HfHubHTTPError), "could not be downloaded"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (TRANSPORT_ERROR("peer closed connection"), "peer closed connection. What has arrived"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_download_errors_say_what_to_do(monkeypatch, error, part):
    def download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    message = error_of("owner/name", "v1")
    assert message.startswith("owner/name@v1: ")
    assert part in message


@pytest.mark.usefixtures("hub_cache")
def test_impossible_repository_id():
    assert "not a valid repository id: " in error_of("meta--models/Spark")
