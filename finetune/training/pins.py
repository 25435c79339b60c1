"""The commits of the hub's repositories that a recipe names, asked for before anything else.

A run keeps them in its recipe, so that a resume, a rerun and all that reads the base again read the
same files. What cannot be read is refused here, before the machine is measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from finetune.data.dataset import revision_of_eval
from finetune.data.sources import hub_name
from finetune.errors import ConfigError
from finetune.hub.download import cache, fetch_description, free_in_cache, missing_weights
from finetune.hub.models import model_of, tokenizer_of
from finetune.hub.repository import (
    Listing,
    Repository,
    cached_folder,
    has_cached_weights,
    is_hub_reachable,
    look_up,
    require_reachable,
    weight_names,
)
from finetune.model.config import is_on_hub, known_folder, published_form, tokenizer_folder
from finetune.recipe.capabilities import setting
from finetune.recipe.recipe import Recipe, with_settings
from finetune.report.format import shown_gib
from finetune.training.ranks import Ranks

_NUM_SHOWN = 8  # characters of a commit


def pinned(recipe: Recipe, *, ranks: Ranks, note: Callable[[str], None]) -> Recipe:
    """Return the recipe with the commit of each repository, the same on all ranks.

    Configs and tokenizers are fetched, and no weights.

    Args:
        recipe: The recipe of the run.
        ranks: The processes that do it together.
        note: Shows a line.

    Raises:
        ConfigError: A revision is of something on this machine.
        ModelError: A model or a tokenizer cannot be read, or does not fit onto the disk.
        DataError: A data set cannot be read.
    """
    named = repositories(recipe)
    notes: list[str] = []
    commits = ranks.from_main(
        lambda: {place: _settled(one, place, notes.append) for place, one in named.items()}
    )
    for line in dict.fromkeys(notes):
        note(line)
    recipe = with_commits(recipe, {place: commits.get(place) for place in named})
    with ranks.first_here_first():
        _describe(recipe)
    return recipe


def check(recipe: Recipe, *, note: Callable[[str], None]) -> None:
    """Ask whether a model here, and a recipe's repositories on the hub, can be read.

    Nothing is fetched.

    Args:
        recipe: The recipe.
        note: Shows what was found, or that the hub cannot be reached.

    Raises:
        ConfigError: A revision is of something on this machine.
        ModelError: A model or a tokenizer cannot be read, or its weights are in a form that is not.
        DataError: A data set cannot be read.
    """
    folder = known_folder(recipe.model)
    if folder is not None and (folder / "config.json").exists() and published_form(recipe.model):
        from finetune.model.form import require_form

        require_form(recipe.model)
    named = repositories(recipe)
    if not named:
        return
    if not is_hub_reachable():
        ids = ", ".join(dict.fromkeys(one.id for one in named.values()))
        note(f"Not checked, as the hub cannot be reached: {ids}")
        return
    found: list[str] = []
    for place, one in named.items():
        listing = look_up(one)
        _require_readable(one, listing, place)
        found.append(f"{_shown(one, listing.commit)} is on the hub")
    for line in dict.fromkeys(found):
        note(line)


def repositories(recipe: Recipe) -> dict[str, Repository]:
    """Return the hub's repositories that a recipe names, by the setting of their revision.

    Raises:
        ConfigError: A revision is of something on this machine.
    """
    model = recipe.model
    found = dict[str, Repository | None]()
    if model.init == "pretrained" or model.revision is not None:
        found["model.revision"] = model_of(model) if is_on_hub(model.path) else None
    if model.tokenizer is not None and model.tokenizer != model.path:
        is_away = is_on_hub(model.tokenizer)
        found["model.tokenizer_revision"] = tokenizer_of(model) if is_away else None
    data = recipe.data
    if data.path is not None:
        found["data.revision"] = _data_set(data.path, data.revision, "data.path")
    for number, source in enumerate(data.mix):
        at = f"data.mix[{number}]"
        found[f"{at}.revision"] = _data_set(source.path, source.revision, f"{at}.path")
    if data.eval_path is not None:
        revision = revision_of_eval(data)
        found["data.eval_revision"] = _data_set(data.eval_path, revision, "data.eval_path")
    for place, one in found.items():
        if one is None and (revision := _revision(recipe, place)) is not None:
            raise ConfigError(
                f"{place}: {revision}, and what it is of is on this machine",
                limit="a revision is of a repository on the hub",
                hint=f"leave `{place}` out, or name a repository (OWNER/NAME)",
            )
    return {place: one for place, one in found.items() if one is not None}


def _data_set(path: str, revision: str | None, named_by: str) -> Repository | None:
    name = hub_name(path)
    if name is None:
        return None
    where = f"{named_by.removesuffix('path')}revision"
    return Repository(
        id=name, revision=revision, kind="dataset", setting=named_by, revision_setting=where
    )


def _revision(recipe: Recipe, place: str) -> str | None:
    """Return a revision by its place, such as `model.revision` or `data.mix[0].revision`."""
    if not place.startswith("data.mix["):
        found: str | None = setting(recipe, place)
        return found
    return recipe.data.mix[_number(place)].revision


def _number(place: str) -> int:
    return int(place.removeprefix("data.mix[").partition("]")[0])


def with_commits(recipe: Recipe, commits: Mapping[str, str | None]) -> Recipe:
    """Return the recipe with other revisions, by their places."""
    mix = list(recipe.data.mix)
    for place, commit in commits.items():
        if place.startswith("data.mix["):
            number = _number(place)
            mix[number] = mix[number].model_copy(update={"revision": commit})
        else:
            recipe = with_settings(recipe, {place: commit})
    return with_settings(recipe, {"data.mix": tuple(mix)})


def _settled(repository: Repository, place: str, note: Callable[[str], None]) -> str | None:
    """Return the commit of a repository that a run reads, and say so.

    None if it is a data set that is in the cache, of a commit that is not known there.
    """
    if repository.kind == "dataset":
        return _settled_data(repository, place, note)
    folder = cached_folder(repository)
    is_whole = place != "model.revision" or has_cached_weights(repository.id, repository.revision)
    is_open = repository.revision is None or repository.is_pinned
    if folder is not None and is_whole and (is_open or not is_hub_reachable()):
        note(f"{_shown(repository, folder.name)} is in the cache")
        return folder.name
    _require_readable(repository, look_up(repository), place)
    pinned = replace(repository, revision=fetch_description(repository))
    if place != "model.revision":
        note(f"{_shown(repository, str(pinned.revision))} was fetched")
        return pinned.revision
    missing = missing_weights(pinned)
    missing.require_room()
    note(
        f"{_shown(repository, str(pinned.revision))} is on the hub:"
        f" {shown_gib(missing.num_bytes - missing.num_kept_bytes)} of weights will be downloaded"
        f" after the plan ({shown_gib(free_in_cache())} free at {cache()})"
    )
    return pinned.revision


def _settled_data(repository: Repository, place: str, note: Callable[[str], None]) -> str | None:
    if not is_hub_reachable() and (repository.revision is None or repository.is_pinned):
        _require_known_offline(repository)
        if repository.revision is None:
            note(f"{repository.id} is read from the cache of `datasets`, which knows no commit")
        return repository.revision
    listing = look_up(repository)
    _require_readable(repository, listing, place)
    note(f"{_shown(repository, listing.commit)} is on the hub")
    return listing.commit


def _require_known_offline(repository: Repository) -> None:
    """Refuse a data set that `datasets` has not in its cache.

    Raises:
        DataError: It has not.
    """
    import datasets

    if not Path(datasets.config.HF_DATASETS_CACHE, repository.id.replace("/", "___")).is_dir():
        require_reachable(repository)


def _shown(repository: Repository, commit: str) -> str:
    name = repository.revision if repository.revision != commit else None
    of = f" of {name}" if name else ""
    return f"{repository.id} at commit {commit[:_NUM_SHOWN]}{of}"


def _require_readable(repository: Repository, listing: Listing, place: str) -> None:
    """Refuse a repository whose files are of no use.

    Raises:
        ModelError: Weights in other files than are read.
        DataError: A data set that is a program.
    """
    if place == "model.revision":
        weight_names(repository, listing)
    script = f"{repository.id.rpartition('/')[2]}.py"
    if repository.kind == "dataset" and script in listing.files:
        raise repository.error(
            f"{repository.id} makes its rows by a program of its own, {script}",
            limit="no code of a repository is run",
            hint=f"`{repository.revision_setting}: refs/convert/parquet`, which the hub makes of"
            " many such data sets; or rows in a file",
        )


def _describe(recipe: Recipe) -> None:
    """Fetch config and tokenizer where they are not in the cache.

    Raises:
        ModelError: They cannot be fetched.
    """
    model = recipe.model
    if model.init == "random":
        return
    if is_on_hub(model.path) and cached_folder(model_of(model)) is None:
        fetch_description(model_of(model))
    if model.tokenizer_source is not None:
        tokenizer_folder(model)
