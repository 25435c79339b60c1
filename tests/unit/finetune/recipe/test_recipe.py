"""Recipes, their objectives, and those that are shipped."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from finetune.adapter.methods import refuse_virtual
from finetune.errors import ConfigError
from finetune.model.config import read_config
from finetune.recipe.adapters import ADAPTERS
from finetune.recipe.extensions import OBJECTIVES, Choice, ObjectiveSection, Section
from finetune.recipe.load import load_shape, published_ids, shape_of, shape_of_id, shipped_shapes
from finetune.recipe.recipe import (
    Recipe,
    differences,
    json_schema,
    recipe_hash,
    recipes_dir,
    resolved_yaml,
    sections,
    settings,
    shipped_recipes,
)
from finetune.recipe.sections import DataSection, ModelSection, TrainSection
from tests.builders import recipe_values
from tests.objectives import METHODS, losses_of
from tests.tiers import mostly_slow
from tests.tools.gallery import SHIPPED

SECTIONS = [
    *(section for section in get_type_hints(Recipe).values() if not issubclass(section, Choice)),
    *(objective.settings for objective in OBJECTIVES.values()),
    *(adapter.settings for adapter in ADAPTERS.values()),
]


def make_recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(recipe_values(**changes))


@pytest.mark.parametrize("section", [Recipe, *SECTIONS])
def test_every_field_has_a_description(section: type[BaseModel]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name}"
        assert field.description.endswith("."), f"{section.__name__}.{name}"


def section_schemas(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each section's, and that of each choice where it has some."""
    every = schema["$defs"].items()
    return [(name, one) for name, section in every for one in section.get("oneOf", [section])]


def test_every_field_has_a_default_or_an_example_to_show_in_hints() -> None:
    for name, schema in section_schemas(Recipe.model_json_schema()):
        for key, field in schema["properties"].items():
            assert field.get("default") is not None or field.get("examples"), f"{name}.{key}"


def test_the_defaults_and_examples_of_every_field_are_themselves_valid() -> None:
    for section in SECTIONS:
        assert section is not None
        for name, field in section.model_fields.items():
            for example in field.examples or []:
                plain, found = section.model_construct(), list[str]()
                try:
                    section.__pydantic_validator__.validate_assignment(plain, name, example)
                except ValidationError as error:
                    found = [one["type"] for one in error.errors()]
                assert found in ([], ["refusal"]), name  # one of another loss than the default


def test_encoded_layers_leave_norms_routers_embeddings_and_head_as_they_are() -> None:
    names = ["norms", "router", "embed_tokens", "lm_head"]
    recipe = make_recipe(adapter__modules_to_save=names, offload__codec="nf4")
    assert recipe.adapter.as_lora.modules_to_save == tuple(names)


@pytest.mark.parametrize("section", [s for s in SECTIONS if s not in (TrainSection, DataSection)])
def test_a_section_has_at_most_16_fields(section: type[Section]) -> None:
    assert len(section.model_fields) <= 16


