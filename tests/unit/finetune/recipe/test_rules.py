"""What cannot be combined in a recipe, each with its fix."""

from contextlib import nullcontext
from typing import Any, get_args

import pytest

from finetune.adapter.methods import refuse_virtual
from finetune.errors import ConfigError
from finetune.recipe.recipe import Recipe
from finetune.recipe.rules import (
    READS,
    broken_dtype_rules,
    broken_embedding_rules,
    broken_full_rules,
    broken_head_alone_rules,
    broken_head_rules,
    broken_method_rules,
    broken_objective_rules,
    broken_probe_rules,
    broken_rules,
    broken_sharded_rules,
)
from finetune.recipe.sections import LOSSES, AdapterSection, Method, Settings


def settings(adapter: dict[str, Any], *, dtype: str = "bfloat16", **offload: Any) -> Settings:
    content = {
        "model": {"path": "Qwen/Qwen3-8B", "dtype": dtype},
        "data": {"path": "rows.jsonl"},
        "train": {"steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
        "adapter": adapter,
        "offload": offload,
    }
    return Settings.model_validate(content)


def broken(adapter: dict[str, Any], **offload: Any) -> list[str]:
    return [breach.field for breach in broken_method_rules(settings(adapter, **offload))]


def test_lora_reads_all_and_each_method_its_own() -> None:
    everything = {"rank": 4, "alpha": 8, "dropout": 0.1, "dora": True, "rslora": True}
    assert broken(everything) == []
    assert broken({"method": "vera", "rank": 4, "dropout": 0.1}) == []
    assert broken({"method": "loha", "rank": 4, "alpha": 8}) == []
    assert broken({"method": "ia3", "targets": ["k_proj"]}) == []


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("ia3", "rank", 4),
        ("vera", "alpha", 8),
        ("loha", "dropout", 0.1),
        ("oft", "experts", True),
        ("lokr", "dora", True),
        ("miss", "rank_pattern", {"q_proj": 8}),
        ("vera", "loraplus_ratio", 16),
        ("oft", "compute_dtype", "float32"),
        ("vera", "dtype", "bfloat16"),
    ],
)
def test_a_field_that_is_not_read_is_refused(method: str, field: str, value: object) -> None:
    assert broken({"method": method, field: value}) == [f"adapter.{field}"]


def test_tiles_of_an_mlp_are_refused() -> None:
    assert broken({"method": "loha"}, mlp_chunk=64) == ["offload.mlp_chunk"]


def test_methods_are_those_of_the_field_and_read_its_fields() -> None:
    allowed = AdapterSection.model_fields["method"].annotation.__args__  # type: ignore[union-attr]
    assert {"lora", *READS} == set(allowed)
    assert all(fields <= AdapterSection.model_fields.keys() for fields in READS.values())


@pytest.mark.parametrize(
    ("adapter", "dtype", "field", "seen"),
    [
        ({"dora": True}, "bfloat16", "adapter.dora", "true"),
        ({"compute_dtype": "float32"}, "bfloat16", "adapter.compute_dtype", "float32"),
        ({}, "float16", "model.dtype", "float16"),
    ],
)
def test_what_an_adapter_in_bf16_cannot_be_combined_with(
    adapter: dict[str, Any], dtype: str, field: str, seen: str
) -> None:
    assert not list(broken_dtype_rules(settings(adapter, dtype=dtype)))
    (breach,) = broken_dtype_rules(settings(adapter | {"dtype": "bfloat16"}, dtype=dtype))
    assert breach.field == field
    assert breach.what == f"{field} is {seen} and adapter.dtype is bfloat16"


# ------------------------------------------------------------------------------------- embeddings


def test_what_trains_the_embedding_is_refused_where_it_waits_on_the_host() -> None:
    cases: dict[str, dict[str, Any]] = {
        "adapter.modules_to_save": {"modules_to_save": ["norms", "embed_tokens"]},
        "adapter.method": {"method": "prompt", "num_virtual_tokens": 4},
    }
    for field, adapter in cases.items():
        assert not list(broken_embedding_rules(settings(adapter)))
        (breach,) = broken_embedding_rules(settings(adapter, embeddings="host"))
        assert breach.field == field
        assert breach.what.endswith("and offload.embeddings is host")
        assert breach.hint.endswith(", or `offload.embeddings: device`")
    (breach,) = broken_embedding_rules(
        settings(cases["adapter.modules_to_save"], embeddings="host")
    )
    assert breach.hint.startswith("`adapter.modules_to_save: [norms]`")
    assert not list(broken_embedding_rules(settings({"rank": 4}, embeddings="host")))


