"""A recipe as it was written: YAML with line numbers, and the command line over it."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finetune.errors import ConfigError
from finetune.recipe.load import load_recipe, read_draft
from tests.unit.finetune.recipe.written import VALID, assert_refused, refusal, replaced, write

# ---------------------------------------------------------------------------------------------
# YAML


def test_a_key_written_twice_is_refused_with_both_lines(folder: Path) -> None:
    assert_refused(
        replaced("  steps: 10", "  steps: 10\n  seq_len: 64"),
        what="r.yaml:11: train.seq_len is written a second time",
        limit="a key is written once, and this one is at r.yaml:8",
        hint="remove one of the two",
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "r.yaml:1: the file is empty"),
        ("# only a comment\n", "r.yaml:1: the file is empty"),
        ("- a\n- b\n", "r.yaml:1: the file holds a list"),
        ("hello", "r.yaml:1: the file holds a single value"),
        ("model:\n  path: [a\n", "r.yaml:3: expected ',' or ']', but got '<stream end>'"),
        ("model:\n\tpath: a\n", "r.yaml:2: found character '\\t'"),
        ("a: &x 1\nb: *x\n", "r.yaml:2: aliases are not read in recipes"),
        ("a: &x [*x]\n", "r.yaml:1: aliases are not read in recipes"),
        ("a: " + "[" * 5000, "r.yaml:1: it is nested too deeply"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2: but found another document"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(folder: Path, text: str, what: str) -> None:
    error = refusal(write(text))
    assert error.what.startswith(what)
    assert error.limit == "a recipe is YAML: sections such as `train:`, with settings below them"
    assert error.hint == "`sluice recipes show quickstart` prints one to start from"


def test_a_file_that_is_not_text_is_refused(folder: Path) -> None:
    Path("r.yaml").write_bytes(b"\xff\xfe\x00model")
    assert refusal("r.yaml").what == "r.yaml cannot be read: it is not UTF-8 text"


def test_a_tagged_value_is_refused_and_not_built(folder: Path) -> None:
    error = refusal(replaced("rank: 8", "rank: !!python/object:os.system 8"))
    what = "r.yaml:4: adapter.rank is 8, which cannot be read as tag:yaml.org,2002:python/object"
    assert what in str(error)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("train:", "train: !mine", "r.yaml:7: train is tagged !mine"),
        ("rank: 8", "targets: !!set {a, b}", "adapter.targets is tagged tag:yaml.org,2002:set"),
        ("train:", "!!python/name:os.system train:", "a key is a list, a mapping or tagged"),
        ("steps: 10", "steps: !!bool x", "train.steps is x, which cannot be read as tag:yaml.org"),
    ],
)
def test_a_tag_is_refused_wherever_it_is(old: str, new: str, what: str, folder: Path) -> None:
    assert what in str(refusal(replaced(old, new)))


def test_a_recipe_too_large_to_be_one_is_not_read(folder: Path) -> None:
    """10 MB of a recipe took minutes to be read (#16)."""
    error = refusal(write(VALID + "#" * 10_000_000))
    assert error.what.startswith("r.yaml cannot be read: it has 10,000,")
    assert error.limit == "a recipe is a file of at most 100,000 bytes"


@pytest.mark.thorough
def test_of_very_many_problems_the_first_are_shown(folder: Path) -> None:
    error = refusal(write("".join(f"k{i}: {i}\n" for i in range(500))))
    assert "problems in the recipe, of which these are 20" in error.what
    assert len(str(error)) < 15_000


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".0001", "+1e-4"])
def test_a_number_with_an_exponent_is_a_number_in_file_and_override(
    folder: Path, text: str
) -> None:
    from_file = load_recipe(replaced("steps: 10", f"steps: 10\n  lr: {text}"), [])
    from_override = load_recipe(write(VALID), [f"train.lr={text}"])
    assert from_file.train.lr == from_override.train.lr == 1e-4


@pytest.mark.parametrize("text", ["no", "on", "12:30", "2024-01-01", "0x1f", "012", "1_000"])
def test_what_only_yaml_1_1_reads_as_something_else_is_text(text: str) -> None:
    assert read_draft("r", f"a: {text}").values == {"a": text}


@pytest.mark.thorough
@given(st.text(max_size=200))
def test_any_text_is_a_draft_or_a_named_refusal(text: str) -> None:
    try:
        draft = read_draft("r.yaml", text)
    except ConfigError as error:
        assert error.what.startswith("r.yaml:")  # noqa: PT017 - either outcome is right
    else:
        assert isinstance(draft.values, dict)