def test_a_recipe_has_at_most_119_fields() -> None:
    assert sum(len(settings(section)) for section in sections()) <= 119


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_is_frozen_and_closed(section: type[Section]) -> None:
    assert section.model_config.get("frozen") is True
    assert section.model_config.get("extra") == "forbid"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("adapter__rank", 0),
        ("adapter__rank", "8"),
        ("adapter__rank", True),
        ("adapter__rank", 8.0),
        ("adapter__alpha", 0),
        ("adapter__dropout", 1.0),
        ("adapter__targets", "q_proj"),
        ("adapter__targets", [1]),
        ("adapter__experts", "yes"),
        ("adapter__rank_pattern", {"q_proj": 0}),
        ("adapter__rank_pattern", ["q_proj"]),
        ("adapter__alpha_pattern", {"q_proj": 0}),
        ("adapter__loraplus_ratio", 1),
        ("adapter__modules_to_save", "lm_head"),
        ("train__lr", 0),
        ("train__lr", float("nan")),
        ("train__lr", float("inf")),
        ("train__seq_len", 7),
        ("train__seed", -1),
        ("train__seed", 2**32),
        ("train__steps", 0),
        ("train__max_grad_norm", 0),
        ("data__num_workers", -1),
        ("data__eval_frac", 1.0),
        ("data__path", ""),
        ("offload__num_slots", 1),
        ("offload__num_slots", "many"),
        ("offload__kept_graphs", -1),
        ("offload__vram_budget", 0),
        ("output__name", "../elsewhere"),
        ("output__name", ".hidden"),
        ("report__log_to", ["mlflow"]),
        ("report__profile", 0),
    ],
)
def test_a_value_outside_its_limits_is_refused(setting: str, value: object) -> None:
    section, _, field = setting.partition("__")
    with pytest.raises(ValidationError) as caught:
        make_recipe(**{setting: value})
    assert {error["loc"][:2] for error in caught.value.errors()} == {(section, field)}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("adapter__rank", 1),
        ("adapter__targets", ["q_proj", "v_proj"]),
        ("adapter__targets", "attention"),
        ("adapter__rank_pattern", {"q_proj": 1, "experts.down_proj": 4}),
        ("adapter__loraplus_ratio", 16),
        ("adapter__modules_to_save", ["norms", "router"]),
        ("train__lr", 1),
        ("train__max_grad_norm", None),
        ("train__seed", 2**32 - 1),
        ("offload__num_slots", 2),
        ("offload__num_slots", "all"),
        ("offload__kept_graphs", 0),
        ("offload__vram_budget", 10),
        ("report__log_to", ["tensorboard", "wandb"]),
        ("output__name", "Qwen3-0.6B_run"),
    ],
)
def test_a_value_on_its_limit_is_accepted(setting: str, value: object) -> None:
    section, _, field = setting.partition("__")
    seen = getattr(getattr(make_recipe(**{setting: value}), section), field)
    assert seen == (tuple(value) if isinstance(value, list) else value)


@given(
    seq_len=st.integers(8, 10_000),
    micro_batch_size=st.integers(1, 16),
    num_micro_batches=st.integers(1, 64),
)
def test_both_ways_to_size_a_step_mean_the_same(
    seq_len: int, micro_batch_size: int, num_micro_batches: int
) -> None:
    tokens = seq_len * micro_batch_size * num_micro_batches
    by_count = make_recipe(
        train__seq_len=seq_len,
        train__micro_batch_size=micro_batch_size,
        train__grad_accum_steps=num_micro_batches,
    ).train
    by_tokens = make_recipe(
        train__seq_len=seq_len,
        train__micro_batch_size=micro_batch_size,
        train__grad_accum_steps=None,
        train__tokens_per_step=tokens,
    ).train
    assert by_count.num_micro_batches == by_tokens.num_micro_batches == num_micro_batches
    assert (
        by_count.global_batch_size
        == by_tokens.global_batch_size
        == micro_batch_size * num_micro_batches
    )


def test_derived_values_follow_from_their_settings() -> None:
    recipe = make_recipe(offload__vram_budget=1.5, data__eval_frac=0.1)
    assert recipe.offload.vram_budget_bytes == 1_610_612_736
    assert make_recipe().offload.vram_budget_bytes is None
    assert recipe.output.run_dir == Path("runs/small")
    assert make_recipe(output__dir="elsewhere").output.run_dir == Path("elsewhere")
    assert recipe.model.tokenizer_source == "Qwen/Qwen3-0.6B"
    assert make_recipe(model__tokenizer="other").model.tokenizer_source == "other"


def test_the_resolved_yaml_reads_back_as_the_same_recipe() -> None:
    recipe = make_recipe(
        adapter__targets=["q_proj"],
        adapter__rank_pattern={"q_proj": 4},
        train__lr=1e-5,
        data__system="A: b\nc",
    )
    text = resolved_yaml(recipe)
    assert Recipe.model_validate(yaml.safe_load(text)) == recipe
    assert list(yaml.safe_load(text)) == list(Recipe.model_fields)