# ------------------------------------------------------------------------------------------- head


def test_a_head_on_the_host_does_not_train_with_an_adapter() -> None:
    trained = {"modules_to_save": ["norms", "lm_head"]}
    assert not list(broken_head_rules(settings(trained)))
    (breach,) = broken_head_rules(settings(trained, head="host"))
    assert breach.what == "adapter.modules_to_save is norms, lm_head and offload.head is host"
    assert breach.limit == "a head in host memory is frozen"
    assert breach.hint == "`adapter.modules_to_save: [norms]`, or `offload.head: device`"
    assert not list(broken_head_rules(settings({"rank": 4}, head="host")))
    whole = settings({}, head="host")
    whole = whole.model_copy(update={"train": whole.train.model_copy(update={"what": "all"})})
    assert not list(broken_head_rules(whole))


# --------------------------------------------------------------------------------------- full rules


def settings_full(**sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "data": {"path": "rows.jsonl"},
        "train": {"what": "all", "steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


def test_a_plain_recipe_breaks_none() -> None:
    assert not list(broken_full_rules(settings_full()))
    assert not list(broken_full_rules(settings_full(train={"what": ["model.layers.*"]})))
    assert not list(broken_full_rules(settings_full(offload={"codec": "native", "tier": "ram"})))


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        ("adapter", "dora", True, "leave `adapter.dora` out, or `train.what: adapter`"),
        ("adapter", "rank", 8, "leave `adapter.rank` out, or `train.what: adapter`"),
        ("offload", "codec", "nf4", "`offload.codec: native`"),
        ("offload", "codec", "bf16_packed", "`offload.codec: native`"),
        ("offload", "tier", "disk", "`offload.tier: ram`"),
        ("train", "optimizer", "paged_adamw_8bit", "`train.optimizer: adamw_8bit`"),
        ("train", "compile", True, "`train.compile: false`"),
        ("model", "experts_implementation", "triton", "`model.experts_implementation: grouped_mm`"),
        ("model", "layer_kernels", "fused", "`model.layer_kernels: plain`"),
    ],
)
def test_what_cannot_be_combined_is_named_with_its_fix(
    section: str, field: str, value: object, fix: str
) -> None:
    (breach,) = broken_full_rules(settings_full(**{section: {field: value}}))
    assert breach.field == f"{section}.{field}"
    assert breach.hint == fix
    assert "train.what is all" in breach.what


@pytest.mark.parametrize(("optimizer", "fix"), [("adamw_bf16", "adamw"), ("lion_bf16", "lion")])
def test_an_optimizer_of_weights_in_ram_updates_no_adapter(optimizer: str, fix: str) -> None:
    (breach,) = broken_rules(settings_full(train={"what": "adapter", "optimizer": optimizer}))
    assert breach.field == "train.optimizer"
    assert breach.what == f"train.optimizer is {optimizer} and train.what is adapter"
    assert breach.hint == f"`train.optimizer: {fix}`, or `train.what: all`"
    assert not list(broken_rules(settings_full(train={"optimizer": optimizer})))


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_weights_in_float16_are_not_kept_in_another_form_of_as_many_bytes(codec: str) -> None:
    float16 = {"path": "Qwen/Qwen3-8B", "dtype": "float16"}
    sections: dict[str, Any] = {"model": float16, "train": {"what": "adapter"}}
    (breach,) = broken_rules(settings_full(**sections, offload={"codec": codec}))
    assert breach.what == f"offload.codec is {codec} and model.dtype is float16"
    assert not list(broken_rules(settings_full(**sections, offload={"codec": "nf4"})))


def test_an_empty_list_trains_nothing() -> None:
    (breach,) = broken_full_rules(settings_full(train={"what": []}))
    assert breach.field == "train.what"


# ---------------------------------------------------------------------------------- objective rules


