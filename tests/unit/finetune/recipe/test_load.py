"""Recipes as YAML: where each value is from, and what is said of a wrong one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from finetune.errors import ConfigError
from finetune.recipe.adapters import ADAPTERS
from finetune.recipe.corrections import REPLACED, UNSUPPORTED, renamed
from finetune.recipe.draft import CoreLoader, read_draft
from finetune.recipe.load import load_recipe
from finetune.recipe.recipe import near_path, resolved_yaml, sections, settings
from tests.unit.finetune.recipe.written import VALID, assert_refused, refusal, replaced, write

# ---------------------------------------------------------------------------------------------
# Fields


def test_a_key_of_other_trainers_names_its_line_and_ours(folder: Path) -> None:
    assert_refused(
        replaced("  seq_len: 512", "  seq_length: 512"),
        what="r.yaml:8: train.seq_length is not a setting",
        limit="here it is train.seq_len",
        hint="use `train.seq_len: 512`",
    )


def test_a_misspelt_section_names_its_neighbour_and_its_settings_are_still_checked(
    folder: Path,
) -> None:
    error = refusal(replaced("adapter:\n  rank: 8", "adpter:\n  rank: 0"))
    assert "r.yaml:3: adpter is not a setting; the nearest is adapter\n\nhint: `adapter:`" in str(
        error
    )
    assert "r.yaml:4: adapter.rank is 0; it must be a whole number of at least 1" in str(error)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("  optimiser: adamw", "train.optimizer"),
        ("  wramup_steps: 3", "train.warmup_steps"),
        ("  num_slots: 3", "offload.num_slots"),
        ("  num_slot: 3", "offload.num_slots"),
    ],
)
def test_a_misspelt_key_or_one_of_another_section_names_where_it_belongs(
    folder: Path, line: str, meant: str
) -> None:
    error = refusal(replaced("  steps: 10", f"  steps: 10\n{line}"))
    key = line.split(":")[0].strip()
    assert error.what == f"r.yaml:11: train.{key} is not a setting"
    assert error.limit == f"the nearest is {meant}"


@pytest.mark.parametrize(
    ("line", "limit", "hint"),
    [
        ("learning_rate: 1e-4", "here it is train.lr", "use `train.lr: 0.0001`"),
        ("max_seq_length: 64", "here it is train.seq_len", "use `train.seq_len: 64`"),
        (
            "per_device_train_batch_size: 2",
            "here it is train.micro_batch_size",
            "use `train.micro_batch_size: 2`",
        ),
        ("gradient_clipping: 0.5", "here it is train.max_grad_norm", None),
        ("neftune_noise_alpha: 5", "here it is train.neftune_alpha", None),
        ("load_in_4bit: true", "here it is offload.codec", "use `offload.codec: nf4`"),
        ("sample_packing: true", "here it is data.packing", "use `data.packing: on`"),
        ("bf16: true", "here it is model.dtype", "use `model.dtype: bfloat16`"),
        ("fp16: true", "here it is model.dtype", "use `model.dtype: float16`"),
        ("wandb_project: mine", "here it is report.log_to", "use `report.log_to: [wandb]`"),
        (
            "eval_packing: true",
            "not supported: each row is a sequence of its own; rows of like length share a"
            " micro-batch",
            "remove `eval_packing`",
        ),
        (
            "flash_attention: true",
            "not supported: torch's fused attention is taken wherever the model allows it",
            "remove `flash_attention`",
        ),
        (
            "deepspeed: ds.json",
            "not supported: layers are streamed from RAM instead of sharded; several GPUs share a"
            " step",
            "remove `deepspeed`",
        ),
    ],
)
def test_a_word_of_another_trainer_is_given_ours_or_why_there_is_none(
    folder: Path, line: str, limit: str, hint: str | None
) -> None:
    error = refusal(replaced("  steps: 10", f"  steps: 10\n  {line}"))
    assert error.what == f"r.yaml:11: train.{line.split(':')[0]} is not a setting"
    assert error.limit == limit
    assert hint is None or error.hint == hint


def test_a_word_of_another_trainer_is_known_at_the_top_and_on_the_command_line_too(
    folder: Path,
) -> None:
    assert_refused(
        replaced("output:", "lora_r: 8\noutput:"),
        what="r.yaml:11: lora_r is not a setting",
        limit="here it is adapter.rank",
        hint="use `adapter.rank: 8`",
    )
    assert_refused(
        write(VALID),
        "train.load_in_8bit=true",
        what="command line: train.load_in_8bit=true: train.load_in_8bit is not a setting",
        limit="here it is offload.codec",
        hint="use `offload.codec=int8`",
    )


@pytest.mark.parametrize(
    ("objective", "key", "limit", "hint"),
    [
        (
            "beta: 0.1",
            "objective.beta is 0.1 and objective.method is sft",
            "sft has method",
            "leave `objective.beta` out, or `objective.method: cpo`"
            " (dpo, grpo, kto, orpo, reward, simpo have it too)",
        ),
        (
            "loss: dr_grpo",
            'objective.loss is "dr_grpo" and objective.method is sft',
            "sft has method",
            "leave `objective.loss` out, or `objective.method: grpo`",
        ),
        (
            "method: simpo\n  reference: base",
            'objective.reference is "base" and objective.method is simpo',
            "simpo has method, beta, gamma, label_smoothing, sft_weight",
            "leave `objective.reference` out, or `objective.method: dpo` (grpo, kto have it too)",
        ),
        (
            "method: orpo\n  loss: sigmoid",
            'objective.loss is "sigmoid" and objective.method is orpo',
            "orpo has method, beta",
            "leave `objective.loss` out, or `objective.method: cpo` (dpo have it too)",
        ),
        (
            "method: kto\n  loss: ipo",
            'objective.loss is "ipo"',
            "it must be kto or apo_zero_unpaired",
            "`objective.loss: kto`",
        ),
        (
            "method: dpo\n  beta: 0.0",
            "objective.beta is 0.0",
            "it must be a number above 0",
            "`objective.beta: 0.1`",
        ),
        (
            "method: dpo\n  loss: robust",
            "objective.label_smoothing is 0.0 and objective.loss is robust",
            "the loss corrects for pairs labelled the wrong way round, so some must be",
            "`objective.label_smoothing: 0.1`, or `objective.loss: sigmoid`",
        ),
    ],
)
def test_what_a_choice_does_not_have_is_refused_with_those_that_do(
    folder: Path, objective: str, key: str, limit: str, hint: str
) -> None:
    error = refusal(replaced("output:", f"objective:\n  {objective}\noutput:"))
    at = 12 + objective.count("\n") - objective.endswith("robust") * 2
    assert error.what == f"r.yaml:{at}: {key}"
    assert (error.limit, error.hint) == (limit, hint)


@pytest.mark.parametrize("key", ["stride", "quantum", "wandbx_y", "epsilon_greedy", "kappa"])
def test_a_key_that_is_near_to_nothing_is_not_guessed_at(folder: Path, key: str) -> None:
    error = refusal(replaced("  steps: 10", f"  steps: 10\n  {key}: 1"))
    assert error.limit is not None
    assert error.limit.startswith("the section train has what, seq_len, ")
    assert error.hint == f"remove `{key}`"


def test_a_dotted_key_in_a_file_names_the_setting(folder: Path) -> None:
    assert_refused(
        replaced("output:", "train.lr: 1e-3\noutput:"),
        what="r.yaml:11: train.lr is not a setting",
        limit="in a file, lr is in the section train",
        hint="`train:` and below it, indented, `lr: 0.001`",
    )


def test_a_key_like_no_other_lists_the_settings_of_its_section(folder: Path) -> None:
    assert_refused(
        replaced("  rank: 8", "  rank: 8\n  zzz: [1]"),
        what="r.yaml:5: adapter.zzz is not a setting",
        limit="the section adapter has method, targets, init_from, modules_to_save, rank, alpha,"
        " dropout, experts, rank_pattern, alpha_pattern, rslora, dora, compute_dtype, dtype,"
        " loraplus_ratio, num_virtual_tokens",
        hint="remove `zzz`",
    )


@pytest.mark.parametrize(
    ("method", "setting", "others"),
    [
        ("lora", "num_virtual_tokens: 8", "prompt"),
        ("ia3", "rank: 4", "lora"),
        ("vera", "alpha: 8.0", "lora"),
        ("loha", "dropout: 0.1", "lora"),
        ("oft", "experts: true", "lora"),
        ("prompt", "targets: attention", "lora"),
    ],
)
def test_a_setting_that_a_method_does_not_have_is_refused(
    method: str, setting: str, others: str, folder: Path
) -> None:
    error = refusal(replaced("  rank: 8", f"  method: {method}\n  {setting}"))
    name, _, value = setting.partition(": ")
    shown = f'"{value}"' if value.isalpha() and value != "true" else value
    assert error.what == f"r.yaml:5: adapter.{name} is {shown} and adapter.method is {method}"
    own = ADAPTERS[method].settings.model_fields
    assert error.limit == f"{method} has {', '.join(own)}"
    assert error.hint.startswith(f"leave `adapter.{name}` out, or `adapter.method: {others}`")


def test_a_wrong_type_names_value_and_limit(folder: Path) -> None:
    assert_refused(
        replaced("rank: 8", 'rank: "eight"'),
        what='r.yaml:4: adapter.rank is "eight"',
        limit="it must be a whole number of at least 1 and of at most 65536",
        hint="`adapter.rank: 16`",
    )


def test_a_wrong_pattern_names_what_it_may_be_and_shows_one(folder: Path) -> None:
    assert_refused(
        replaced("rank: 8", "rank_pattern: {q_proj: 0}"),
        what='r.yaml:4: adapter.rank_pattern is {"q_proj": 0}',
        limit="it must be names, each with a whole number of at least 1 and of at most 65536",
        hint='`adapter.rank_pattern: {"q_proj": 32}`',
    )
    assert_refused(
        write(VALID),
        "adapter.rank_pattern=4",
        what="command line: adapter.rank_pattern=4: adapter.rank_pattern is 4",
        limit="it must be names, each with a whole number of at least 1 and of at most 65536",
        hint='`adapter.rank_pattern={"q_proj": 32}`',
    )
    recipe = load_recipe(write(VALID), ["adapter.rank_pattern={q_proj: 4}"])
    assert recipe.adapter.as_lora.rank_pattern == {"q_proj": 4}


def test_rank_0_is_refused(folder: Path) -> None:
    assert_refused(
        replaced("rank: 8", "rank: 0"),
        what="r.yaml:4: adapter.rank is 0",
        limit="it must be a whole number of at least 1 and of at most 65536",
        hint="`adapter.rank: 16`",
    )


def test_a_misspelt_choice_is_given_the_nearest(folder: Path) -> None:
    assert_refused(
        replaced("steps: 10", "steps: 10\n  optimizer: adamw8bit"),
        what='r.yaml:11: train.optimizer is "adamw8bit"',
        limit="it must be adafactor or adamw or adamw_8bit or adamw_bf16 or lion or lion_bf16 or"
        " paged_adamw_8bit or sgd",
        hint="`train.optimizer: adamw_8bit`",
    )


def test_a_value_of_two_kinds_lists_both(folder: Path) -> None:
    assert_refused(
        write(VALID + "offload:\n  num_slots: 1\n"),
        what="r.yaml:14: offload.num_slots is 1",
        limit="it must be auto or all, or a whole number of at least 2",
        hint="`offload.num_slots: auto`",
    )


def test_a_missing_setting_names_the_line_of_its_section(folder: Path) -> None:
    assert_refused(
        replaced("  name: small", "  dir: here"),
        what="r.yaml:11: output.name is not set",
        limit="it must be text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$",
        hint="`output.name: my-first-run`",
    )


def test_a_missing_section_is_asked_for_by_its_settings(folder: Path) -> None:
    error = refusal(replaced("data:\n  path: openai/gsm8k\n", ""))
    assert error.what == "r.yaml:1: data.path is not set and data.mix is not set"


def test_a_section_that_is_no_mapping_is_refused(folder: Path) -> None:
    assert_refused(
        replaced("adapter:\n  rank: 8", "adapter: lora"),
        what='r.yaml:3: adapter is "lora"',
        limit="adapter is a section, with settings such as method, targets, init_from",
        hint="`adapter:` and below it, indented, `method: ...`",
    )


def test_a_section_whose_settings_are_commented_out_means_its_defaults(folder: Path) -> None:
    recipe = load_recipe(replaced("adapter:\n  rank: 8", "adapter:\n  # rank: 8"), [])
    assert recipe.adapter.as_lora.rank == 16


# ---------------------------------------------------------------------------------------------
# Rules


def test_steps_and_epochs_together_are_refused_with_their_line(folder: Path) -> None:
    assert_refused(
        replaced("  steps: 10", "  steps: 10\n  epochs: 2"),
        what="r.yaml:11: train.epochs is 2.0 and train.steps is 10",
        limit="only one of them may be set",
        hint="leave out `train.epochs`, or `train.steps`",
    )


def test_a_rule_is_not_judged_by_a_value_that_is_wrong_by_itself(folder: Path) -> None:
    error = refusal(replaced("  steps: 10", "  steps: ten\n  epochs: 2"))
    assert error.what == 'r.yaml:10: train.steps is "ten"'


def test_all_problems_are_reported_at_once_in_the_order_of_their_lines(folder: Path) -> None:
    source = write(
        """\
        model:
          path: Qwen/Qwen3-0.6B
          dtype: bf16
        adapter:
          rank: 0
          alpa: 3
        data:
          path: nowhere/rows.jsonl
        train:
          lr: fast
          lr: 1
          grad_accum_steps: 4
          steps: 3
          epochs: 1
        output:
          name: small
        """
    )
    error = refusal(source, "train.seed=x", "train.lrr=3")
    text = str(error)
    assert text.startswith("9 problems in the recipe\n\nr.yaml:3: model.dtype is ")
    places = re.findall(r"^(?:r\.yaml:(\d+)|command line: (\S+)): ", text, flags=re.MULTILINE)
    assert places == [
        *((line, "") for line in ("3", "5", "6", "8", "10", "11", "14")),
        ("", "train.seed=x"),
        ("", "train.lrr=3"),
    ]
    assert text.count("\n\nhint: ") == 9


def test_a_dtype_that_no_model_computes_in_is_refused(folder: Path) -> None:
    assert_refused(
        replaced("  path: Qwen/Qwen3-0.6B", "  path: Qwen/Qwen3-0.6B\n  dtype: float64"),
        what='r.yaml:3: model.dtype is "float64"',
        limit="it must be bfloat16 or float16 or float32",
        hint="`model.dtype: float16`",
    )


# ---------------------------------------------------------------------------------------------
# Files


def test_a_missing_recipe_names_the_nearest_shipped_one(folder: Path) -> None:
    assert_refused(
        "quikstart",
        what="there is no recipe quikstart",
        limit="a recipe is the path of a YAML file or the name of a shipped one",
        hint="`quickstart`",
    )


def test_a_missing_recipe_names_the_nearest_file(folder: Path) -> None:
    write(VALID, "mine/my-recipe.yaml")
    assert refusal("mine/my-recip.yaml").hint == "`mine/my-recipe.yaml`"


def test_for_a_missing_recipe_like_no_other_the_list_is_named(folder: Path) -> None:
    assert refusal("zzz").hint == "`sluice recipes list` has the shipped ones"


@pytest.mark.parametrize("source", ["\0", "x" * 5000, ""])
def test_a_source_that_cannot_be_a_path_is_refused(folder: Path, source: str) -> None:
    assert isinstance(refusal(source), ConfigError)


def test_a_directory_is_no_recipe(folder: Path) -> None:
    Path("runs").mkdir()
    assert refusal("runs").what == "runs is a directory"


def test_a_missing_data_file_names_where_it_was_looked_for_and_the_nearest(folder: Path) -> None:
    write("{}", "data/train.jsonl")
    assert_refused(
        replaced("openai/gsm8k", "data/trian.jsonl"),
        what='r.yaml:6: data.path is "data/trian.jsonl", and there is no such file or folder',
        limit=f"it has to exist in {folder}",
        hint="`data.path: data/train.jsonl`",
    )


def test_a_missing_file_is_no_problem_where_files_are_not_checked(folder: Path) -> None:
    recipe = load_recipe(replaced("openai/gsm8k", "data/train.jsonl"), [], check_files=False)
    assert recipe.data.path == "data/train.jsonl"


def test_a_path_that_can_be_a_hub_id_is_left_alone(folder: Path) -> None:
    recipe = load_recipe(write(VALID), ["model.tokenizer=Qwen/Qwen3-8B"])
    assert recipe.data.path == "openai/gsm8k"
    assert recipe.model.tokenizer == "Qwen/Qwen3-8B"


def test_a_path_in_a_recipe_is_beside_it_or_else_in_the_current_directory(folder: Path) -> None:
    write("{}", "sub/rows.jsonl")
    write("{}", "rows.jsonl")
    write("{}", "here.jsonl")
    text = VALID.replace("openai/gsm8k", "rows.jsonl\n  eval_path: here.jsonl")
    recipe = load_recipe(write(text, "sub/r.yaml"), [])
    assert recipe.data.path == str(folder / "sub" / "rows.jsonl")
    assert recipe.data.eval_path == str(folder / "here.jsonl")


def test_a_path_on_the_command_line_is_in_the_current_directory_only(folder: Path) -> None:
    write("{}", "sub/rows.jsonl")
    source = write(VALID, "sub/r.yaml")
    error = refusal(source, "data.path=rows.jsonl")
    assert error.what.startswith("command line: data.path=rows.jsonl: data.path is ")
    assert error.limit == f"it has to exist in {folder}"
    recipe = load_recipe(source, ["data.path=./sub/../sub/rows.jsonl"])
    assert recipe.data.path == str(folder / "sub" / "rows.jsonl")


def test_the_split_of_a_local_data_set_is_kept(folder: Path) -> None:
    write("{}", "rows/state.json")
    recipe = load_recipe(write(VALID), ["data.path=./rows:test"])
    assert recipe.data.path == f"{folder / 'rows'}:test"


def test_an_unknown_shape_names_the_nearest(folder: Path) -> None:
    error = refusal(
        write(VALID.replace("path: Qwen/Qwen3-0.6B", "config: tiny-qwen\n  init: random"))
    )
    assert error.what == 'r.yaml:2: model.config is "tiny-qwen": tiny-qwen is not a model shape'
    assert error.hint.startswith("`model.config: tiny-qwen3`")


def test_the_resolved_recipe_of_a_run_loads_as_the_same_recipe(folder: Path) -> None:
    write("{}", "rows.jsonl")
    recipe = load_recipe(replaced("openai/gsm8k", "rows.jsonl"), ["train.lr=1e-5"])
    saved = write(resolved_yaml(recipe), "runs/small/recipe.yaml")
    assert load_recipe(saved, []) == recipe


# --------------------------------------------------------------------------------------------------
# Several sources
# --------------------------------------------------------------------------------------------------

PATH = "  path: openai/gsm8k\n"


def mixed(*entries: str) -> str:
    return replaced(PATH, "  mix:\n" + "".join(f"    - {entry}\n" for entry in entries))


def test_a_mix_is_read_and_its_paths_are_found(folder: Path) -> None:
    (folder / "here.jsonl").touch()
    recipe = load_recipe(mixed("{path: here.jsonl, weight: 3}", "{path: openai/gsm8k}"), [])
    assert [(one.path, one.weight) for one in recipe.data.sources] == [
        (str(folder / "here.jsonl"), 3.0),
        ("openai/gsm8k", 1.0),
    ]


@pytest.mark.parametrize(
    ("entry", "what", "hint"),
    [
        ("{path: a/b, weight: 0}", "data.mix[1].weight is 0", "leave the entry out"),
        ("{path: a/b, weight: -1}", "data.mix[1].weight is -1", "leave the entry out"),
        ("{weight: 1}", "data.mix[1].path is not set", "path: data/train.jsonl"),
        ("{path: a/b, wieght: 2}", "data.mix[1].wieght is not a setting", "use `weight`"),
        ("a/b", 'data.mix[1] is "a/b"', "path: data/train.jsonl"),
        (
            "{path: rows.jsonl}",
            'data.mix[1].path is "rows.jsonl", and there is no',
            "set `path`",
        ),
        ("{path: a/b, format: jsonl}", 'data.mix[1].format is "jsonl"', "path:"),
    ],
)
def test_a_wrong_entry_of_a_mix_is_named_by_number_and_line(
    folder: Path, entry: str, what: str, hint: str
) -> None:
    error = refusal(mixed("{path: openai/gsm8k}", entry))
    assert error.what.startswith(f"r.yaml:6: {what}")
    assert hint in error.hint


def test_a_path_on_the_command_line_replaces_the_mix_of_a_file(folder: Path) -> None:
    recipe = load_recipe(mixed("{path: a/b}"), ["data.path=c/d"])
    assert (recipe.data.path, recipe.data.mix) == ("c/d", ())


# -------------------------------------------------------------------------------------- yaml source


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
        ("model:\n  path: [a\n", "r.yaml:3: did not find expected ',' or ']'"),
        ("model:\n\tpath: a\n", "r.yaml:2: found character that cannot start any token"),
        ("a: &x 1\nb: *x\n", "r.yaml:2: aliases are not read in recipes"),
        ("a: &x [*x]\n", "r.yaml:1: aliases are not read in recipes"),
        ("a: " + "[" * 5000, "r.yaml:1: exceeded maximum nesting depth"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2: but found another document"),
        ('a: "\\ud800"\n', "r.yaml:1: found invalid Unicode character escape code"),
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


class InPython(yaml.SafeLoader):
    """The reader where PyYAML has no library in C, as on the planning page."""


InPython.yaml_implicit_resolvers = CoreLoader.yaml_implicit_resolvers
BITS = (
    *(
        "a",
        "b: c",
        ":",
        " ",
        "\n",
        "\n  ",
        "- ",
        "{",
        "}",
        "[",
        "]",
        ",",
        "'",
        '"',
        "#",
        "|-\n",
        ">\n",
    ),
    *("1e-4", "~", "no", "12:30", "http://x", "\\n", "\\u00e9", "é", "\r\n", "? ", "&a ", "!!str "),
)


def tree(node: yaml.Node | None) -> Any:
    if not isinstance(node, yaml.CollectionNode):
        return node and (node.tag, node.value)
    return node.tag, [tuple(map(tree, x)) if isinstance(x, tuple) else tree(x) for x in node.value]


@pytest.mark.thorough
@given(st.lists(st.sampled_from(BITS), max_size=14).map("".join))
def test_a_text_that_both_readers_take_has_one_meaning(text: str) -> None:
    try:
        nodes = [yaml.compose(text, Loader=one) for one in (CoreLoader, InPython)]
    except yaml.YAMLError:
        return
    assert tree(nodes[0]) == tree(nodes[1])


KEYS = ["model", "train", "trian", "steps", "lr", "lr.x", "data", "path", "report", "", "1"]
# Of control characters and what is none, YAML says itself that it is not read.
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cn", "Cs")), max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@pytest.mark.thorough
@given(values=st.dictionaries(st.sampled_from(KEYS), VALUES), override=VALUES)
@example(values={"model": {"path": "~0"}}, override=None)  # nobody's home
def test_any_settings_are_a_recipe_or_a_named_refusal(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object], override: object
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    lr = json.dumps(override, ensure_ascii=False)
    error = refusal(str(file), f"train.lr={lr}", "output.name=.")
    assert "any.yaml:1: " in str(error)
    assert 'output.name=.: output.name is "."' in str(error)


# ---------------------------------------------------------------------------------------------
# Overrides


def test_an_override_goes_before_the_file_and_the_file_before_the_default(folder: Path) -> None:
    source = write(VALID)
    assert load_recipe(source, ["adapter.rank=4"]).adapter.as_lora.rank == 4
    assert load_recipe(source, []).adapter.as_lora.rank == 8
    assert load_recipe(replaced("  rank: 8", "  alpha: 1"), []).adapter.as_lora.rank == 16


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
    assert recipe.adapter.as_lora.targets == ("q_proj", "v_proj")
    assert recipe.adapter.as_lora.experts is True
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


@pytest.mark.parametrize("override", ["train.lr", "train=1", "=1", "train.=1", ".lr=1", ""])
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


@pytest.mark.parametrize(
    ("override", "says", "hint"),
    [
        ("load_in_4bit=true", "here it is offload.codec", "use `offload.codec=nf4`"),
        ("lr=1e-3", "the nearest is train.lr", "`train.lr=0.001`"),
        ("train.loss=dpo", "the nearest is objective.method", "`objective.method=dpo`"),
        ("objective.loss=dpo", "the nearest is objective.method", "`objective.method=dpo`"),
        ("objective.loss=hello", "the section objective has method", "remove `loss`"),
        ("report.log_to=wandb", "a list of tensorboard or wandb", "`report.log_to=[wandb]`"),
        ("report.log_to=[wand]", "a list of tensorboard or wandb", "`report.log_to=[]`"),
        ("adapter.type=full", "here it is train.what", "use `train.what=all`"),
        ("adapter.type=dora", "here it is adapter.method", "use `adapter.method=dora`"),
        ("adapter.method=full", "it must be lora or ", "`train.what=all`"),
        ("train.what=full", "it must be adapter or head or all", "`train.what=all`"),
        ("finetuning_type=full", "here it is train.what", "use `train.what=all`"),
        ("full_finetuning=true", "here it is train.what", "use `train.what=all`"),
    ],
)
def test_an_override_in_the_words_of_others_names_ours(
    folder: Path, override: str, says: str, hint: str
) -> None:
    error = refusal(write(VALID), override)
    assert says in f"{error.what} {error.limit}"
    assert hint in f"{error.what} {error.hint}"


@pytest.mark.parametrize(
    ("entries", "limit", "hint"),
    [
        ("[{path: o/a, type: alpaca}]", "here it is data.path", "use `data.path: o/a`"),
        ("[o/a]", "here it is data.path", "use `data.path: o/a`"),
        (
            "[{path: o/a}, {path: o/b}]",
            "here it is data.mix",
            "`data.mix:` and below it, for each, `- {path: o/a, weight: 1}`",
        ),
    ],
)
def test_a_list_of_data_sets_is_a_path_or_a_mix(
    folder: Path, entries: str, limit: str, hint: str
) -> None:
    text = VALID.replace("data:\n  path: openai/gsm8k", f"datasets: {entries}")
    error = refusal(write(text))
    assert error.what.endswith("datasets is not a setting")
    assert (error.limit, error.hint) == (limit, hint)


@pytest.mark.parametrize(
    ("path", "shapes", "hint"),
    [
        ("bse", "`sluice recipes list` has them", "Qwen/Qwen3-0.6B"),
        ("qwen3-8", "the nearest are qwen3-8b, ", "Qwen/Qwen3-8B"),
    ],
)
def test_a_model_that_is_one_word_is_a_folder_or_a_shipped_shape(
    folder: Path, path: str, shapes: str, hint: str
) -> None:
    error = refusal(write(VALID), f"model.path={path}")
    assert error.what.endswith(f'model.path is "{path}", and there is no such folder in {folder}')
    assert (error.limit or "").startswith(
        f"it is a model's folder, a hub id such as owner/name, or a shipped shape: {shapes}"
    )
    assert error.hint == f"`model.path={hint}`"
    (folder / path).mkdir()
    found = load_recipe(write(VALID), [f"model.path={path}"]).model.path
    assert found == str(folder / path)
    assert load_recipe(write(VALID), ["model.path=qwen3-8b"]).model.path == "qwen3-8b"


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


# ------------------------------------------------------------------------------------ foreign words


PATHS = {f"{section}.{name}" for section in sections() for name in settings(section)}
NAMES = {path.rpartition(".")[2] for path in PATHS} | set(sections())


def test_each_word_has_one_answer_and_is_no_setting_of_ours() -> None:
    tables = (renamed(), REPLACED, UNSUPPORTED)
    words = [word for table in tables for word in table]
    assert len(words) == len(set(words))
    assert NAMES.isdisjoint(words)
    dotted = {word.partition(".")[0] for word in words if "." in word}
    assert dotted <= set(sections())
    assert all(word == word.lower() and "-" not in word for word in words)


@pytest.mark.parametrize("word", renamed())
def test_a_renamed_word_names_a_setting_that_exists(word: str) -> None:
    assert renamed()[word] in PATHS | set(sections())


@pytest.mark.parametrize("word", REPLACED)
def test_a_replaced_word_names_a_setting_that_exists_and_a_value_that_it_takes(
    word: str, tmp_path
) -> None:
    path, value = REPLACED[word]
    assert path in PATHS
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: Qwen/Qwen3-0.6B}\n"
        "data: {path: rows, eval_frac: 0.1}\n"
        "train: {seq_len: 1024, grad_accum_steps: 8, steps: 500}\n"
        "output: {name: small, eval_every: 50}\n"
    )
    more = ["train.schedule=cosine_with_restarts"] if path == "train.num_cycles" else []
    more += ["train.tokens_per_step=8192"] if path == "train.micro_batch_size" else []
    more += ["objective.method=dpo"] if path == "objective.reference" else []
    assert load_recipe(str(recipe), [f"{path}={value}", *more], check_files=False)


def test_settings_that_a_reason_names_exist() -> None:
    for word, why in UNSUPPORTED.items():
        named = [part.strip("`(),.;:") for part in why.split() if part.count(".") == 1]
        for name in named:
            if name.partition(".")[0] in sections():
                assert name in PATHS, word


def test_names_are_near_by_letters_and_not_by_length() -> None:
    assert near_path("train", "stepz") == "train.steps"
    assert near_path("train", "Micro-Batch-Size") == "train.micro_batch_size"
    assert near_path("adapter", "rnak") == "adapter.rank"
    assert near_path("", "ofload") == "offload"
    assert near_path("adapter", "warmup_step") == "train.warmup_steps"
    assert near_path("train", "spets_long") is None
    assert near_path("train", "epsilon") is None


def with_notify(command: str) -> str:
    return write(VALID + f"report:\n  notify: {json.dumps(command)}\n")


def test_a_command_that_cannot_be_called_is_refused(folder: Path) -> None:
    assert load_recipe(with_notify("cat -n"), []).report.notify == "cat -n"
    assert_refused(
        with_notify("tell 'me"),
        what='r.yaml:14: report.notify is "tell \'me": no closing quotation',
        limit="it is read as words, as a shell reads them",
        hint="close the quotes; for pipes, `report.notify: sh -c '...'`",
    )
    missing = with_notify("no-such-program --now")
    assert_refused(
        missing,
        what='r.yaml:14: report.notify is "no-such-program --now", and there is no program'
        " no-such-program",
        limit="it has to be on the PATH, or an executable file from the current directory",
        hint="install it, or give its path (`chmod +x` on a script), or `report.notify: null`",
    )
    assert load_recipe(missing, [], check_files=False).report.notify == "no-such-program --now"
    url = "https://ntfy.sh/mine"
    assert_refused(
        with_notify(url),
        what=f'r.yaml:14: report.notify is "{url}", and there is no program {url}',
        limit="it has to be on the PATH, or an executable file from the current directory",
        hint=f"`report.notify: curl -s -d @- {url}`",
    )


def test_rows_in_place_of_a_recipe_are_named_so(folder: Path) -> None:
    (folder / "chats.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"chats\.jsonl holds rows, and no recipe") as caught:
        load_recipe("chats.jsonl", [])
    assert caught.value.hint == "`sluice init --model MODEL --data chats.jsonl` writes one for them"