def test_the_hash_is_the_same_in_another_process_and_from_another_order(tmp_path: Path) -> None:
    recipe = make_recipe()
    values = yaml.safe_load(resolved_yaml(recipe))
    file = tmp_path / "reversed.json"
    file.write_text(
        json.dumps({name: dict(reversed(values[name].items())) for name in reversed(values)})
    )
    code = (
        "import json, sys; from finetune.recipe.recipe import Recipe, recipe_hash;"
        "print(recipe_hash(Recipe.model_validate(json.load(open(sys.argv[1], 'rb')))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        check=True,
        cwd=recipes_dir().parent,
    )
    assert result.stdout.strip() == recipe_hash(recipe)


def test_the_hash_changes_with_a_setting_and_not_with_how_it_was_written() -> None:
    assert recipe_hash(make_recipe(train__lr=2e-4)) == recipe_hash(make_recipe())
    assert recipe_hash(make_recipe(adapter__alpha=32)) == recipe_hash(make_recipe())
    assert recipe_hash(make_recipe(train__lr=3e-4)) != recipe_hash(make_recipe())


def test_differences_name_each_changed_setting() -> None:
    before = make_recipe(train__lr=0.0001)
    after = make_recipe(train__lr=0.0002, adapter__targets=["q_proj"], train__seed=3)
    assert differences(before, after) == [
        'adapter.targets: "all-linear" -> ["q_proj"]',
        "train.lr: 0.0001 -> 0.0002",
        "train.seed: 0 -> 3",
    ]
    assert differences(before, before) == []


def test_the_json_schema_describes_every_setting_and_closes_every_section() -> None:
    schema = json.loads(json_schema())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert sorted(schema["required"]) == ["data", "model", "output", "train"]
    for _, section in section_schemas(schema):
        assert section["additionalProperties"] is False
        assert all(field["description"] for field in section["properties"].values())
    lora = schema["$defs"]["AdapterSection"]["oneOf"][0]
    assert lora["properties"]["rank"]["minimum"] == 1


@pytest.mark.parametrize(
    ("section", "values", "num_fitting"),
    [
        ("Objective", {}, 1),
        ("Objective", {"method": "dpo", "beta": 0.2}, 1),
        ("Objective", {"beta": 0.2}, 0),
        ("Objective", {"method": "dpq"}, 0),
        ("Adapter", {"alpha": 8.0}, 1),
        ("Adapter", {"method": "vera", "rank": 8}, 1),
        ("Adapter", {"method": "vera", "alpha": 8.0}, 0),
    ],
)
def test_one_choice_of_the_json_schema_fits(
    section: str, values: dict[str, Any], num_fitting: int
) -> None:
    def fits(choice: dict[str, Any]) -> bool:
        known = choice["properties"]
        return {*choice.get("required", ())} <= {*values} <= {*known} and values.get(
            "method", known["method"]["const"]
        ) == known["method"]["const"]

    choices = json.loads(json_schema())["$defs"][f"{section}Section"]["oneOf"]
    assert sum(map(fits, choices)) == num_fitting


def test_the_shipped_recipes_lie_in_the_recipes_folder() -> None:
    assert set(shipped_recipes()) == {
        "gsm8k_lora",
        "quickstart",
        "quickstart_dpo",
        "quickstart_full",
        "quickstart_grpo",
        "quickstart_images",
        "qwen30b_dpo_5090",
        "qwen30b_kto_5090",
        "qwen30b_lora_5090",
        "qwen30b_qlora_4060ti",
        "qwen3_8b_dpo_4090",
        "qwen3_8b_full_4090",
        "qwen3_8b_grpo_4060ti",
        "qwen3_8b_grpo_4090",
        "qwen3_8b_kto_4090",
        "qwen3_8b_lora_3060",
        *SHIPPED,  # those that the planner suggests
    }
    assert all(path.parent == recipes_dir() for path in shipped_recipes().values())


def test_importing_the_recipe_imports_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, finetune.recipe.recipe, finetune.recipe.load;"
        "print([n for n in ('torch', 'transformers', 'peft', 'datasets') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=recipes_dir().parent,
    )
    assert result.stdout.strip() == "[]"


# -------------------------------------------------------------------------------- objective section


