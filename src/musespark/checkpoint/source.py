"""From what a person types to a folder on disk: a packaged model, a folder, or a repository id."""

import difflib
import re
from pathlib import Path

from musespark.errors import CheckpointError

# Everything a model needs, and nothing that would have to be unpickled or run.
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja")

# Every packaged model can be had quantized, under its name with this ending.
_NVFP4 = "-nvfp4"
# A packaged model's draft has its name with this ending.
_DRAFT = "-draft"

_ASSETS = Path(__file__).parent.parent / "assets"
_REPOSITORY_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def packaged_models() -> tuple[str, ...]:
    """Names of the models that come with this package, and of their NVFP4 forms."""
    folders = {path.parent.name for path in _ASSETS.glob("*/config.json")}
    names = {name for name in folders if not name.endswith(_DRAFT)}
    return tuple(sorted(names | {f"{name}{_NVFP4}" for name in names}))


def packaged_draft(model: str) -> str | None:
    """The name of the DSpark draft that comes with a packaged model, quantized or not; None: it
    has none."""
    draft = f"{model.removesuffix(_NVFP4)}{_DRAFT}"
    is_there = model in packaged_models() and (_ASSETS / draft / "config.json").exists()
    return draft if is_there else None


def resolve_checkpoint(model: str, revision: str | None = None) -> Path:
    """The folder that holds the checkpoint `model`, downloaded if need be.

    Args:
        model: the name of a packaged model or draft (`spark-mini`), a folder, or a Hugging Face
            repository id (`owner/name`), tried in that order; a folder called like a packaged
            model is `./spark-mini`. Downloads go through huggingface_hub's cache; its offline mode
            (HF_HUB_OFFLINE=1), endpoint and token are respected.
        revision: branch, tag or commit of a repository.

    Raises:
        CheckpointError: nothing of that name, or it cannot be downloaded; says what to do.
    """
    if model in packaged_models() or model in map(packaged_draft, packaged_models()):
        _without_revision(_ASSETS / model, model, revision)
        return _packaged_folder(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _without_revision(path, model, revision)
    if path.is_file():
        raise CheckpointError(f"{model}: is a file. Give the folder that holds it.")
    if not _REPOSITORY_ID.fullmatch(model):
        raise CheckpointError(f"{model!r}: {_no_such(model)}")
    return _download(model, revision)


def _packaged_folder(model: str) -> Path:
    """Where a packaged model lies; its NVFP4 form is made on first use, into the user's cache."""
    if (_ASSETS / model / "config.json").exists():
        return _ASSETS / model
    # Here, not at the top: the quantizer is seldom needed and brings the whole model along.
    from musespark.checkpoint.derive import nvfp4_form

    return nvfp4_form(_ASSETS / model.removesuffix(_NVFP4))


def _without_revision(path: Path, model: str, revision: str | None) -> Path:
    if revision is not None:
        raise CheckpointError(
            f"{model}: is not a Hugging Face repository, so it has no revision {revision!r}. "
            "Leave the revision out."
        )
    return path


def _no_such(model: str) -> str:
    """Why a name that cannot be a repository id leads nowhere."""
    if re.search(r"[/\\~]", model) or model in (".", ".."):
        return f"no such folder (looked for {Path(model).expanduser().absolute()})."
    similar = difflib.get_close_matches(model, packaged_models(), n=1)
    hint = f" Did you mean {similar[0]!r}?" if similar else ""
    return (
        "no folder and no packaged model of that name. Packaged models: "
        f"{', '.join(packaged_models()) or 'none'}; a Hugging Face repository is written "
        f"owner/name.{hint}"
    )


def _download(repository: str, revision: str | None) -> Path:
    # Here, not at the top: most runs never need the hub, and it is slow to import.
    import huggingface_hub
    from huggingface_hub import errors

    at = f"{repository}@{revision}" if revision else repository
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=list(_DOWNLOADED)
            )
        )
    except errors.GatedRepoError:
        problem = (
            "is gated, and this account has no access. Ask for it on "
            f"https://huggingface.co/{repository}, then log in with `hf auth login`."
        )
    except errors.RepositoryNotFoundError:
        problem = (
            "no such repository on the Hugging Face hub, or a private one, and no such folder "
            "here. Check the spelling; for a private one log in with `hf auth login`."
        )
    except errors.RevisionNotFoundError:
        problem = "the repository has no such revision. Give a branch, a tag or a commit."
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        problem = (
            "no such folder here, not in the local cache, and the Hugging Face hub is offline or "
            "out of reach. With a network, unset HF_HUB_OFFLINE and try again; without one, "
            "download it elsewhere (`hf download`) and give the folder."
        )
    except errors.HFValidationError as error:
        problem = f"not a valid repository id: {error}"
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        problem = f"could not be downloaded: {error}. What has arrived is kept: try again."
    raise CheckpointError(f"{at}: {problem}")