def settings_objective(objective: dict[str, Any], **sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "data": {"path": "rows.jsonl"},
        "train": {"steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
        "objective": objective,
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


@pytest.mark.parametrize("method", get_args(Method))
def test_every_loss_with_its_defaults_breaks_no_rule(method: str) -> None:
    for loss in LOSSES.get(method, (None,)):
        smoothing = {"label_smoothing": 0.1} if loss == "robust" else {}
        reward: dict[str, dict[str, Any]] = {
            "model": {"head": "reward"},
            "data": {"too_long": "drop"},
        }
        classes = reward | {"model": {"head": "classes", "num_classes": 3}}
        words = reward | {"model": {"head": "token_classes", "num_classes": 3}}
        by_head = {"reward": reward, "classify": classes, "classify_tokens": words}
        sections = by_head.get(method, {})
        recipe = settings_objective({"method": method, "loss": loss} | smoothing, **sections)
        assert not list(broken_objective_rules(recipe))


@pytest.mark.parametrize(
    ("sections", "field", "what"),
    [
        ({"data": {"too_long": "truncate"}}, "data.too_long", "data.too_long is truncate"),
        ({"train": {"what": "all"}}, "train.what", "train.what is all"),
        ({"train": {"router_loss_coef": 0.01}}, "train.router_loss_coef", "is 0.01"),
        ({"model": {"head": "tokens"}}, "model.head", "model.head is tokens"),
        ({"data": {"format": "preference"}}, "data.format", "data.format is preference"),
        ({"report": {"samples": 3}}, "report.samples", "report.samples is 3"),
    ],
)
def test_what_makes_no_reward_is_named(
    sections: dict[str, dict[str, Any]], field: str, what: str
) -> None:
    right = {"model": {"head": "reward"}, "data": {"too_long": "drop"}}
    given = {name: right.get(name, {}) | sections.get(name, {}) for name in {**right, **sections}}
    found = list(broken_objective_rules(settings_objective({"method": "reward"}, **given)))
    assert [one.field for one in found] == [field]
    assert what in found[0].what


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({"num_classes": None}, "model.num_classes is null and objective.method is classify"),
        ({"head": "reward"}, "model.head is reward and objective.method is classify"),
    ],
)
def test_what_makes_no_classifier_is_named(model: dict[str, Any], what: str) -> None:
    right = {"head": "classes", "num_classes": 3}
    (found,) = broken_objective_rules(
        settings_objective({"method": "classify"}, model=right | model, data={"too_long": "drop"})
    )
    assert found.what == what


def test_a_reward_head_is_for_rewards_alone() -> None:
    (found,) = broken_objective_rules(
        settings_objective({"method": "sft"}, model={"head": "reward"})
    )
    assert found.what == "model.head is reward and objective.method is sft"
    assert "`model.head: tokens`" in found.hint


@pytest.mark.parametrize(
    ("objective", "field", "hint"),
    [
        ({"beta": 0.1}, "beta", "`objective.method: dpo`, or leave out `objective.beta`"),
        ({"loss": "dr_grpo"}, "loss", "`objective.method: grpo`, or leave out `objective.loss`"),
        ({"gamma": 0.5}, "gamma", "`objective.method: simpo`, or leave out `objective.gamma`"),
        (
            {"reference": "base"},
            "reference",
            "`objective.method: dpo`, or leave out `objective.reference`",
        ),
        ({"method": "simpo", "reference": "base"}, "reference", "leave out `objective.reference`"),
        (
            {"method": "dpo", "loss": "hinge", "label_smoothing": 0.1},
            "label_smoothing",
            "leave out `objective.label_smoothing`",
        ),
        ({"method": "orpo", "sft_weight": 1.0}, "sft_weight", "leave out `objective.sft_weight`"),
        ({"method": "orpo", "loss": "sigmoid"}, "loss", "leave out `objective.loss`"),
        (
            {"method": "grpo", "beta": 0.0, "reference": "base"},
            "reference",
            "leave out `objective.reference`",
        ),
    ],
)
def test_a_setting_that_the_method_does_not_read_is_named(
    objective: dict[str, Any], field: str, hint: str
) -> None:
    (breach,) = broken_objective_rules(settings_objective(objective))
    assert breach.field == f"objective.{field}"
    assert breach.what.startswith(f"objective.{field} is {objective[field]}")
    assert breach.limit == "it has no effect there"
    assert breach.hint == hint


def test_a_loss_of_another_method_is_refused_with_those_that_there_are() -> None:
    (breach,) = broken_objective_rules(settings_objective({"method": "kto", "loss": "ipo"}))
    assert breach.what == "objective.loss is ipo and objective.method is kto"
    assert breach.limit == "the losses of kto are kto, apo_zero_unpaired"
    assert breach.hint == "`objective.loss: kto`"