PLAIN: dict[str, dict[str, Any]] = {
    "model": {"path": "Qwen/Qwen3-8B"},
    "data": {"path": "rows.jsonl"},
    "train": {"steps": 3, "grad_accum_steps": 1},
    "output": {"name": "x"},
}


def set_values(**values: object) -> dict[str, object]:
    return ObjectiveSection.model_validate(values).model_dump(exclude_none=True)


def test_nothing_but_rows_that_are_repeated_is_the_default() -> None:
    assert set_values() == {"method": "sft"}


@pytest.mark.parametrize(
    ("values", "defaults"),
    [
        (
            {"method": "dpo"},
            {
                "loss": "sigmoid",
                "beta": 0.1,
                "reference": "base",
                "label_smoothing": 0.0,
                "sft_weight": 0.0,
            },
        ),
        (
            {"method": "dpo", "loss": "ipo"},
            {"beta": 0.1, "reference": "base", "sft_weight": 0.0},
        ),
        (
            {"method": "simpo"},
            {"beta": 2.0, "gamma": 0.5, "label_smoothing": 0.0, "sft_weight": 0.0},
        ),
        (
            {"method": "cpo"},
            {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "sft_weight": 1.0},
        ),
        ({"method": "orpo"}, {"beta": 0.1}),
        (
            {"method": "kto"},
            {
                "loss": "kto",
                "beta": 0.1,
                "reference": "base",
                "desirable_weight": 1.0,
                "undesirable_weight": 1.0,
            },
        ),
        (
            {"method": "grpo"},
            {
                "loss": "dapo",
                "beta": 0.0,
                "clip_epsilon": 0.2,
                "importance_sampling_mode": "none",
            },
        ),
        (
            {"method": "grpo", "loss": "rloo"},
            {
                "beta": 0.05,
                "clip_epsilon": 0.2,
                "importance_sampling_mode": "none",
                "reference": "base",
            },
        ),
    ],
)
def test_a_method_has_the_defaults_of_its_paper_or_of_trl(
    values: dict[str, object], defaults: dict[str, object]
) -> None:
    assert set_values(**values) == values | defaults


@pytest.mark.parametrize(
    ("values", "mode", "cap"),
    [
        ({}, "token_truncate", 3.0),
        ({"loss": "rloo"}, "sequence_truncate", 3.0),
        ({"importance_sampling_mode": "none"}, "none", None),
    ],
)
def test_what_a_server_samples_is_corrected_for(
    values: dict[str, object], mode: str, cap: float | None
) -> None:
    server = {"method": "grpo", "rewards": "length.py", "sampler": "http://127.0.0.1:8000"}
    found = set_values(**server, **values)
    assert found["importance_sampling_mode"] == mode
    assert found.get("importance_sampling_cap") == cap
    assert found.get("sampling") is None
    assert found["num_answers"] == 8


def test_a_setting_that_is_given_is_kept() -> None:
    values = {"method": "dpo", "loss": "robust", "beta": 0.3, "label_smoothing": 0.2}
    assert set_values(**values) == values | {"reference": "base", "sft_weight": 0.0}


def test_a_kl_divergence_needs_a_reference_and_none_needs_none() -> None:
    assert set_values(method="grpo", beta=0.04)["reference"] == "base"
    assert "reference" not in set_values(method="grpo", beta=0.0)


@pytest.mark.parametrize(
    ("method", "loss"),
    mostly_slow(
        [(method, loss) for method in METHODS for loss in losses_of(method)],
        ("dpo", "robust"),
        ("grpo", "rloo"),
        ("sft", None),
    ),
)
def test_a_run_reads_its_own_recipe_as_it_was(method: str, loss: str | None) -> None:
    values: dict[str, object] = {"method": method}
    values |= {"loss": loss} if loss else {}
    if loss == "robust":
        values["label_smoothing"] = 0.1
    has_head = method in ("reward", "classify", "classify_tokens")
    whole_rows = {"too_long": "drop"} if has_head else {}
    num_classes = {"num_classes": 3} if has_head and method != "reward" else {}
    recipe = Recipe.model_validate(
        PLAIN
        | {
            "objective": values,
            "data": {**PLAIN["data"], **whole_rows},
            "model": {**PLAIN["model"], **num_classes},
        }
    )
    again = Recipe.model_validate(yaml.safe_load(resolved_yaml(recipe)))
    assert again == recipe
    assert not differences(recipe, again)


