"""A repository of the hub: which commit of it is read, what that holds, and what is in the cache.

Everything that a run reads of a repository is of one commit. What the hub's client says when it
refuses is put into words here, each with what to do about it.
"""

import contextlib
import functools
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from finetune.env import has_proxy, is_offline
from finetune.errors import DataError, FinetuneError, ModelError
from finetune.files.shards import INDEX, SINGLE, read_weight_map

_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 3.0, 15.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_NAMED = 8

# ---------------------------------------------------------------------------------------------
# What is on this machine


def cached_file(hub_id: str, name: str, revision: str | None = None) -> Path | None:
    """Return a file of a model's repository from the local cache, or None.

    Args:
        hub_id: The name of the repository.
        name: The name of the file.
        revision: A branch, tag or commit; None for the main branch as it was last fetched.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        found = try_to_load_from_cache(hub_id, name, revision=revision)
        if isinstance(found, str):
            return Path(found)
    return None


def cached_folder(repository: "Repository") -> Path | None:
    """Return the folder of a commit's files in the cache; None if there is none."""
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        found = cached_file(repository.id, name, repository.revision)
        if found is not None:
            return found.parent
    return None


def has_cached_weights(hub_id: str, revision: str | None) -> bool:
    """Return whether the cache has all weights of a model."""
    if cached_file(hub_id, SINGLE, revision) is not None:
        return True
    index = cached_file(hub_id, INDEX, revision)
    return index is not None and all(
        cached_file(hub_id, name, revision) is not None for name in read_weight_map(index).values()
    )