@pytest.mark.parametrize(
    ("objective", "field", "hint"),
    [
        ({"method": "dpo", "beta": 0.0}, "beta", "`objective.beta: 0.1`"),
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
def test_values_that_make_no_loss_are_refused(
    objective: dict[str, Any], field: str, hint: str
) -> None:
    (breach,) = broken_objective_rules(settings_objective(objective))
    assert breach.field == f"objective.{field}"
    assert breach.hint == hint


@pytest.mark.parametrize(
    ("method", "loss", "hint"),
    [
        ("dpo", "ipo", "`objective.reference: precomputed`"),
        (
            "kto",
            "kto",
            "`objective.reference: precomputed` with `objective.loss: apo_zero_unpaired`",
        ),
        ("kto", "apo_zero_unpaired", "`objective.reference: precomputed`"),
    ],
)
def test_a_base_that_trains_is_no_reference(method: str, loss: str, hint: str) -> None:
    values = {"method": method, "loss": loss}
    for what in ("all", ["model.layers.*"]):
        (breach,) = broken_objective_rules(settings_objective(values, train={"what": what}))
        assert breach.field == "objective.reference"
        assert breach.what == f"objective.reference is base and train.what is {what}"
        assert breach.hint == f"{hint}, or `train.what: adapter`"
    if loss != "kto":
        known = values | {"reference": "precomputed"}
        assert not list(broken_objective_rules(settings_objective(known, train={"what": "all"})))
    assert not list(
        broken_objective_rules(settings_objective({"method": "orpo"}, train={"what": "all"}))
    )


@pytest.mark.parametrize(
    ("objective", "data_format", "hint"),
    [
        ({"method": "dpo"}, "labelled", "`data.format: preference`"),
        ({"method": "kto"}, "preference", "`data.format: labelled`"),
        ({"method": "dpo"}, "ranking", "`data.format: preference`"),
        ({"method": "sft"}, "preference", "leave the format out"),
    ],
)
def test_rows_that_the_objective_does_not_read_are_refused(
    objective: dict[str, Any], data_format: str, hint: str
) -> None:
    (breach,) = broken_objective_rules(settings_objective(objective, data={"format": data_format}))
    assert (breach.field, breach.hint) == ("data.format", hint)
    mix = {"path": None, "mix": [{"path": "rows.jsonl", "format": data_format}]}
    (breach,) = broken_objective_rules(settings_objective(objective, data=mix))
    assert breach.field == "data.mix"


def test_rankings_and_pairs_are_read_by_a_loss_of_rankings() -> None:
    ranked = {"method": "dpo", "loss": "plackett_luce"}
    for data_format in ("preference", "ranking"):
        assert not list(
            broken_objective_rules(settings_objective(ranked, data={"format": data_format}))
        )


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("data", "format", "text"),
        ("data", "too_long", "split"),
        ("data", "loss_on", "all"),
        ("data", "loss_on", "last"),
        ("train", "neftune_alpha", 5.0),
        ("report", "samples", 3),
    ],
)
def test_settings_of_rows_that_are_repeated_are_refused(
    section: str, name: str, value: object
) -> None:
    more = {section: {name: value}}
    (breach,) = broken_objective_rules(settings_objective({"method": "simpo"}, **more))
    assert breach.field == f"{section}.{name}"
    assert breach.what == f"{section}.{name} is {value} and objective.method is simpo"
    assert not list(broken_objective_rules(settings_objective({}, **more)))


def test_rows_that_are_compared_may_be_packed_compiled_and_have_dropout() -> None:
    recipe = settings_objective(
        {"method": "dpo"},
        data={"packing": "on"},
        adapter={"dropout": 0.1, "modules_to_save": ["norms"]},
        offload={"codec": "nf4", "tier": "disk"},
    )
    assert not list(broken_objective_rules(recipe))


# -------------------------------------------------------------------------------------- probe rules


def settings_probe(**sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B", "num_classes": 2},
        "objective": {"method": "classify"},
        "data": {"path": "rows.jsonl", "too_long": "drop"},
        "train": {"probe_steps": 9, "steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


def test_a_new_head_may_be_probed() -> None:
    for method in ("classify", "classify_tokens", "reward"):
        assert not list(broken_probe_rules(settings_probe(objective={"method": method})))
    own: dict[str, dict[str, Any]] = {
        "model": {"head": "classes"},
        "adapter": {"modules_to_save": ("score",)},
    }
    Recipe.model_validate(settings_probe(train={"probe_lr": 0.1}, **own).model_dump())


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        (
            "objective",
            "method",
            "sft",
            "`objective.method: classify`, or `train.probe_steps: null`",
        ),
        (
            "objective",
            "method",
            "dpo",
            "`objective.method: classify`, or `train.probe_steps: null`",
        ),
        (
            "adapter",
            "init_from",
            "runs/a",
            "`adapter.init_from: null`, or `train.probe_steps: null`",
        ),
        ("train", "probe_steps", None, "`train.probe_steps: 200`, or leave `train.probe_lr` out"),
    ],
)
def test_what_cannot_be_combined_is_named_with_its_fix_probe(
    section: str, field: str, value: object, fix: str
) -> None:
    sections: dict[str, dict[str, Any]] = {section: {field: value}}
    if value is None:
        sections["train"]["probe_lr"] = 0.1
    (breach,) = broken_probe_rules(settings_probe(**sections))
    assert breach.hint == fix
    assert "train.probe_steps is " in breach.what