def test_a_recipe_without_an_objective_repeats_the_rows() -> None:
    recipe = Recipe.model_validate(PLAIN)
    assert yaml.safe_load(resolved_yaml(recipe))["objective"] == {"method": "sft"}
    assert recipe == Recipe.model_validate(PLAIN | {"objective": {}})


def test_recipes_differ_in_the_settings_that_one_choice_alone_has() -> None:
    plain = Recipe.model_validate(PLAIN)
    orpo = Recipe.model_validate(PLAIN | {"objective": {"method": "orpo"}})
    assert differences(plain, orpo) == [
        'objective.method: "sft" -> "orpo"',
        "objective.beta: null -> 0.1",
    ]


def test_what_a_step_needs_is_read_off_the_section() -> None:
    def read(**values: object) -> ObjectiveSection:
        return ObjectiveSection.model_validate(values)

    sft, dpo, kto = (read(method=name) for name in ("sft", "dpo", "kto"))
    assert (sft.is_cross_entropy, sft.computes_reference) == (True, False)
    assert (dpo.is_cross_entropy, dpo.computes_reference) == (False, True)
    known = read(method="dpo", reference="precomputed")
    assert (known.precomputes_reference, known.computes_reference) == (True, False)
    assert (dpo.scores_mismatched, kto.scores_mismatched) == (False, True)
    assert not read(method="kto", loss="apo_zero_unpaired").scores_mismatched
    assert read(method="dpo", loss="plackett_luce").read_formats == ("preference", "ranking")
    assert dpo.read_formats == ("preference",)