KEYS = ["model", "train", "trian", "steps", "lr", "lr.x", "data", "path", "report", "", "1"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@pytest.mark.thorough
@given(values=st.dictionaries(st.sampled_from(KEYS), VALUES), override=VALUES)
@example(values={"model": {"path": "~0"}}, override=None)  # nobody's home
@example(values={"model": {"config": "a/\ud800.json"}}, override=None)  # half a character
def test_any_settings_are_a_recipe_or_a_named_refusal(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object], override: object
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    error = refusal(str(file), f"train.lr={json.dumps(override)}", "output.name=.")
    assert "any.yaml:1: " in str(error)
    assert 'output.name=.: output.name is "."' in str(error)


# ---------------------------------------------------------------------------------------------
# Overrides


def test_an_override_goes_before_the_file_and_the_file_before_the_default(folder: Path) -> None:
    source = write(VALID)
    assert load_recipe(source, ["adapter.rank=4"]).adapter.rank == 4
    assert load_recipe(source, []).adapter.rank == 8
    assert load_recipe(replaced("  rank: 8", "  alpha: 1"), []).adapter.rank == 16


def test_a_whole_recipe_can_stand_on_the_command_line(folder: Path) -> None:
    settings = [
        "model.path=Qwen/Qwen3-0.6B",
        "data.path=openai/gsm8k",
        "train.grad_accum_steps=4",
        "train.steps=10",
        "output.name=small",
    ]
    assert load_recipe(write("{}"), settings).train.steps == 10


def test_the_values_of_overrides_are_yaml(folder: Path) -> None:
    recipe = load_recipe(
        write(VALID),
        [
            "adapter.targets=[q_proj, v_proj]",
            "adapter.experts=true",
            "train.max_grad_norm=null",
            "data.system='Be brief: a=b'",
            "output.dir=",
        ],
    )
    assert recipe.adapter.targets == ("q_proj", "v_proj")
    assert recipe.adapter.experts is True
    assert recipe.train.max_grad_norm is None
    assert recipe.data.system == "Be brief: a=b"
    assert recipe.output.dir is None


def test_an_override_of_one_rival_replaces_the_other_of_the_file(folder: Path) -> None:
    recipe = load_recipe(write(VALID), ["train.epochs=2", "train.tokens_per_step=2048"])
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2.0)
    assert recipe.train.grad_accum_steps is None
    assert recipe.train.num_micro_batches == 4


def test_two_rivals_on_the_command_line_are_refused(folder: Path) -> None:
    error = refusal(write(VALID), "train.epochs=2", "train.steps=3")
    assert error.what == "command line: train.epochs=2: train.epochs is 2.0 and train.steps is 3"


@pytest.mark.parametrize("override", ["train.lr", "lr=1", "=1", "train.=1", ".lr=1", ""])
def test_an_override_that_names_no_setting_is_refused(folder: Path, override: str) -> None:
    assert_refused(
        write(VALID),
        override,
        what=f"command line: {override}: {override} does not name a setting and its value",
        limit="a setting is section.field=value",
        hint="`train.lr=1e-4`",
    )


def test_an_override_with_a_wrong_value_names_the_command_line(folder: Path) -> None:
    assert_refused(
        write(VALID),
        "train.lr=-1",
        what="command line: train.lr=-1: train.lr is -1",
        limit="it must be a number above 0 and of at most 1",
        hint="`train.lr=0.0002`",
    )


def test_an_override_with_a_misspelt_key_names_its_neighbour(folder: Path) -> None:
    assert_refused(
        write(VALID),
        "tran.lr=1e-3",
        what="command line: tran.lr=1e-3: tran is not a setting",
        limit="the nearest is train",
        hint="`train.lr=0.001`",
    )


def test_an_override_that_is_not_yaml_is_refused_once(folder: Path) -> None:
    error = refusal(write(VALID), "train.seed=[")
    assert error.what.startswith("command line: train.seed=[: train.seed is [, which is not YAML")
    assert error.hint == "quote it: `'train.seed=\"[\"'`"


def test_a_whole_number_too_long_to_read_is_refused_where_it_stands(folder: Path) -> None:
    error = refusal(write(VALID), "train.seed=" + "9" * 5000)
    assert error.what.startswith("command line: train.seed=999")
    assert error.what.endswith("999, which cannot be read as tag:yaml.org,2002:int")


def test_an_override_given_twice_is_refused(folder: Path) -> None:
    error = refusal(write(VALID), "train.lr=1e-3", "train.lr=1e-4")
    assert error.what == "command line: train.lr=1e-4: train.lr is given a second time"
    assert error.limit == "a setting is given once, and there is command line: train.lr=1e-3"
