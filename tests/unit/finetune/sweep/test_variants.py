from pathlib import Path

import pytest

from finetune.errors import ConfigError
from finetune.recipe.grid import values_of
from finetune.sweep.variants import recipes_together, variants_of


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,2e-4", ["1e-4", "2e-4"]),
        ("[q_proj,v_proj],[k_proj]", ["[q_proj,v_proj]", "[k_proj]"]),
        ("{q_proj: 2, k_proj: 4}", ["{q_proj: 2, k_proj: 4}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("8", ["8"]),
    ],
)
def test_values_are_split_at_commas_that_are_in_no_list(text: str, values: list[str]) -> None:
    assert values_of(text) == values


def test_a_grid_has_a_run_for_each_combination() -> None:
    words = ["train.lr=1e-3,2e-3", "adapter.rank=4,8,16", "train.steps=50"]
    found = variants_of("quickstart", words, is_zipped=False, max_runs=64)
    pairs = [(run.recipe.train.lr, run.recipe.adapter.rank) for run in found.runs]
    assert pairs == [(lr, rank) for lr in (1e-3, 2e-3) for rank in (4, 8, 16)]
    assert all(run.recipe.train.steps == 50 for run in found.runs)
    assert [run.name for run in found.runs][:2] == ["lr-1e-3_rank-4", "lr-1e-3_rank-8"]
    assert found.folder == Path("runs/quickstart-sweep")
    assert found.runs[0].recipe.output.run_dir == found.folder / "lr-1e-3_rank-4"
    assert len({run.recipe.output.name for run in found.runs}) == 6


def test_zipped_values_are_taken_in_step() -> None:
    words = ["train.lr=1e-3,2e-3", "adapter.rank=4,8"]
    found = variants_of("quickstart", words, is_zipped=True, max_runs=64)
    pairs = [(run.recipe.train.lr, run.recipe.adapter.rank) for run in found.runs]
    assert pairs == [(1e-3, 4), (2e-3, 8)]


def test_a_list_is_part_of_a_name_without_its_brackets() -> None:
    words = ["adapter.targets=[q_proj],[q_proj,k_proj],attention"]
    found = variants_of("quickstart", words, is_zipped=False, max_runs=64)
    names = [run.name for run in found.runs]
    assert names == ["targets-q-proj", "targets-q-proj-k-proj", "targets-attention"]


def test_a_file_names_its_variants(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "recipe: quickstart\n"
        "variants:\n"
        "  slow: {train.lr: 1e-3}\n"
        "  small: {adapter.rank: 2, adapter.targets: [q_proj]}\n"
        "stop: {worse_than_best_by: 0.5, after_steps: 40}\n"
    )
    found = variants_of(str(file), ["train.steps=70"], is_zipped=False, max_runs=64)
    assert [run.name for run in found.runs] == ["slow", "small"]
    assert found.runs[0].recipe.train.lr == 1e-3
    assert found.runs[1].recipe.adapter.targets == ("q_proj",)
    assert all(run.recipe.train.steps == 70 for run in found.runs)
    assert found.stop is not None
    assert (found.stop.worse_than_best_by, found.stop.after_steps) == (0.5, 40)


@pytest.mark.parametrize(
    ("words", "is_zipped", "match"),
    [
        (["train.steps=3"], False, "no setting of train.steps=3 has several values"),
        (["train.lr=1e-3,0.001"], False, "lr-1e-3 and lr-0.001 are equal"),
        (["train.lr=1e-3,2e-3", "adapter.rank=1,2,3"], True, "2 values of train.lr, 3 values of"),
        (["train.lr=1e-3,,2e-3"], False, "train.lr=1e-3,,2e-3 has an empty value"),
        (["train.lr=1e-3,2e-3", "train.lr=1,2"], False, "train.lr is given a second time"),
        (["train.seed=" + ",".join(map(str, range(9)))], False, "the sweep has 9 runs"),
        (["train.larning=1,2"], False, "train.larning"),
        (["output.name=a,b"], False, "output.name differs between the runs"),
        (["train.lr=1e-3,2e-3", "stop.after_steps=4"], False, "stop is {'after_steps': 4}"),
    ],
)
def test_what_is_no_sweep_is_refused(words: list[str], is_zipped: bool, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        variants_of("quickstart", words, is_zipped=is_zipped, max_runs=8)


def test_a_recipe_that_is_not_there_is_told_before_what_a_sweep_is() -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe nowhere\.yaml"):
        variants_of("nowhere.yaml", [], is_zipped=False, max_runs=8)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("recipe: quickstart\nvariants: {a b: {train.lr: 1}}\n", "a variant is named 'a b'"),
        ("recipe: quickstart\nvariants: {}\n", "it is no sweep"),
        ("recipe: quickstart\nvariants: {a: {}}\nstopp: 1\n", "stopp is not known"),
        ("recipe: quickstart\nvariants: {a: {train.rate: 1}}\n", "train.rate"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        variants_of(str(file), [], is_zipped=False, max_runs=8)


def test_recipes_with_one_name_or_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="quickstart and quickstart are both to be written to"):
        recipes_together(["quickstart", "quickstart"], [])