@pytest.mark.parametrize(
    ("objective", "field", "hint"),
    [
        (
            {"method": "dpo", "loss": "hinge", "label_smoothing": 0.1},
            "label_smoothing",
            "leave out `objective.label_smoothing`, or `objective.loss: sigmoid`",
        ),
        (
            {"method": "cpo", "loss": "ipo", "label_smoothing": 0.1},
            "label_smoothing",
            "leave out `objective.label_smoothing`, or `objective.loss: sigmoid`",
        ),
        (
            {"method": "distill", "temperature": 2.0},
            "temperature",
            "leave out `objective.temperature`, or `objective.loss: kl_top`",
        ),
        (
            {"method": "grpo", "beta": 0.0, "reference": "base"},
            "reference",
            "leave out `objective.reference`, or `objective.beta: 0.05`",
        ),
        (
            {"method": "grpo", "importance_sampling_cap": 2.0},
            "importance_sampling_cap",
            "leave out `objective.importance_sampling_cap`, or"
            " `objective.importance_sampling_mode: sequence_truncate`",
        ),
        (
            {"method": "grpo", "sampler": "http://127.0.0.1:8000"},
            "sampler",
            "leave out `objective.sampler`, or `objective.rewards: rewards.py`",
        ),
        (
            {
                "method": "grpo",
                "rewards": "length.py",
                "sampler": "http://127.0.0.1:8000",
                "sampling": "fast",
            },
            "sampling",
            "leave out `objective.sampling`, or `objective.sampler`",
        ),
        (
            {"method": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0},
            "desirable_weight",
            "`objective.desirable_weight: 1.0`",
        ),
        (
            {"method": "dpo", "loss": "robust"},
            "label_smoothing",
            "`objective.label_smoothing: 0.1`, or `objective.loss: sigmoid`",
        ),
        (
            {"method": "dpo", "loss": "exo_pair", "label_smoothing": 0.0},
            "label_smoothing",
            "`objective.label_smoothing: 0.1`, or `objective.loss: sigmoid`",
        ),
        (
            {"method": "grpo", "beta": 0.1, "reference": "precomputed"},
            "reference",
            "`objective.reference: base`, or `objective.loss: rloo`",
        ),
        (
            {"method": "kto", "reference": "precomputed"},
            "reference",
            "`objective.reference: base`, or `objective.loss: apo_zero_unpaired`",
        ),
        (
            {"method": "grpo", "loss": "rloo", "importance_sampling_mode": "token_mask"},
            "importance_sampling_mode",
            "`objective.importance_sampling_mode: sequence_mask`",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_their_objective(
    objective: dict[str, Any], field: str, hint: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(PLAIN | {"objective": objective})
    (error,) = caught.value.errors()
    assert error["loc"] == ("objective",)
    assert error["ctx"]["field"] == field
    assert error["ctx"]["hint"] == hint


def classified(**train: Any) -> Recipe:
    """Return a recipe of a new head."""
    content: dict[str, dict[str, Any]] = {
        "model": PLAIN["model"] | {"num_classes": 2},
        "objective": {"method": "classify"},
        "data": PLAIN["data"] | {"too_long": "drop"},
        "train": PLAIN["train"] | train,
    }
    return Recipe.model_validate(PLAIN | content)


def test_steps_of_a_probe_have_the_rows_of_the_run_and_a_rate_of_their_own() -> None:
    train = classified(probe_steps=9, probe_lr=0.1, warmup_steps=2, lr=1e-3).train
    changed = {"steps": 9, "lr": 0.1, "warmup_steps": 0}
    assert train.of_probe == train.model_copy(update=changed)
    plain = classified(probe_steps=9, lr=1e-3).train.of_probe
    assert plain is not None
    assert plain.lr == 1e-3


def test_a_recipe_of_a_head_alone_has_the_head_and_no_adapter() -> None:
    recipe = classified(what="head")
    assert recipe.adapter.as_lora.targets == ()
    assert recipe.adapter.as_lora.modules_to_save == ("score",)
    assert recipe.model.head == "classes"
    assert not recipe.train.is_full


# --------------------------------------------------------------------------------- virtual tokens


@pytest.mark.parametrize("method", ["prompt", "p_tuning", "prefix", "prefix_mlp", "lora"])
def test_virtual_tokens_are_in_front_of_rows_or_of_each_layers_keys(method: str) -> None:
    values = {"method": method} | ({} if method == "lora" else {"num_virtual_tokens": 8})
    adapter = Recipe.model_validate(PLAIN | {"adapter": values}).adapter
    assert adapter.num_in_front == (0 if method == "lora" else 8)
    assert adapter.num_in_rows == (8 if method in ("prompt", "p_tuning") else 0)


@pytest.mark.parametrize("method", ADAPTERS)
def test_virtual_tokens_are_refused_where_rows_have_none(method: str) -> None:
    words = {"prompt", "p_tuning", "prefix", "prefix_mlp"}
    refused = pytest.raises(ConfigError, match=r"an adapter of the type P.*TUNING, and rows")
    with refused if method in words else nullcontext():
        refuse_virtual(ADAPTERS[method])


# ------------------------------------------------------------------------------------------ shipped


def test_every_shape_but_the_tiny_ones_names_its_model_on_the_hub() -> None:
    named = set(published_ids())
    assert {name for name in shipped_shapes() if name not in named} == {
        "tiny-qwen3",
        "tiny-qwen3-moe",
    }


def test_a_hub_id_finds_its_shape_by_what_is_published_or_by_its_name() -> None:
    assert shape_of_id("google/gemma-4-26B-A4B-it") == "gemma-4-26b-a4b"
    assert shape_of_id("Qwen/Qwen3-8B") == "qwen3-8b"
    assert shape_of_id("unsloth/Qwen3-8B") == "qwen3-8b"
    assert shape_of_id("Qwen/Qwen3-9000B") is None


def test_a_config_with_a_router_loss_is_no_shipped_shape() -> None:
    """Some types cannot be built with it, which facts of a shape would not say."""
    shape = load_shape("glm-4.7-flash")
    assert shape_of(shape) == shape_of(shape | {"use_cache": False}) == "glm-4.7-flash"
    assert shape_of(shape | {"output_router_logits": True}) is None


def test_a_published_model_that_was_never_downloaded_is_read_from_its_shape() -> None:
    config = read_config(ModelSection(path="Qwen/Qwen3.6-27B"))
    assert config == load_shape("qwen3.6-27b")
