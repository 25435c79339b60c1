"""What is asked of the hub before a run: commits, and what cannot be read, in words."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import ConfigError, DataError, ModelError
from finetune.files.shards import SINGLE
from finetune.recipe.recipe import Recipe, with_settings
from finetune.run.run_dir import as_begun
from finetune.training.pins import check, pinned, repositories
from finetune.training.preflight import other_base, reads_hub, require_tokenizer, require_weights
from finetune.training.ranks import Ranks
from tests.hub import Hub, ask, commit_of, hub

MIB = 2**20
DATA = {"path": "own/rows"}
QWEN3 = json.dumps({"model_type": "qwen3"})


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub(tmp_path / "hub") as one:
        write(one, "own/model", {SINGLE: MIB, "config.json": QWEN3, "tokenizer.json": "{}"})
        write(one, "datasets/own/rows", {"train.jsonl": "{}"})
        ask(one, monkeypatch)
        yield one


def write(served: Hub, repo: str, files: dict[str, int | str]) -> Path:
    """Write a repository: texts, and files of so many zeros."""
    folder = served.folder / repo
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else bytes(content)
        (folder / name).write_bytes(data)
    return folder


def recipe_of(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": "own/model"} | (model or {}),
            "data": data or DATA,
            "train": {"steps": 1, "grad_accum_steps": 1},
            "output": {"name": "small"},
        }
    )


def pin(recipe: Recipe) -> tuple[Recipe, list[str]]:
    notes: list[str] = []
    require_weights(recipe.model)
    recipe = pinned(recipe, ranks=Ranks(), note=notes.append)
    require_tokenizer(recipe.model)
    return recipe, notes


HERE = {"config": "tiny-qwen3", "init": "random", "path": None}
ROWS_HERE = {"path": "rows.jsonl"}


@pytest.mark.parametrize(
    ("model", "data", "place"),
    [
        (None, ROWS_HERE, "model.revision"),
        ({**HERE, "tokenizer": "own/model"}, ROWS_HERE, "model.tokenizer_revision"),
        (HERE, DATA, "data.revision"),
        (HERE, {**ROWS_HERE, "eval_path": "own/rows"}, "data.eval_revision"),
        (HERE, {"mix": [ROWS_HERE | {"weight": 1}, DATA | {"weight": 1}]}, "data.mix[1].revision"),
        (HERE, ROWS_HERE, None),
    ],
)
def test_what_is_pinned_is_what_a_run_asks_the_hub_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, data: Any, place: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("")
    recipe = recipe_of(model, data)
    assert list(repositories(recipe)) == ([] if place is None else [place])
    assert reads_hub(recipe) is (place is not None)
    where = place or "data.revision"
    if not where.startswith("data.mix"):  # a revision of what is here is refused, and not ignored
        local = recipe_of(HERE, ROWS_HERE | {"eval_path": "rows.jsonl"})
        assert reads_hub(with_settings(local, {where: "main"}))


def test_a_run_keeps_the_commits_of_model_and_rows(served: Hub) -> None:
    recipe, notes = pin(recipe_of())
    model, rows = (commit_of(served.folder / repo) for repo in ("own/model", "datasets/own/rows"))
    assert (recipe.model.revision, recipe.data.revision) == (model, rows)
    assert notes[0].startswith(
        f"own/model at commit {model[:8]} is on the hub: 1.0 MiB of weights will be downloaded"
        " after the plan ("
    )
    assert notes[1] == f"own/rows at commit {rows[:8]} is on the hub"
    assert SINGLE not in served.asked, "the plan comes first"
    again, _ = pin(recipe)
    assert again == recipe


def test_a_branch_that_has_moved_is_read_where_the_run_began(served: Hub) -> None:
    begun, _ = pin(recipe_of())
    (served.folder / "own" / "model").rename(served.folder / "own" / "model@old")
    write(served, "own/model", {SINGLE: 2 * MIB, "config.json": QWEN3, "tokenizer.json": "{}"})
    resumed, _ = pin(as_begun(recipe_of(), begun))
    assert resumed == begun
    newest, _ = pin(recipe_of({"revision": "main"}))
    assert newest.model.revision == commit_of(served.folder / "own" / "model")
    old, notes = pin(recipe_of({"revision": "old"}))
    assert old.model.revision == begun.model.revision
    assert " of old is on the hub: " in notes[0]


def test_each_source_of_a_mix_and_held_out_rows_have_a_revision(served: Hub) -> None:
    old = write(served, "datasets/own/rows@v1", {"train.jsonl": "{ }"})
    other = write(served, "datasets/own/more", {"train.jsonl": "{}"})
    mix = [{"path": "own/rows", "revision": "v1"}, {"path": "own/more"}]
    recipe, _ = pin(recipe_of(data={"mix": mix, "eval_path": "own/rows:test"}))
    newest = commit_of(served.folder / "datasets" / "own" / "rows")
    assert [one.revision for one in recipe.data.mix] == [commit_of(old), commit_of(other)]
    assert recipe.data.eval_revision == newest
    both = {"path": "own/rows:train", "revision": "v1", "eval_path": "own/rows:test"}
    recipe, _ = pin(recipe_of(data=both))
    assert (recipe.data.revision, recipe.data.eval_revision) == (commit_of(old),) * 2


def test_a_tokenizer_of_another_repository_has_a_revision(served: Hub) -> None:
    tokenizer = write(served, "own/tokens", {"tokenizer.json": "{}"})
    recipe, _ = pin(recipe_of({"tokenizer": "own/tokens"}))
    assert recipe.model.tokenizer_revision == commit_of(tokenizer)
    recipe, _ = pin(recipe_of({"tokenizer": "own/model"}))
    assert recipe.model.tokenizer_revision is None, "it is the model's"


def test_a_model_that_is_in_the_cache_needs_no_hub(served: Hub, monkeypatch) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("own/model")
    served.asked.clear()
    local = {"path": str(write(served, "rows", {"a.jsonl": "{}"}))}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe, (note,) = pin(recipe_of(data=local))
    commit = commit_of(served.folder / "own" / "model")
    assert recipe.model.revision == commit
    assert note == f"own/model at commit {commit[:8]} is in the cache"
    assert served.asked == []
    with pytest.raises(ModelError, match=r"own/model at model\.revision: v9 is no .* in the cache"):
        pin(recipe_of({"revision": "v9"}, local))
    with pytest.raises(DataError, match=r"data\.path: own/rows is no local .*; HF_HUB_OFFLINE"):
        pin(recipe_of())


def _gated(served: Hub) -> None:
    (served.folder / "own" / "model" / ".gated").touch()


def _private(served: Hub) -> None:
    (served.folder / "own" / "model" / ".private").touch()


def _without_weights(**files: int | str) -> Callable[[Hub], None]:
    def change(served: Hub) -> None:
        (served.folder / "own" / "model" / SINGLE).unlink()
        write(served, "own/model", files)

    return change


def _made_from(served: Hub) -> None:
    _without_weights(**{"model-Q4_K_M.gguf": MIB})(served)
    write(served, "own/model", {".card.json": json.dumps({"base_model": ["own/base"]})})


def _with_code(served: Hub) -> None:
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    write(served, "own/model", {"tokenizer_config.json": json.dumps(settings)})


def _nothing(served: Hub) -> None:
    del served


REFUSED: dict[str, tuple[Callable[[Hub], None], dict[str, Any], str | None, str, str]] = {
    "gated, without a token": (
        *(_gated, {}, None),
        "model.path: own/model is gated, and this machine has no token",
        "accept them at {hub}/own/model, then `hf auth login`",
    ),
    "gated, for others": (
        *(_gated, {}, "writer"),
        "model.path: own/model is gated, and not given to the account of this machine's token",
        "accept them at {hub}/own/model as the account that `hf auth whoami` shows",
    ),
    "private, without a token": (
        *(_private, {}, None),
        "model.path: own/model is no directory here, and the hub has no such model, or it is"
        " private: this machine has no token",
        "check the name at {hub}/own/model; `hf auth login` for a private one",
    ),
    "private, for others": (
        *(_private, {}, "writer"),
        "model.path: own/model is no directory here, and the hub has no such model, or it is"
        " private and not shared with the account of this machine's token",
        "check the name at {hub}/own/model, and the account by `hf auth whoami`",
    ),
    "a token that is not known": (
        *(_nothing, {}, "expired"),
        "model.path: the hub does not know the token of this machine, so it does not give"
        " own/model",
        "`hf auth login` with a new token, or `unset HF_TOKEN`",
    ),
    "missing": (
        *(_nothing, {"path": "own/nothing"}, None),
        "model.path: own/nothing is no directory here, and the hub has no such model, or it is"
        " private: this machine has no token",
        "check the name at {hub}/own/nothing; `hf auth login` for a private one",
    ),
    "no id": (
        *(_nothing, {"path": "no such id!"}, None),
        "model.path: no such id! is no directory and no id of the hub",
        "`model.path: OWNER/NAME`, or the path of a directory",
    ),
    "a missing revision": (
        *(_nothing, {"revision": "v2"}, None),
        "model.path: own/model has no branch, tag or commit v2",
        "`model.revision: main`, or a commit of {hub}/own/model/commits/main",
    ),
    "GGUF files": (
        *(_made_from, {}, None),
        "model.path: own/model holds GGUF files, which were packed for llama.cpp",
        "`model.path: own/base`, which they were made from",
    ),
    "pickle files": (
        *(_without_weights(**{"pytorch_model.bin": MIB}), {}, None),
        "model.path: own/model has its weights in pickle files alone (pytorch_model.bin)",
        'write it once as safetensors, `python -c "from transformers import',
    ),
    "an adapter": (
        *(_without_weights(**{"adapter_config.json": "{}"}), {}, None),
        "model.path: own/model is an adapter, and no model",
        "`model.path` of the model that it was trained on",
    ),
    "nothing": (
        *(_without_weights(), {}, None),
        "model.path: own/model holds no *.safetensors",
        "name another model, or `model.init: random` for measurements",
    ),
    "a tokenizer of code": (
        *(_with_code, {}, None),
        "the tokenizer in own/model asks for code of its own repository (",
        "`model.tokenizer` of a model with the same vocabulary and a tokenizer.json",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_its_own_words(
    served: Hub, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    change, model, token, what, hint = REFUSED[case]
    change(served)
    ask(served, monkeypatch, token=token)
    with pytest.raises(ModelError) as error:
        pin(recipe_of(model))
    assert error.value.what.startswith(what)
    assert hint.format(hub=served.variables["HF_ENDPOINT"]) in error.value.hint
    assert SINGLE not in served.asked


def test_what_is_given_to_a_member_is_read(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    _gated(served)
    _private(served)
    ask(served, monkeypatch, token="member")
    recipe, _ = pin(recipe_of())
    assert recipe.model.revision == commit_of(served.folder / "own" / "model")


def test_a_missing_revision_names_those_that_there_are(served: Hub) -> None:
    write(served, "own/model@v1", {SINGLE: MIB})
    with pytest.raises(ModelError) as error:
        pin(recipe_of({"revision": "v2"}))
    assert error.value.limit == "it has main, v1"


def test_a_data_set_is_refused_in_the_same_words(served: Hub) -> None:
    with pytest.raises(DataError, match=r"data\.path: own/none is no directory here, and the hub"):
        pin(recipe_of(data={"path": "own/none#config:train"}))
    with pytest.raises(DataError) as error:
        pin(recipe_of(data={"path": "own/rows", "revision": "v3"}))
    assert error.value.hint.startswith("`data.revision: main`, or a commit of ")
    write(served, "datasets/own/rows", {"rows.py": "print()"})
    with pytest.raises(DataError) as error:
        pin(recipe_of(data={"path": "own/rows", "revision": "main"}))
    assert error.value.what == "data.path: own/rows makes its rows by a program of its own, rows.py"
    assert error.value.hint.startswith("`data.revision: refs/convert/parquet`")


def test_a_revision_of_something_on_this_machine_is_refused(served: Hub, tmp_path: Path) -> None:
    path = str(write(served, "own/model", {}))
    with pytest.raises(ConfigError, match=r"model\.revision: v1, and what it is of is on this mac"):
        pin(recipe_of({"path": path, "revision": "v1"}))


def test_a_directory_is_refused_in_the_same_words(served: Hub) -> None:
    folder = write(served, "local", {"model.gguf": 8})
    with pytest.raises(ModelError, match=rf"model\.path: {folder} holds GGUF files"):
        pin(recipe_of({"path": str(folder)}))


def test_a_hub_that_stops_answering_is_named(served: Hub, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("finetune.hub.repository.is_hub_reachable", lambda: True)
    with pytest.raises(ModelError, match=r"the hub \(.*:9\) stopped answering about own/model \(C"):
        pin(recipe_of())


def test_where_there_is_no_network_it_is_said(served: Hub, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError) as error:
        pin(recipe_of())
    assert error.value.limit == "the hub (http://127.0.0.1:9) cannot be reached"
    assert "`hf download own/model --local-dir DIR`" in error.value.hint


def test_an_adapter_of_another_commit_is_named(served: Hub) -> None:
    recipe, _ = pin(recipe_of())
    commit = recipe.model.revision
    assert other_base("It was trained", recipe.model, "own/model", commit) == ()
    assert other_base("It was trained", recipe.model, "own/model", None) == ()
    (note,) = other_base("It was trained", recipe.model, "own/model", "0" * 40)
    assert note.startswith(f"It was trained on own/model at commit {'0' * 40}, and this is at ")
    assert note.endswith(f"{commit}: `model.revision: {'0' * 40}` is the same")


def test_validate_asks_and_fetches_nothing(served: Hub, monkeypatch) -> None:
    notes: list[str] = []
    check(recipe_of(), note=notes.append)
    commit = commit_of(served.folder / "own" / "model")
    assert notes[0] == f"own/model at commit {commit[:8]} is on the hub"
    assert served.asked == []
    with pytest.raises(ModelError, match="no branch, tag or commit v2"):
        check(recipe_of({"revision": "v2"}), note=notes.append)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check(recipe_of(), note=notes.append)
    assert notes[-1] == "Not checked, as the hub cannot be reached: own/model, own/rows"