def test_its_steps_have_the_rows_of_the_run_and_a_rate_of_their_own() -> None:
    train = settings_probe(train={"probe_lr": 0.1, "warmup_steps": 2, "lr": 1e-3}).train
    assert train.of_probe is not None
    changed = {"steps": 9, "lr": 0.1, "warmup_steps": 0}
    assert train.of_probe == train.model_copy(update=changed)
    plain = settings_probe(train={"lr": 1e-3}).train.of_probe
    assert plain is not None
    assert plain.lr == 1e-3


def alone(**sections: dict[str, Any]) -> Settings:
    own: dict[str, dict[str, Any]] = {
        "train": {"what": "head", "probe_steps": None},
        "adapter": {"targets": (), "modules_to_save": ("score",)},
    }
    for name, section in sections.items():
        own[name] = own.get(name, {}) | section
    return settings_probe(**own)


def test_a_recipe_of_a_head_alone_has_the_head_and_no_adapter() -> None:
    assert not list(broken_head_alone_rules(alone()))
    content = alone().model_dump(exclude_unset=True)
    del content["adapter"]
    recipe = Recipe.model_validate(content)
    assert recipe.adapter.targets == ()
    assert recipe.adapter.modules_to_save == ("score",)
    assert recipe.model.head == "classes"
    assert not recipe.train.is_full


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        ("objective", "method", "sft", "`objective.method: classify`, or `train.what: adapter`"),
        ("train", "probe_steps", 9, "`train.probe_steps: null`, or `train.what: adapter`"),
        ("offload", "kept_graphs", 2, "`offload.kept_graphs: auto`, or `train.what: adapter`"),
        ("adapter", "rank", 4, "leave `adapter.rank` out, or `train.what: adapter`"),
        (
            "adapter",
            "targets",
            ("q_proj",),
            "leave `adapter.targets` out, or `train.what: adapter`",
        ),
    ],
)
def test_what_a_head_alone_cannot_be_combined_with_is_named_with_its_fix(
    section: str, field: str, value: object, fix: str
) -> None:
    (breach,) = broken_head_alone_rules(alone(**{section: {field: value}}))
    assert breach.hint == fix
    assert f"{section}.{field} is" in breach.what
    assert "train.what is head" in breach.what


# ------------------------------------------------------------------------------------ sharded rules


def settings_sharded(**sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "data": {"path": "rows.jsonl", "eval_frac": 0.1},
        "train": {"parallel": "fsdp2", "steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x", "eval_every": 1},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


def test_a_plain_recipe_breaks_none_sharded() -> None:
    assert not list(broken_rules(settings_sharded()))
    assert not list(broken_rules(settings_sharded(train={"what": "all"})))
    assert not list(
        broken_rules(settings_sharded(offload={"codec": "native", "vram_budget": 20.0}))
    )
    assert not list(
        broken_rules(settings_sharded(adapter={"dropout": 0.1, "loraplus_ratio": 16.0}))
    )


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        ("offload", "codec", "nf4", "native"),
        ("offload", "codec", "bf16_packed", "native"),
        ("offload", "tier", "disk", "auto"),
        ("offload", "num_slots", 4, "auto"),
        ("offload", "kept_graphs", 2, "auto"),
        ("offload", "sent_graphs", "none", "auto"),
        ("offload", "attention_outputs", "none", "auto"),
        ("offload", "stash", "host", "auto"),
        ("offload", "head_chunk", 256, "auto"),
        ("offload", "mlp_chunk", 512, "auto"),
        ("offload", "embeddings", "host", "auto"),
        ("data", "packing", "on", "off"),
        ("model", "dtype", "float16", "bfloat16"),
        ("model", "layer_kernels", "fused", "plain"),
        ("model", "experts_implementation", "triton", "grouped_mm"),
        ("adapter", "method", "vera", "lora"),
        ("adapter", "dora", True, "false"),
        ("adapter", "experts", True, "false"),
        ("adapter", "modules_to_save", ["norms"], "[]"),
        ("train", "optimizer", "adamw_8bit", "adamw"),
        ("train", "reduce_dtype", "bf16", "fp32"),
        ("train", "compile", True, "false"),
        ("train", "router_loss_coef", 0.1, "0"),
        ("output", "best_checkpoint", "use", "keep"),
        ("report", "samples", 4, "0"),
    ],
)
def test_what_does_not_hold_there_is_refused_by_name(section, field, value, fix) -> None:
    (breach,) = broken_sharded_rules(settings_sharded(**{section: {field: value}}))
    assert breach.field == f"{section}.{field}"
    assert breach.what.endswith(" and train.parallel is fsdp2")
    assert breach.hint == f"`{section}.{field}: {fix}`, or `train.parallel: stream`"
    assert not list(broken_sharded_rules(settings_sharded(**{section: {field: _fixed(fix)}})))


