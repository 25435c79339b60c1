"""What `push` does: a run's adapter or model, or a merged model, to a repository of the hub."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import CheckpointError
from finetune.files.manifest import MANIFEST
from finetune.files.shards import weight_files
from finetune.hub.repository import (
    Repository,
    first_remedy,
    is_hub_reachable,
    refusals,
    why_unreachable,
)
from finetune.report.format import shown_gib
from finetune.report.model_card import MODEL_CARD, card_at
from finetune.report.screen import Working
from finetune.run.adapter_folder import CONFIG_FILE
from finetune.run.run_dir import RunDir

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

_BASE = "base_model_name_or_path"
_TOKENS = "https://huggingface.co/settings/tokens"


def pushed(
    source: Path, repo: str, *, is_public: bool, working: Working, note: Callable[[str], None]
) -> str:
    """Upload what a run has trained, or a merged model, with its card.

    Args:
        source: A finished run's directory, or the folder of a model.
        repo: A repository as OWNER/NAME, or as NAME of the account's own; a new one is created.
        is_public: Whether everybody may read it.
        working: Shows the progress of the upload.
        note: Shows a line.

    Returns:
        The address of the repository.

    Raises:
        CheckpointError: The source holds nothing to upload, or it is damaged.
        ModelError: The hub cannot be reached or refuses, or this machine has no token.
    """
    folder = _folder_of(source, note)
    target = Repository(
        id=repo, revision=None, kind="model", setting="--repo", revision_setting="--repo"
    )
    require_logged_in(target)
    from huggingface_hub import HfApi

    api = HfApi()
    with refusals(target):
        url = api.create_repo(repo, private=not is_public, exist_ok=True)
        _require_visibility(
            target, is_public=is_public, is_private=api.repo_info(url.repo_id).private
        )
        files = [_addition(file, url.repo_id) for file in _files_of(folder)]
        total = sum(file.upload_info.size for file in files)
        note(f"Uploading {len(files)} files, {shown_gib(total)}, to {url}")
        with working(f"Uploading {url.repo_id}", "bytes") as show:
            done = 0
            for file in files:
                api.preupload_lfs_files(url.repo_id, [file])
                done += file.upload_info.size
                show(done, total)
            api.create_commit(url.repo_id, files, commit_message="Upload what Sluice has trained")
    return str(url)


def require_logged_in(target: Repository) -> None:
    """Refuse to upload without a token, or with one that the hub does not know.

    Raises:
        ModelError: There is none, or the hub cannot be asked.
    """
    from huggingface_hub import HfApi, get_token

    if not is_hub_reachable():
        raise target.error(
            f"{target.id} cannot be written",
            limit=why_unreachable(),
            hint=f"{first_remedy()}, then push it again",
        )
    if get_token() is None:
        raise target.error(
            f"{target.id} cannot be written: this machine has no token of the hub",
            hint=f"`hf auth login` with a token that may write ({_TOKENS})",
        )
    with refusals(target):
        HfApi().whoami()


def _require_visibility(target: Repository, *, is_public: bool, is_private: bool | None) -> None:
    """Refuse a repository that was there and is seen by others than was asked for.

    Raises:
        ModelError: It is public, or private.
    """
    if is_private and is_public:
        raise target.error(
            f"{target.id} is there already, and private",
            limit="an upload does not change who may read a repository",
            hint=f"leave `--public` out, and change it at {target.page}/settings",
        )
    if not is_private and not is_public:
        raise target.error(
            f"{target.id} is there already, and public",
            limit="what is uploaded is private, unless it is asked otherwise",
            hint="`--public` if everybody may read it, or another name",
        )


def _folder_of(source: Path, note: Callable[[str], None]) -> Path:
    """Return the folder to upload, after checking that it is whole."""
    run = RunDir(source)
    if run.recipe_file.exists() and run.model.exists():
        run.require_model()
        return run.model
    if run.recipe_file.exists():
        for line in run.require_adapter():
            note(line)
        return run.adapter
    if not (source / "config.json").exists():
        raise CheckpointError(
            f"{source} holds no finished run and no model",
            limit="a run's adapter or model is uploaded, or what `sluice merge` wrote",
            hint="name the directory that `sluice finetune` or `sluice merge` printed",
        )
    weight_files(source)
    return source


def _files_of(folder: Path) -> list[Path]:
    names = sorted(one.name for one in folder.iterdir() if one.is_file())
    kept = (name for name in names if name != MANIFEST and not name.startswith("."))
    return [folder / name for name in sorted(kept, key=lambda name: (name != MODEL_CARD, name))]


def _addition(file: Path, repo: str) -> "CommitOperationAdd":
    """Return a file to be uploaded; a base on this machine is named by its last name alone.

    The card's example loads it from the repository.
    """
    from huggingface_hub import CommitOperationAdd

    content: str | bytes = str(file)
    if file.name == MODEL_CARD:
        content = card_at(file.read_text("utf-8"), repo).encode()
    if file.name == CONFIG_FILE:
        fields = json.loads(file.read_bytes())
        if str(fields.get(_BASE)).startswith("/"):
            fields[_BASE] = Path(fields[_BASE]).name
        content = json.dumps(fields, indent=2, ensure_ascii=False).encode() + b"\n"
    return CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=content)