def is_hub_reachable() -> bool:
    """Return within seconds whether the hub answers; its client would retry for half a minute."""
    from huggingface_hub import constants

    if is_offline():
        return False
    if has_proxy():
        return True
    host = urlsplit(constants.ENDPOINT)
    port = host.port or (80 if host.scheme == "http" else 443)
    try:
        socket.create_connection((host.hostname or "", port), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def why_unreachable() -> str:
    """Return why the hub is not asked, in words."""
    from huggingface_hub import constants

    if is_offline():
        return "HF_HUB_OFFLINE forbids the hub"
    return f"the hub ({constants.ENDPOINT}) cannot be reached"


# ---------------------------------------------------------------------------------------------
# A repository, and what the hub says of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A repository that a recipe names."""

    id: str  # the owner and the name
    revision: str | None  # a branch, a tag or a commit; None is the main branch
    kind: Literal["model", "dataset"]
    setting: str  # the setting that names it
    revision_setting: str  # the setting of the revision

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a whole commit, which never changes."""
        return is_commit(self.revision)

    @property
    def page(self) -> str:
        """The address of its page."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' * (self.kind == 'dataset')}{self.id}"

    def error(self, what: str, *, limit: str = "", hint: str) -> FinetuneError:
        """Return the error that something is wrong with it."""
        kind = ModelError if self.kind == "model" else DataError
        return kind(f"{self.setting}: {what}", limit=limit, hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of a repository."""

    num_bytes: int  # its size
    digest: str  # of its content, by which the cache names it


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What a commit of a repository holds."""

    commit: str  # its hash
    files: Mapping[str, File]  # by their names
    made_from: str | None  # the model that it was made from, by its card


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is the whole hash of a commit."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


@functools.cache
def look_up(repository: Repository) -> Listing:
    """Ask the hub what a repository holds, and whether this machine may read it.

    Answers are kept: all runs of a process read one commit.

    Raises:
        ModelError: It is missing, private or gated, or the hub cannot be reached; of a model.
        DataError: The same of a data set.
    """
    require_reachable(repository)
    from huggingface_hub import HfApi

    with refusals(repository):
        info: Any = HfApi().repo_info(
            repository.id,
            revision=repository.revision,
            repo_type=repository.kind,
            files_metadata=repository.kind == "model",
            timeout=_ANSWER_TIMEOUT_S,
        )
        if info.gated:
            HfApi().auth_check(repository.id, repo_type=repository.kind)
    bases = (info.card_data or {}).get("base_model")
    return Listing(
        commit=info.sha,
        files={
            one.rfilename: File(
                num_bytes=one.size or 0, digest=one.lfs.sha256 if one.lfs else one.blob_id or ""
            )
            for one in info.siblings or ()
        },
        made_from=bases[0] if isinstance(bases, list) and bases else bases or None,
    )


def first_remedy() -> str:
    """Return what to do first where the hub cannot be asked."""
    return "`unset HF_HUB_OFFLINE`" if is_offline() else "check the network"


def require_reachable(repository: Repository) -> None:
    """Refuse a repository that must be asked for, where the hub cannot be.

    Raises:
        ModelError: It cannot; of a model.
        DataError: The same of a data set.
    """
    if is_hub_reachable():
        return
    repo, revision = repository.id, repository.revision
    fetch = f"hf download {repo}{f' --revision {revision}' if revision else ''}"
    fetch += " --repo-type dataset" if repository.kind == "dataset" else ""
    at = f" at {repository.revision_setting}: {revision}" if revision else ""
    raise repository.error(
        f"{repo}{at} is no local directory and not whole in the cache",
        limit=why_unreachable(),
        hint=f"{first_remedy()}; or `{fetch} --local-dir DIR` where there is a network, and"
        f" `{repository.setting}: DIR`",
    )


def not_here(repository: Repository) -> FinetuneError:
    """Return the error that a repository is not in the cache, where the hub is not asked."""
    at = f" --revision {repository.revision}" if repository.revision else ""
    return repository.error(
        f"{repository.id} is no local directory and not in the cache",
        limit="its files are read from this machine",
        hint=f"`hf download {repository.id}{at}`",
    )


@contextlib.contextmanager
def refusals(repository: Repository) -> Iterator[None]:
    """Put what the hub's client raises about a repository into words.

    Raises:
        ModelError: It is missing, private or gated, or the hub fails; of a model.
        DataError: The same of a data set.
    """
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (http_error(), HFValidationError, LocalEntryNotFoundError) as error:
        raise _refusal(repository, error) from error


def http_error() -> type[Exception]:
    """Return the base of what the hub's client raises: of the HTTP library of its version."""
    from huggingface_hub import errors

    found: type[Exception] = vars(errors)["HTTPError"]
    return found


def _refusal(repository: Repository, error: Exception) -> FinetuneError:
    """Return the error that a user is shown for one of the hub's client."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo = repository.id
    if isinstance(error, GatedRepoError):  # which is also one of the next
        return _gated(repository)
    if isinstance(error, RepositoryNotFoundError):
        return _missing(repository)
    if isinstance(error, RevisionNotFoundError):
        return _without_revision(repository)
    if isinstance(error, HFValidationError):
        return repository.error(
            f"{repo} is no directory and no id of the hub",
            hint=f"`{repository.setting}: OWNER/NAME`, or the path of a directory",
        )
    if not isinstance(error, HfHubHTTPError):
        return repository.error(
            f"the hub ({constants.ENDPOINT}) stopped answering about {repo}"
            f" ({type(error).__name__})",
            hint="check the network, and start again",
        )
    if error.response.status_code == HTTPStatus.UNAUTHORIZED:
        return repository.error(
            f"the hub does not know the token of this machine, so it does not give {repo}",
            hint="`hf auth login` with a new token, or `unset HF_TOKEN`",
        )
    if error.response.status_code == HTTPStatus.FORBIDDEN:
        return repository.error(
            f"the token of this machine may not do that with {repo}",
            limit="a token reads or writes, and some are for one owner's repositories",
            hint="`hf auth login` with a token that may (https://huggingface.co/settings/tokens)",
        )
    return repository.error(
        f"the hub ({constants.ENDPOINT}) answers {error.response.status_code} for {repo}",
        hint="start again later; https://status.huggingface.co shows whether it is down",
    )


def _gated(repository: Repository) -> FinetuneError:
    from huggingface_hub import get_token

    if get_token() is None:
        return repository.error(
            f"{repository.id} is gated, and this machine has no token",
            limit="it is given to accounts that have accepted its terms",
            hint=f"accept them at {repository.page}, then `hf auth login`",
        )
    return repository.error(
        f"{repository.id} is gated, and not given to the account of this machine's token",
        limit="it is given to accounts that have accepted its terms, of some after a review",
        hint=f"accept them at {repository.page} as the account that `hf auth whoami` shows",
    )


def _missing(repository: Repository) -> FinetuneError:
    from huggingface_hub import get_token

    kind = "data set" if repository.kind == "dataset" else "model"
    what = f"{repository.id} is no directory here, and the hub has no such {kind}, or it is private"
    if get_token() is None:
        return repository.error(
            f"{what}: this machine has no token",
            hint=f"check the name at {repository.page}; `hf auth login` for a private one",
        )
    return repository.error(
        f"{what} and not shared with the account of this machine's token",
        hint=f"check the name at {repository.page}, and the account by `hf auth whoami`",
    )


def _without_revision(repository: Repository) -> FinetuneError:
    from huggingface_hub import HfApi

    with refusals(repository):
        refs = HfApi().list_repo_refs(repository.id, repo_type=repository.kind)
    names = [one.name for one in (*refs.branches, *refs.tags)]
    more = ", ..." if len(names) > _NUM_NAMED else ""
    return repository.error(
        f"{repository.id} has no branch, tag or commit {repository.revision}",
        limit=f"it has {', '.join(names[:_NUM_NAMED])}{more}",
        hint=f"`{repository.revision_setting}: {(*names, 'main')[0]}`, or a commit of"
        f" {repository.page}/commits/main",
    )


# ---------------------------------------------------------------------------------------------
# Files of weights


def weight_names(repository: Repository, listing: Listing) -> list[str]:
    """Return the files of a model's weights that can be known before anything is fetched.

    That is the only one, or the index that names the others.

    Raises:
        ModelError: Its weights are in files that are not read.
    """
    for name in (SINGLE, INDEX):
        if name in listing.files:
            return [name]
    raise unreadable_weights(
        listing.files,
        what=f"{repository.setting}: {repository.id}",
        source=repository.id,
        made_from=listing.made_from,
    )


def unreadable_weights(
    names: Collection[str], *, what: str, source: str, made_from: str | None = None
) -> ModelError:
    """Return the error that a model has no weights in safetensors files.

    Args:
        names: The files that it has.
        what: The beginning of the message: the setting and the model.
        source: The model, for transformers.
        made_from: The model that it was made from, if that is known.
    """
    limit = "weights are read from safetensors files"
    base = f"`model.path: {made_from}`, which" if made_from else "`model.path` of the model that"
    if "adapter_config.json" in names:
        return ModelError(
            f"{what} is an adapter, and no model",
            limit="an adapter trains on the weights of its base",
            hint=f"{base} it was trained on; `adapter.init_from: DIR` goes on from an adapter",
        )
    if any(name.endswith(".gguf") for name in names):
        return ModelError(
            f"{what} holds GGUF files, which were packed for llama.cpp",
            limit=limit,
            hint=f"{base} they were made from",
        )
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if pickled:
        return ModelError(
            f"{what} has its weights in pickle files alone ({pickled[0]})",
            limit=f"{limit}: a pickle file can run code",
            hint='write it once as safetensors, `python -c "from transformers import'
            " AutoModelForCausalLM as M, AutoTokenizer as T;"
            f" [k.from_pretrained('{source}').save_pretrained('DIR') for k in (M, T)]\"`, then"
            " `model.path: DIR`",
        )
    return ModelError(
        f"{what} holds no *.safetensors",
        limit=limit,
        hint="name another model, or `model.init: random` for measurements",
    )