def test_preferences_are_refused() -> None:
    found = list(broken_sharded_rules(settings_sharded(objective={"method": "dpo"})))
    assert [breach.field for breach in found] == ["objective.method"]


def _fixed(text: str) -> object:
    return {"false": False, "0": 0, "[]": ()}.get(text, text)


# ------------------------------------------------------------------------------------ virtual rules


def settings_virtual(**sections: dict[str, Any]) -> Settings:
    content: dict[str, dict[str, Any]] = {
        "model": {"path": "Qwen/Qwen3-8B"},
        "adapter": {"method": "prompt", "num_virtual_tokens": 8},
        "data": {"path": "rows.jsonl"},
        "train": {"steps": 3, "grad_accum_steps": 1},
        "output": {"name": "x"},
    }
    for name, section in sections.items():
        content[name] = content.get(name, {}) | section
    return Settings.model_validate(content)


@pytest.mark.parametrize("method", ["prompt", "p_tuning", "prefix", "prefix_mlp"])
def test_virtual_tokens_are_in_front_of_rows_of_one_objective(method: str) -> None:
    found = settings_virtual(adapter={"method": method})
    assert not list(broken_method_rules(found))
    assert found.adapter.num_in_front == 8
    assert found.adapter.num_in_rows == (0 if method.startswith("prefix") else 8)
    assert settings_virtual(adapter={"method": "lora"}).adapter.num_in_front == 0


METHODS = get_args(AdapterSection.model_fields["method"].annotation)


@pytest.mark.parametrize("method", [*METHODS, "PREFIX_TUNING", "P_TUNING", "LORA"])
def test_virtual_tokens_are_refused_where_rows_have_none(method: str) -> None:
    words = {"prompt", "p_tuning", "prefix", "prefix_mlp", "PREFIX_TUNING", "P_TUNING"}
    refused = pytest.raises(ConfigError, match=f"an adapter of the method {method}, and rows")
    with refused if method in words else nullcontext():
        refuse_virtual(method)


@pytest.mark.parametrize(
    ("section", "field", "value", "fix"),
    [
        ("objective", "method", "dpo", "`objective.method: sft`, or `adapter.method: lora`"),
        ("data", "packing", "on", "`data.packing: off`, or `adapter.method: lora`"),
        ("train", "neftune_alpha", 5, "`train.neftune_alpha: null`, or `adapter.method: lora`"),
        ("train", "what", "all", "`train.what: adapter`, or `adapter.method: lora`"),
        ("report", "samples", 9, "`report.samples: 0`, or `adapter.method: lora`"),
        ("adapter", "rank", 4, "leave `adapter.rank` out, or `adapter.method: lora`"),
        ("adapter", "method", "lora", "`adapter.method: prompt`, or leave it out"),
    ],
)
def test_what_they_cannot_be_combined_with_is_named_with_its_fix(
    section: str, field: str, value: object, fix: str
) -> None:
    (breach,) = broken_method_rules(settings_virtual(**{section: {field: value}}))
    assert breach.hint == fix


def test_a_prefix_lets_rows_be_answered_and_noise_be_added_but_not_packed() -> None:
    prefix = {"method": "prefix_mlp", "num_virtual_tokens": 8}
    for section in ({"train": {"neftune_alpha": 5}}, {"report": {"samples": 9}}):
        assert not list(broken_method_rules(settings_virtual(adapter=prefix, **section)))
    (breach,) = broken_method_rules(settings_virtual(adapter=prefix, data={"packing": "on"}))
    assert breach.field == "data.packing"
