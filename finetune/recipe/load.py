"""From a file and the command line to a `Recipe`, or to every reason why not.

    find the file -> Draft -> overrides -> paths -> checked against the fields -> against the rules

Every problem names file and line (or the override), the value seen, the limit, and the setting that
fixes it. To find all of them at once, the checker fixes what it reports (a misspelt key is read as
its nearest neighbour, a wrong value as the default) and checks again, so that no mistake hides
another.

Relative paths: a path in a recipe is looked up next to the recipe, then in the current directory; a
path on the command line only in the current directory. Paths that exist become absolute. A path
that does not exist and could be the id of a hub repository (`name` or `owner/name`) is kept as one.
`output.dir` is always relative to the current directory. The recipe that a run has written into its
directory is of the run there, wherever that was before: a copy goes on by itself.
"""

import difflib
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from filecmp import cmp
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from finetune.errors import ConfigError
from finetune.files.atomic import JsonFile, expanded
from finetune.files.manifest import has_yaml_seal
from finetune.recipe.capabilities import RIVALS, Breach
from finetune.recipe.extensions import OBJECTIVES
from finetune.recipe.recipe import (
    Recipe,
    choice_of,
    choices_with,
    describe,
    example,
    field_schema,
    is_section,
    near_path,
    near_value,
    plain,
    recipes_dir,
    section_with_method,
    sections,
    settings,
    shipped_recipe,
    shipped_recipes,
    shown,
    written,
)
from finetune.recipe.sections import MixSource
from offload.plan.facts.codec import CODECS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# ---------------------------------------------------------------------------------------------
# A recipe before it is checked: values, and where each was written.
#
# YAML files and the command line are read into one `Draft`: the values as nested dictionaries, and
# for each dotted path its `Place`. Nothing here knows which settings exist. Errors of syntax (a
# duplicate key, a value that is not YAML) become `Problem`s, kept in the draft, so that all
# problems of a recipe are reported together.
#
# The YAML is read by the 1.2 core schema: `1e-4` is a number (YAML 1.1 reads text), `no` and
# `12:30` are text (YAML 1.1 reads false and 750), and a date stays text.

COMMAND_LINE = 2**31  # sorts after every line of a file
MAX_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a value was written: a line of a file, or the command line."""

    text: str  # the place as it is shown: `recipe.yaml:7` or `command line: train.lr=1`
    line: int  # line in the file, from 1; `COMMAND_LINE` for an override

    @property
    def is_override(self) -> bool:
        """Whether the value came from the command line."""
        return self.line == COMMAND_LINE


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe, in the three parts of an error, and its place."""

    place: Place
    what: str
    limit: str
    hint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The settings as they were written, before any is checked."""

    name: str  # the file as it is shown in errors
    values: dict[str, Any] = field(default_factory=dict)  # nested dictionaries of values
    # Dotted path -> where its value was written.
    places: dict[str, Place] = field(default_factory=dict)
    # What was found wrong so far; readers append to it.
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: str) -> Place:
        """Return where a setting, or else the section around it, or else the file begins."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return self.places[path] if path else Place(text=f"{self.name}:1", line=1)

    def add_problem(self, place: Place, what: str, *, limit: str, hint: str) -> None:
        """Note one thing that is wrong."""
        self.problems.append(Problem(place=place, what=what, limit=limit, hint=hint))

    def section(self, name: str) -> dict[str, Any] | None:
        """Return a section's settings, created if absent; None if the section is not a mapping."""
        section = self.values.setdefault(name, {})
        return section if isinstance(section, dict) else None


def joint_error(problems: Sequence[Problem]) -> ConfigError:
    """Put problems into one error, by line, each in the form that it would have alone.

    If there are very many, some of the file's are left out, but none of the command line's.
    """
    ordered = sorted(problems, key=lambda problem: problem.place.line)
    left_out = len(ordered) - MAX_SHOWN
    if left_out > 0:
        num_in_file = sum(not problem.place.is_override for problem in ordered)
        first = max(0, num_in_file - left_out)
        ordered = ordered[:first] + ordered[num_in_file:]
    *others, last = ordered
    blocks = [
        f"{other.place.text}: {other.what}; {other.limit}\n\nhint: {other.hint}" for other in others
    ]
    if others:
        of_these = f", of which these are {len(ordered)}" if left_out > 0 else ""
        blocks.insert(0, f"{len(problems)} problems in the recipe{of_these}")
    blocks.append(f"{last.place.text}: {last.what}")
    return ConfigError("\n\n".join(blocks), limit=last.limit, hint=last.hint)


# ---------------------------------------------------------------------------------------------
# YAML


class CoreLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads scalars by the YAML 1.2 core schema; in C, where PyYAML has its library."""


CoreLoader.yaml_implicit_resolvers = {}
_NUMBER_STARTS = list("-+.0123456789")
for _tag, _pattern, _starts in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", _NUMBER_STARTS),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        _NUMBER_STARTS,
    ),
):
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _starts)


_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "null", "bool", "int", "float")
}


def _composed(text: str) -> yaml.Node | None:
    """Return the node of a text, None if it is empty.

    Raises:
        yaml.YAMLError: It is not YAML, or has an alias: a recipe has each value where it is read.
    """
    for event in yaml.parse(text, Loader=CoreLoader):
        if isinstance(event, yaml.AliasEvent):
            what = "aliases are not read in recipes"
            mark = event.start_mark
            raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)  # type: ignore[arg-type]
    return yaml.compose(text, Loader=CoreLoader)


def read_draft(name: str, text: str) -> Draft:
    """Read the text of a recipe file.

    Args:
        name: The file as it is shown in errors.
        text: What the file holds.

    Raises:
        ConfigError: The text is not YAML, is empty, or is not sections of settings.
    """
    draft = Draft(name=name)
    start = Place(text=f"{name}:1", line=1)
    form = "a recipe is YAML: sections such as `train:`, with settings below them"
    hint = "`sluice recipes show quickstart` prints one to start from"
    try:
        root = _composed(text)
    except (yaml.YAMLError, RecursionError) as error:
        draft.add_problem(_error_place(name, error), _yaml_error(error), limit=form, hint=hint)
        raise joint_error(draft.problems) from error
    if root is None:
        draft.add_problem(start, "the file is empty", limit=form, hint=hint)
        raise joint_error(draft.problems)
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        draft.add_problem(start, f"the file holds {kind}", limit=form, hint=hint)
        raise joint_error(draft.problems)
    values = _value(root, "", draft)
    if values is not None:
        draft.values.update(values)
    return draft


def _mapping(node: yaml.MappingNode, path: str, draft: Draft) -> dict[str, Any]:
    """Return a mapping's values, and note the place of each and every key written twice."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = _node_place(draft, key_node)
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _PLAIN_TAGS:
            draft.add_problem(
                place,
                "a key is a list, a mapping or tagged",
                limit="a key is one word",
                hint="`key: value`",
            )
            continue
        key = key_node.value
        key_path = f"{path}.{key}" if path else key
        if key in values:
            draft.add_problem(
                place,
                f"{key_path} is written a second time",
                limit=f"a key is written once, and this one is at {draft.places[key_path].text}",
                hint="remove one of the two",
            )
            continue
        draft.places[key_path] = place
        values[key] = _value(value_node, key_path, draft)
    return values


def _value(node: yaml.Node, path: str, draft: Draft) -> Any:
    """Return a node's value: a mapping, a list, or a scalar of the core schema."""
    if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
        draft.add_problem(
            draft.places.get(path, _node_place(draft, node)),
            f"{path} is tagged {node.tag[:80]}",
            limit="a recipe holds sections, lists and plain values; nothing is built of tags",
            hint="remove the tag",
        )
        return None
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, draft)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{path}.{index}", draft) for index, item in enumerate(node.value)]
    try:
        return CoreLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, TypeError):  # as of `!!bool x`
        draft.add_problem(
            draft.places.get(path, _node_place(draft, node)),
            f"{path} is {node.value[:80]}, which cannot be read as {node.tag}",
            limit="a value is text, a number, true, false or null",
            hint=f'write it without a tag, as text: `{path}: "{node.value[:80]}"`',
        )
        return None


# ---------------------------------------------------------------------------------------------
# Command line


def apply_overrides(
    draft: Draft, overrides: Sequence[str], *, rivals: Sequence[tuple[str, str]]
) -> None:
    """Apply `section.field=value` overrides to a draft.

    An override of one of two rival settings replaces the other where the file sets it, because the
    command line takes precedence.

    Args:
        draft: What the file says; changed in place.
        overrides: Settings of the command line, each value written as YAML.
        rivals: Pairs of dotted paths of which one at most may be set.
    """
    for override in overrides:
        place = Place(text=f"command line: {override}", line=COMMAND_LINE)
        path, equals, text = override.partition("=")
        section_name, dot, key = path.partition(".")
        if equals and path and not dot and not is_section(path):  # as other trainers have it
            draft.values[path] = _override_value(draft, place, path, text)
            draft.places[path] = place
            continue
        if not equals or not section_name or not key:
            draft.add_problem(
                place,
                f"{override} does not name a setting and its value",
                limit="a setting is section.field=value",
                hint="`train.lr=1e-4`",
            )
            continue
        if path in draft.places and draft.places[path].is_override:
            draft.add_problem(
                place,
                f"{path} is given a second time",
                limit=f"a setting is given once, and there is {draft.places[path].text}",
                hint="remove one of the two",
            )
            continue
        section = draft.section(section_name)
        if section is None:
            continue  # the file has no mapping there, which is reported by itself
        draft.places.setdefault(section_name, place)
        draft.places[path] = place
        num_problems = len(draft.problems)
        value = _override_value(draft, place, path, text)
        if len(draft.problems) == num_problems:
            section[key] = value
    _drop_beaten_rivals(draft, rivals)


def _override_value(draft: Draft, place: Place, path: str, text: str) -> Any:
    """Return the value of an override, read as YAML; nothing at all is null."""
    try:
        node = _composed(text)
    except (yaml.YAMLError, RecursionError) as error:
        draft.add_problem(
            place,
            f"{path} is {text}, which is not YAML: {_yaml_error(error)}",
            limit="a value is written as in a recipe",
            hint=f"quote it: `'{path}=\"{text}\"'`",
        )
        return None
    return None if node is None else _value(node, path, draft)


def _drop_beaten_rivals(draft: Draft, rivals: Sequence[tuple[str, str]]) -> None:
    """Remove what the file sets where the command line sets its rival to a value."""
    for first, second in rivals:
        for winner, loser in ((first, second), (second, first)):
            section_name, _, key = winner.partition(".")
            section = draft.values.get(section_name)
            if (
                isinstance(section, dict)
                and section.get(key) is not None
                and draft.place(winner).is_override
                and not draft.place(loser).is_override
            ):
                section.pop(loser.partition(".")[2], None)


# ---------------------------------------------------------------------------------------------
# Places


def _node_place(draft: Draft, node: yaml.Node) -> Place:
    """Return the line on which a node begins."""
    line = node.start_mark.line + 1
    return Place(text=f"{draft.name}:{line}", line=line)


def _error_place(name: str, error: yaml.YAMLError | RecursionError) -> Place:
    """Return the line at which the YAML stopped being readable."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    line = mark.line + 1 if mark is not None else 1
    return Place(text=f"{name}:{line}", line=line)


def _yaml_error(error: yaml.YAMLError | RecursionError) -> str:
    """Return in one line why the text is not YAML."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError):
        parts = [part for part in (error.problem, error.context) if part]
        return " ".join(parts)
    return str(error).splitlines()[0]


# ---------------------------------------------------------------------------------------------
# Setting names of other trainers: our setting for each, or why there is none.
#
# The words are those of transformers and TRL, peft, Unsloth, Axolotl, LLaMA-Factory, torchtune,
# DeepSpeed and accelerate. A word is in one table: RENAMED where a setting of ours has the same
# values, REPLACED where it takes another value or several words make one setting, UNSUPPORTED where
# nothing here does the same. A word that is a setting here, under any section, is in none of them.

# Word -> the setting that takes its value. A word of a section is that word there only.
RENAMED: Mapping[str, str] = {
    "router_aux_loss_coef": "train.router_loss_coef",
    # model
    "base_model": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "model_id": "model.path",
    "model_revision": "model.revision",
    "revision_of_model": "model.revision",
    "tokenizer_name": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer",
    "torch_dtype": "model.dtype",
    # adapter
    "lora": "adapter",
    "peft": "adapter",
    "peft_config": "adapter",
    "lora_config": "adapter",
    "adapter.type": "adapter.method",
    "finetuning_type": "adapter.method",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "lora_target": "adapter.targets",
    "lora_target_modules": "adapter.targets",
    "lora_attn_modules": "adapter.targets",
    "use_rslora": "adapter.rslora",
    "peft_use_rslora": "adapter.rslora",
    "use_dora": "adapter.dora",
    "peft_use_dora": "adapter.dora",
    "loraplus_lr_ratio": "adapter.loraplus_ratio",
    "lora_modules_to_save": "adapter.modules_to_save",
    "additional_target": "adapter.modules_to_save",
    # data
    "dataset": "data.path",
    "datasets": "data.path",
    "dataset_name": "data.path",
    "train_file": "data.path",
    "dataset_revision": "data.revision",
    "eval_dataset": "data.eval_path",
    "test_datasets": "data.eval_path",
    "validation_file": "data.eval_path",
    "val_set_size": "data.eval_frac",
    "val_size": "data.eval_frac",
    "test_size": "data.eval_frac",
    "field_messages": "data.columns",
    "data.type": "data.format",
    "max_samples": "data.max_rows",
    "max_train_samples": "data.max_rows",
    "default_system": "data.system",
    "system_prompt": "data.system",
    "dataloader_num_workers": "data.num_workers",
    "preprocessing_num_workers": "data.num_workers",
    "dataset_num_proc": "data.num_workers",
    # objective
    "rl": "objective.method",
    "stage": "objective.method",
    "loss_type": "objective.loss",
    "pref_loss": "objective.loss",
    "rl_beta": "objective.beta",
    "pref_beta": "objective.beta",
    "pref_ftx": "objective.sft_weight",
    # train
    "unfrozen_parameters": "train.what",
    "max_length": "train.seq_len",
    "max_seq_len": "train.seq_len",
    "max_seq_length": "train.seq_len",
    "seq_length": "train.seq_len",
    "sequence_length": "train.seq_len",
    "sequence_len": "train.seq_len",
    "cutoff_len": "train.seq_len",
    "model_max_length": "train.seq_len",
    "block_size": "train.seq_len",
    "batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "max_steps": "train.steps",
    "num_train_steps": "train.steps",
    "train_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "optim": "train.optimizer",
    "lora_model_dir": "adapter.init_from",
    "adapter_name_or_path": "adapter.init_from",
    "learning_rate": "train.lr",
    "peak_lr": "train.lr",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "lr_schedule": "train.schedule",
    "scheduler": "train.schedule",
    "num_warmup_steps": "train.warmup_steps",
    "lr_warmup_steps": "train.warmup_steps",
    "warmup_fraction": "train.warmup_ratio",
    "warmup": "train.warmup_ratio",
    "gradient_clipping": "train.max_grad_norm",
    "clip_grad_norm": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "gradient_clip_val": "train.max_grad_norm",
    "max_norm": "train.max_grad_norm",
    "neftune": "train.neftune_alpha",
    "neftune_noise_alpha": "train.neftune_alpha",
    "noisy_embedding_alpha": "train.neftune_alpha",
    "early_stopping_threshold": "train.early_stopping_min_delta",
    "patience": "train.early_stopping_patience",
    "min_delta": "train.early_stopping_min_delta",
    "random_state": "train.seed",
    "data_seed": "train.seed",
    "torch_compile": "train.compile",
    "use_gradient_checkpointing": "train.gradient_checkpointing",
    "enable_activation_checkpointing": "train.gradient_checkpointing",
    "activation_checkpointing": "train.gradient_checkpointing",
    # output and report
    "run_name": "output.name",
    "wandb_name": "output.name",
    "output_dir": "output.dir",
    "save_steps": "output.checkpoint_every",
    "save_every_n_steps": "output.checkpoint_every",
    "save_total_limit": "output.keep_checkpoints",
    "eval_steps": "output.eval_every",
    "report_to": "report.log_to",
}


@cache
def renamed() -> Mapping[str, str]:
    """Return each word with the setting that takes its value, those of objectives too."""
    of_objectives = {
        word: f"objective.{name}"
        for objective in OBJECTIVES.values()
        for word, name in objective.words.items()
    }
    return {**RENAMED, **of_objectives}


ALL_WEIGHTS = ("train.what", "all")
"""What `full` means, whatever it is the value of."""

# Word -> the setting that replaces it, with its value.
REPLACED: Mapping[str, tuple[str, str]] = {
    "full_finetuning": ALL_WEIGHTS,
    "freeze_trainable_layers": ("train.what", "[last_4_layers]"),
    **{alias: ("offload.codec", name) for name in CODECS for alias in CODECS[name].aliases},
    "bf16": ("model.dtype", "bfloat16"),
    "pure_bf16": ("model.dtype", "bfloat16"),
    "bnb_4bit_compute_dtype": ("model.dtype", "bfloat16"),
    "fp16": ("model.dtype", "float16"),
    "fp32": ("model.dtype", "float32"),
    "lora_target_linear": ("adapter.targets", "all-linear"),
    "apply_lora_to_mlp": ("adapter.targets", "all-linear"),
    "target_parameters": ("adapter.experts", "true"),
    "lora_target_parameters": ("adapter.experts", "true"),
    "train_norms": ("adapter.modules_to_save", "[norms]"),
    "train_router": ("adapter.modules_to_save", "[router]"),
    **dict.fromkeys(("packed", "sample_packing", "neat_packing"), ("data.packing", "on")),
    "padding_free": ("data.packing", "on"),
    "train_on_inputs": ("data.loss_on", "all"),
    "train_on_input": ("data.loss_on", "all"),
    "train_on_responses_only": ("data.loss_on", "assistant"),
    "train_on_prompt": ("data.loss_on", "all"),
    "assistant_only_loss": ("data.loss_on", "assistant"),
    "completion_only_loss": ("data.loss_on", "assistant"),
    "precompute_ref_log_probs": ("objective.reference", "precomputed"),
    "global_batch_size": ("train.tokens_per_step", "49152"),
    "train_batch_size": ("train.tokens_per_step", "49152"),
    "auto_find_batch_size": ("train.micro_batch_size", "auto"),
    "communication_data_type": ("train.reduce_dtype", "bf16"),
    "lr_scheduler_kwargs": ("train.num_cycles", "4"),
    "load_best_model_at_end": ("output.best_checkpoint", "use"),
    "metric_for_best_model": ("output.best_checkpoint", "keep"),
    "greater_is_better": ("output.best_checkpoint", "keep"),
    "evaluation_strategy": ("output.eval_every", "50"),
    "eval_strategy": ("output.eval_every", "50"),
    "save_strategy": ("output.checkpoint_every", "50"),
    "evals_per_epoch": ("output.eval_every", "50"),
    "saves_per_epoch": ("output.checkpoint_every", "50"),
    "wandb": ("report.log_to", "[wandb]"),
    "use_wandb": ("report.log_to", "[wandb]"),
    "wandb_project": ("report.log_to", "[wandb]"),
    "use_tensorboard": ("report.log_to", "[tensorboard]"),
    "logging_dir": ("report.log_to", "[tensorboard]"),
    "metric_logger": ("report.log_to", "[tensorboard]"),
    "profiler": ("report.profile", "3"),
    "cpu_offload": ("offload.num_slots", "auto"),
    "offload_param": ("offload.num_slots", "auto"),
    "offload_layers": ("offload.num_slots", "auto"),
    "blocks_to_swap": ("offload.num_slots", "auto"),
    "device_map": ("offload.device", "auto"),
    "max_memory": ("offload.vram_budget", "auto"),
    "gpu_memory_utilization": ("offload.vram_budget", "auto"),
    "activation_offloading": ("offload.stash", "host"),
    "enable_activation_offloading": ("offload.stash", "host"),
    "offload_folder": ("offload.tier", "disk"),
}

_RESUME = "`--resume` on the command line continues the run"
_LAUNCH = "how processes are started is the launcher's: `accelerate launch --multi_gpu`"
_PACK = "each row is a sequence of its own; rows of like length share a micro-batch"
_ATTENTION = "torch's fused attention is taken wherever the model allows it"
_KERNELS = "the engine has its own head, chunk by chunk, and expert kernels"
_BETAS = "betas and epsilon are the optimizer's own defaults"
_TEMPLATE = "the chat template is the tokenizer's"
_FULL = "with train.what: all every weight is updated in RAM, by a whole gradient"
_SHARD = "layers are streamed from RAM instead of sharded; several GPUs share a step"
_HUB = "nothing is uploaded: `hf upload` takes the adapter's folder"
_LOSS = "the loss is cross-entropy of the next token"
_STEPS = "every step's figures are in metrics.jsonl"
_MIXED = "weights compute in model.dtype: bfloat16, float16 or float32"
_REFERENCE = "the reference is the model without its adapter, or its log-probabilities"
_GROUPS = "objective.loss decides what advantages are divided by and what a ratio is of"
_REWARD = "rows bring their rewards; no model of rewards is trained or asked"
_SAMPLER = "answers are sampled by another program and are in the rows, with their rewards"
_DIVERGENCE = "rewards are log-probabilities over the reference's, one loss at a time"

# Word -> why nothing here does it, or what does it without a setting.
UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("eval_packing", "eval_sample_packing"), _PACK),
    **dict.fromkeys(("pad_to_sequence_len", "group_by_length", "pad_to_multiple_of"), _PACK),
    **dict.fromkeys(("flash_attention", "flash_attn", "xformers_attention"), _ATTENTION),
    **dict.fromkeys(("sdp_attention", "attn_implementation", "use_flash_attention_2"), _ATTENTION),
    **dict.fromkeys(("use_liger_kernel", "liger_kernel", "use_unsloth", "plugins"), _KERNELS),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon", "betas", "eps"), _BETAS),
    **dict.fromkeys(("optim_args", "optimizer_kwargs", "fused"), _BETAS),
    **dict.fromkeys(("chat_template", "template", "chat_template_path"), _TEMPLATE),
    **dict.fromkeys(("special_tokens", "add_special_tokens", "eos_token"), _TEMPLATE),
    **dict.fromkeys(("use_galore", "galore_rank", "badam"), _FULL),
    **dict.fromkeys(("deepspeed", "zero_optimization", "zero_stage", "fsdp"), _SHARD),
    **dict.fromkeys(("fsdp_config", "fsdp_transformer_layer_cls_to_wrap"), _SHARD),
    **dict.fromkeys(("tensor_parallel_size", "context_parallel_size", "pipeline"), _SHARD),
    **dict.fromkeys(("sequence_parallel_degree", "offload_optimizer"), _SHARD),
    **dict.fromkeys(("num_processes", "num_gpus", "ddp", "local_rank", "ddp_timeout"), _LAUNCH),
    **dict.fromkeys(("ddp_find_unused_parameters", "distributed_type"), _LAUNCH),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token", "hub_strategy"), _HUB),
    **dict.fromkeys(("label_smoothing_factor",), _LOSS),
    **dict.fromkeys(("average_tokens_across_devices", "importance_loss_coef"), _LOSS),
    **dict.fromkeys(("logging_steps", "log_every_n_steps", "logging_strategy"), _STEPS),
    **dict.fromkeys(("logging_first_step", "plot_loss", "log_level"), _STEPS),
    **dict.fromkeys(("half", "mixed_precision", "amp"), _MIXED),
    **dict.fromkeys(("ref_model", "reference_free", "ref_model_adapters"), _REFERENCE),
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _REFERENCE
    ),
    **dict.fromkeys(("reward_model", "reward_funcs", "reward_weights"), _REWARD),
    **dict.fromkeys(("num_generations", "use_vllm", "num_iterations"), _SAMPLER),
    **dict.fromkeys(
        ("f_divergence_type", "ld_alpha", "use_weighting", "loss_weights"), _DIVERGENCE
    ),
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), _RESUME),
    **dict.fromkeys(("resume", "checkpointer"), _RESUME),
    **dict.fromkeys(("scale_rewards", "importance_sampling_level"), _GROUPS),
    "gamma_beta_ratio": "objective.gamma is this times objective.beta",
    "discopop_tau": "it is 0.05",
    "max_completion_length": "`dr_grpo` divides by train.seq_len",
    "overwrite_output_dir": "`--overwrite` on the command line replaces a run",
    "do_train": "`sluice finetune` trains",
    "do_eval": "losses on held-out rows are taken where output.eval_every is set",
    "do_predict": "`sluice generate RUN_DIR --prompt TEXT` asks the trained model",
    "tf32": "matrices are multiplied in model.dtype",
    "bias": "biases stay as they are: no common format of adapters trains them",
    "task_type": "a recipe trains a causal language model",
    "init_lora_weights": "A is drawn, B is zero, and training starts at the base model",
    "loftq_config": "A is drawn, B is zero, and training starts at the base model",
    "pissa_init": "A is drawn, B is zero, and training starts at the base model",
    "layers_to_transform": "adapters are on all layers",
    "layers_pattern": "adapters are on all layers",
    "lora_on_cpu": "an adapter stays on the device",
    "embedding_lr": "all that trains has one rate, but for LoRA's B (adapter.loraplus_ratio)",
    "embedding_learning_rate": "all has one rate, but for LoRA's B (adapter.loraplus_ratio)",
    "cosine_min_lr_ratio": "every schedule but constant falls to 0",
    "min_lr_ratio": "every schedule but constant falls to 0",
    "min_lr": "every schedule but constant falls to 0",
    "lr_end": "every schedule but constant falls to 0",
    "ema_decay": "no average of weights is kept; output.best_checkpoint keeps the best",
    "formatting_func": "a row is a conversation or a prompt and its completion",
    "dataset_prepared_path": "tokens are kept in ~/.cache/sluice by themselves",
    "overwrite_cache": "tokens are kept by the content of the rows, so none are stale",
    "shuffle": "rows are reshuffled every epoch, by train.seed",
    "streaming": "rows are read once and kept as tokens",
    "remove_unused_columns": "columns that no format reads have no effect",
    "mask_history": "all of the assistant's turns have a loss",
    "dataloader_pin_memory": "micro-batches are small; layers are page-locked as far as may be",
    "dataloader_prefetch_factor": "two steps are prepared ahead",
    "dataloader_drop_last": "the last rows of an epoch share a step with the next epoch",
    "per_device_eval_batch_size": "held-out rows run in micro-batches of train.micro_batch_size",
    "eval_batch_size": "held-out rows run in micro-batches of train.micro_batch_size",
    "eval_accumulation_steps": "held-out rows run in micro-batches of train.micro_batch_size",
    "torch_empty_cache_steps": "device memory is planned before the first step",
    "save_safetensors": "weights are always safetensors",
    "save_only_model": "a checkpoint is all that a resume needs",
    "merge_lora": "`sluice merge RUN_DIR --out DIR`",
    "export_dir": "`sluice merge RUN_DIR --out DIR`",
    "trust_remote_code": "no code of a model's repository is run",
    "use_fast_tokenizer": "the tokenizer is the one that transformers takes",
    "low_cpu_mem_usage": "layers are always loaded one by one",
    "rope_scaling": "it is the model's config's: `rope_scaling` there",
    "sliding_window": "it is the model's config's: `sliding_window` there",
}


# ---------------------------------------------------------------------------------------------
# Model shapes: the fields of a Hugging Face config, without weights.
#
# Shipped shapes are YAML files in `recipes/shapes`, one for each published model, so that a plan
# can be made for a model that was never downloaded. A shape may also be a config.json of the user's
# own.


class _Config(BaseModel):
    model_type: Annotated[str, Field(min_length=1, max_length=100)]


_CONFIG = JsonFile(
    holds=_Config,
    error=ConfigError,
    limit="a shape is the JSON or YAML of a causal language model's config, with its model_type",
    hint="`model.config: tiny-qwen3`, or download the model's config.json again",
)
_COUNTS = re.compile(r"^(?!.*(size|dim|norm)).*(layer|block|expert|depth)")
_PUBLISHED = re.compile(r"# Published as (\S+) on Hugging Face")
_FLOAT, _FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")
"""How transformers writes floats for which JSON has no form."""
MAX_PARTS, MAX_NUMBER = 20_000, 2**48
SHIPPED_FACTS = "shapes/facts.json"
_NO_SHAPE = re.compile(
    r"(vision|audio)_config|(.*\.)?(architectures|attention_dropout|auto_map|\w*dtype|\w*initializer"
    r"_range|\w*_token_(id|index)|language_model_only|max_window_layers|mtp_.*|norm_topk_prob"
    r"|num_nextn_predict_layers|pretraining_tp|router_aux_loss_coef"
    r"|transformers_version|use_cache)"
)
"""Fields of a config that do not change what text passes through."""


@cache
def shipped_shapes() -> Mapping[str, Path]:
    """Return the name and path of every shipped shape, by name."""
    return {path.stem: path for path in sorted((recipes_dir() / "shapes").glob("*.yaml"))}


@cache
def published_ids() -> Mapping[str, str]:
    """Return the hub id of each shipped shape that is published, which its first line names."""
    found = {name: _PUBLISHED.match(path.read_text()) for name, path in shipped_shapes().items()}
    return {name: match[1] for name, match in found.items() if match}


def shape_of_id(hub_id: str) -> str | None:
    """Return the shipped shape of a hub id: by its last part, or as what it was published."""
    name = hub_id.rpartition("/")[2].lower()
    if name in shipped_shapes():
        return name
    return next((shape for shape, known in published_ids().items() if known == hub_id), None)


def shape_of(config: Mapping[str, Any]) -> str | None:
    """Return the shipped shape of which a config is, with fields at most that change no shape."""
    fields = _sized(config)
    given = {key for key, value in fields.items() if value}
    for name, shape in _shapes().items():
        if shape.items() <= fields.items() and given <= shape.keys():
            return name
    return None


def _sized(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a config and of its parts that may size something, by dotted name."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not _NO_SHAPE.fullmatch(prefix + key):
            is_part = key == "text_config" and isinstance(value, Mapping)
            found |= _sized(value, f"{key}.") if is_part else {prefix + key: value}
    return found


@cache
def _shapes() -> Mapping[str, Mapping[str, Any]]:
    return {name: _sized(load_shape(name)) for name in shipped_shapes()}


@cache
def shipped_facts() -> Mapping[str, Any]:
    """Return the facts of every shipped shape as JSON, by name: `ModelFacts.from_json` reads them.

    `make generate` writes them, from the models that are built.
    """
    found: Mapping[str, Any] = json.loads((recipes_dir() / SHIPPED_FACTS).read_text("utf-8"))
    return found


def named_shape(name: str) -> str:
    """Return the shipped shape that a loose name means: `Qwen3 30B`, or the only one that fits.

    Raises:
        ConfigError: None or several fit.
    """
    ids, wanted = published_ids(), _plain(name.rpartition("/")[2])
    known = {shape: {_plain(shape), _plain(ids.get(shape, "").rpartition("/")[2])} for shape in ids}
    exact = [shape for shape, names in known.items() if wanted in names]
    fits = exact or [
        shape for shape, names in known.items() if any(one.startswith(wanted) for one in names)
    ]
    if wanted and len(fits) == 1:
        return fits[0]
    near = fits or difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    raise ConfigError(
        f"{name} means several models" if fits and wanted else f"{name} is no model that is known",
        limit=f"shipped are {', '.join(ids)}",
        hint=f"{', '.join(f'`{one}`' for one in near) or '`qwen3-8b`'}, the folder of a model, or a"
        " hub id in the cache",
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_shape(name_or_path: str) -> Path:
    """Return the file of a shape.

    Args:
        name_or_path: A shipped name, a YAML or JSON file, or a directory that holds a config.json.

    Raises:
        ConfigError: There is no such shape and no such file.
    """
    shapes = shipped_shapes()
    if name_or_path in shapes:
        return shapes[name_or_path]
    path = expanded(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    near = difflib.get_close_matches(name_or_path.lower(), shapes, n=3)
    raise ConfigError(
        f"{name_or_path} is not a model shape",
        limit="a shape is a shipped name or the path of a config.json",
        hint="`model.config: "
        + (near[0] if near else "tiny-qwen3")
        + "`; shipped are "
        + ", ".join(near or shapes),
    )


def load_shape(name_or_path: str) -> dict[str, Any]:
    """Read the config fields of a shape, as transformers' `from_pretrained` reads them.

    Args:
        name_or_path: A shipped name, a YAML or JSON file, or a directory that holds a config.json.

    Raises:
        ConfigError: There is no such shape, or its file does not hold a model's config.
    """
    shape: dict[str, Any] = _with_floats(published_shape(name_or_path))
    if shape["model_type"] == "mistral" and "layer_types" in shape:
        shape["model_type"] = "ministral"
    return shape


def published_shape(name_or_path: str) -> dict[str, Any]:
    """Read the config fields of a shape as they are in its file; see `load_shape`."""
    path = find_shape(name_or_path)
    content = _CONFIG.content(path)
    if path.suffix == ".yaml":
        content = _as_json(content, path)
    shape: dict[str, Any] = _CONFIG.parsed(content, source=str(path))
    _require_countable(shape, path)
    return shape


def _with_floats(value: Any) -> Any:
    """Return a value with floats that are not finite in place of transformers' form of them."""
    if isinstance(value, dict):
        tagged = value.get(_FLOAT) if len(value) == 1 else None
        if isinstance(tagged, str) and tagged in _FLOATS:
            return float(tagged)
        return {name: _with_floats(part) for name, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


@lru_cache(maxsize=32)  # a plan reads its shape for each size of micro-batch; YAML takes longest
def _as_json(content: bytes, path: Path) -> bytes:
    try:
        return json.dumps(yaml.load(content, Loader=CoreLoader)).encode()
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise _CONFIG.refusal(str(path), f"it is not YAML: {error}") from error


def _require_countable(value: object, path: Path, key: str = "") -> None:
    """Refuse numbers that no model has, before anything of that size is built.

    Raises:
        ConfigError: The shape has such a number.
    """
    if isinstance(value, dict):
        for name, part in value.items():
            _require_countable(part, path, name)
    elif isinstance(value, list):
        for part in value:
            _require_countable(part, path, key)
    elif isinstance(value, int):
        most = MAX_PARTS if _COUNTS.search(key) else MAX_NUMBER
        if abs(value) > most:
            raise ConfigError(
                f"{path}: {key[:80]} is {value if abs(value) < 2**64 else 'above 2**64'}",
                limit=f"it can be at most {most:,}",
                hint=f"correct `{key[:80]}` in {path.name}",
            )


PATH_FIELDS = (
    "model.path",
    "model.tokenizer",
    "adapter.init_from",
    "data.path",
    "data.eval_path",
)
RUN_RECIPE, RUN_CHECKPOINTS, RUN_METRICS = "recipe.yaml", "checkpoints", "metrics.jsonl"
MAX_RECIPE_BYTES = 100_000  # thirty times the longest shipped one
FILE_SUFFIXES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".csv",
    ".txt",
    ".md",
    ".yaml",
    ".zst",
    ".gz",
    ".arrow",
)


def load_recipe(source: str, overrides: Sequence[str], *, check_files: bool = True) -> Recipe:
    """Read, complete and check a recipe.

    Args:
        source: Path of a recipe, or the name of a shipped one.
        overrides: `section.field=value` settings that take precedence over the file's.
        check_files: Refuse paths that can only be local and are missing. A plan needs no data.

    Raises:
        ConfigError: Anything is wrong; all problems are in the one error.
    """
    path = _find_recipe(source)
    text = _read_text(path)
    draft = read_draft(str(_shown_path(path)), text)
    output = draft.values.get("output")
    if isinstance(output, dict) and _is_in_run(path, text):
        is_named = any(word.partition("=")[0] == "output.name" for word in overrides)
        output["dir"] = None if is_named else str(_shown_path(path.parent))
    apply_overrides(draft, overrides, rivals=RIVALS)
    return recipe_from(draft, path.parent, check_files=check_files)


def is_of_run(source: str) -> bool:
    """Whether a recipe, which is there, is that of a run, in the run's directory."""
    path = _find_recipe(source)
    return _is_in_run(path, _read_text(path))


def _is_in_run(path: Path, text: str) -> bool:
    """Whether a recipe is where a run wrote it; one that was edited has lost its seal."""
    has_run = path.name == RUN_RECIPE and _exists(path.parent / RUN_CHECKPOINTS)
    return has_run and (has_yaml_seal(text) or _exists(path.parent / RUN_METRICS))


def is_recipe(word: str) -> bool:
    """Whether a word of the command line names a recipe: a YAML file, or a shipped one."""
    return "=" not in word and (word.endswith((".yaml", ".yml")) or word in shipped_recipes())


def recipe_from(draft: Draft, folder: Path, *, check_files: bool) -> Recipe:
    """Complete and check a draft.

    Args:
        draft: Settings as they were written, those of the command line among them.
        folder: Where its relative paths start.
        check_files: Refuse paths that can only be local and are missing.

    Raises:
        ConfigError: Anything is wrong; all problems are in the one error.
    """
    _resolve_paths(draft, folder, check_files=check_files)
    _check_command(draft, check_files=check_files)
    recipe = _check(draft)
    if recipe is None or draft.problems:
        raise joint_error(draft.problems)
    return recipe


# ---------------------------------------------------------------------------------------------
# Files


def _find_recipe(source: str) -> Path:
    """Return the file that a path or a shipped name means."""
    path = expanded(source)
    if _exists(path) and not path.is_dir():
        return path
    shipped = shipped_recipes()
    if source.removesuffix(".yaml") in shipped:
        return shipped[source.removesuffix(".yaml")]
    if _exists(path):
        raise ConfigError(
            f"{source} is a directory",
            limit="a recipe is a YAML file or the name of a shipped one",
            hint=f"`{Path(source) / RUN_RECIPE}`, or one of {', '.join(shipped)}",
        )
    near_names = difflib.get_close_matches(path.stem, shipped, n=1)
    near_files = _near_files(path, suffix=".yaml")
    near = [*near_files, *near_names]
    raise ConfigError(
        f"there is no recipe {source}",
        limit="a recipe is the path of a YAML file or the name of a shipped one",
        hint=f"`{near[0]}`" if near else f"one of {', '.join(shipped)}",
    )


_ROWS = (".jsonl", ".csv", ".parquet")


def _read_text(path: Path) -> str:
    """Return the text of a recipe file."""
    if path.suffix in _ROWS:
        raise ConfigError(
            f"{path} holds rows, and no recipe",
            limit="a recipe is a YAML file that names its rows by `data.path`",
            hint=f"`sluice init --model MODEL --data {path}` writes one for them",
        )
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_RECIPE_BYTES or not path.is_file():
            raise ConfigError(
                f"{path} cannot be read: it has {num_bytes:,} bytes"
                if path.is_file()
                else f"{path} cannot be read: it is no file",
                limit=f"a recipe is a file of at most {MAX_RECIPE_BYTES:,} bytes",
                hint="`sluice recipes show quickstart` prints one to start from",
            )
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{path} cannot be read: {reason}",
            limit="a recipe is a readable YAML file in UTF-8",
            hint="`sluice recipes show quickstart` prints one to start from",
        ) from error


def _resolve_paths(draft: Draft, recipe_dir: Path, *, check_files: bool) -> None:
    """Make the paths of a draft absolute if they exist."""
    for path_field in PATH_FIELDS:
        section_name, _, key = path_field.partition(".")
        section = draft.values.get(section_name)
        value = section.get(key) if isinstance(section, dict) else None
        if not isinstance(section, dict) or not isinstance(value, str) or not value:
            continue
        _resolve(draft, section, key, path_field, recipe_dir, check_files=check_files)
    section = draft.values.get("data")
    entries = section.get("mix") if isinstance(section, dict) else None
    for number, entry in enumerate(entries if isinstance(entries, list) else ()):
        value = entry.get("path") if isinstance(entry, dict) else None
        if isinstance(value, str) and value:
            where = f"data.mix[{number}].path"
            _resolve(draft, entry, "path", where, recipe_dir, check_files=check_files)
    _resolve_config(draft, recipe_dir)


def _resolve(
    draft: Draft,
    holder: dict[str, Any],
    key: str,
    where: str,
    recipe_dir: Path,
    *,
    check_files: bool,
) -> None:
    """Make one path absolute if it exists, else note that it does not where it is no hub id.

    Args:
        draft: The recipe.
        holder: The section, or the entry of a mix, that has the path.
        key: Its name there.
        where: Its name in errors.
        recipe_dir: Of the recipe's file.
        check_files: Whether a path that does not exist is a problem.
    """
    value, of_setting = holder[key], where.partition("[")[0]
    bases = _bases(draft, of_setting, recipe_dir)
    found = _find_path(value, bases)
    if found is not None:
        holder[key] = found
    elif where == "model.path" and check_files and "/" not in value:
        if value not in shipped_shapes():
            _note_no_model(draft, value, bases)
    elif check_files and _is_local(value):
        near = _near_files(bases[-1] / expanded(value), suffix="")
        shown_key = where if where == of_setting else key
        draft.add_problem(
            draft.place(of_setting),
            f"{where} is {shown(value)}, and there is no such file",
            limit=f"it has to exist in {' or '.join(dict.fromkeys(map(str, bases)))}",
            hint=f"`{shown_key}: {near[0] if near else Path('FOLDER') / Path(value).name}`",
        )


def _note_no_model(draft: Draft, value: str, bases: Sequence[Path]) -> None:
    """Note a model's path that is one word, and neither a folder nor a shipped shape."""
    ids = published_ids()
    near = difflib.get_close_matches(value.lower(), ids, n=3)
    shapes = f"the nearest are {', '.join(near)}" if near else "`sluice recipes list` has them"
    place = draft.place("model.path")
    draft.add_problem(
        place,
        f"model.path is {shown(value)}, and there is no such folder in"
        f" {' or '.join(dict.fromkeys(map(str, bases)))}",
        limit=f"it is a model's folder, a hub id such as owner/name, or a shipped shape: {shapes}",
        hint=_setting(place, "model.path", ids[near[0]] if near else "Qwen/Qwen3-0.6B"),
    )


def _check_command(draft: Draft, *, check_files: bool) -> None:
    """Note a `report.notify` that cannot be called: it is words, the first of them a program."""
    section = draft.values.get("report")
    command = section.get("notify") if isinstance(section, dict) else None
    if not isinstance(command, str) or not command.strip():
        return  # the field has its own rules
    try:
        program = shlex.split(command)[0]
    except ValueError as error:
        draft.add_problem(
            draft.place("report.notify"),
            f"report.notify is {shown(command)}: {str(error).lower()}",
            limit="it is read as words, as a shell reads them",
            hint="close the quotes; for pipes, `report.notify: sh -c '...'`",
        )
        return
    if check_files and shutil.which(program) is None:
        draft.add_problem(
            draft.place("report.notify"),
            f"report.notify is {shown(command)}, and there is no program {program}",
            limit="it has to be on the PATH, or an executable file from the current directory",
            hint=f"`report.notify: curl -s -d @- {program}`"
            if "://" in program
            else "install it, or give its path (`chmod +x` on a script), or `report.notify: null`",
        )


def _resolve_config(draft: Draft, recipe_dir: Path) -> None:
    """Make model.config absolute if it is a file, else check that it is a shipped shape."""
    section = draft.values.get("model")
    value = section.get("config") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(value, str) or not value:
        return
    if value in shipped_shapes():
        return
    found = _find_path(value, _bases(draft, "model.config", recipe_dir))
    if found is not None:
        section["config"] = found
        return
    try:
        find_shape(value)
    except ConfigError as error:
        draft.add_problem(
            draft.place("model.config"),
            f"model.config is {shown(value)}: {error.what}",
            limit=error.limit,
            hint=error.hint,
        )


def _bases(draft: Draft, field: str, recipe_dir: Path) -> tuple[Path, ...]:
    """Return the directories in which a field's relative path is looked for."""
    here = Path.cwd()
    return (here,) if draft.place(field).is_override else (recipe_dir.absolute(), here)


def _find_path(value: str, bases: Sequence[Path]) -> str | None:
    """Return the absolute path of the first base in which a path exists, its `:split` kept."""
    name, colon, split = value.partition(":")
    for base in bases:
        for text, rest in ((value, ""), (name, f"{colon}{split}")):
            candidate = base / expanded(text)
            if text and _exists(candidate):
                # Path.resolve would follow links, and a hub cache links to files without a suffix.
                return f"{os.path.abspath(candidate)}{rest}"  # noqa: PTH100
    return None


def _is_local(value: str) -> bool:
    """Whether a path cannot be the id of a hub repository."""
    return (
        value.startswith((".", "/", "~")) or value.count("/") > 1 or value.endswith(FILE_SUFFIXES)
    )


def _exists(path: Path) -> bool:
    """Whether there is something at a path that this user can see."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or a folder that may not be read
        return False


def _near_files(path: Path, *, suffix: str) -> list[str]:
    """Return the paths next to a missing one that have similar names."""
    folder = path.parent
    try:
        names = [entry.name for entry in folder.iterdir() if entry.name.endswith(suffix)]
    except (OSError, ValueError):
        return []
    near = difflib.get_close_matches(path.name, names, n=2)
    return [str(_shown_path(folder / name)) for name in near]


def _shown_path(path: Path) -> Path:
    """Return a path as short as it can be written from the current directory."""
    absolute, here = path.absolute(), Path.cwd()
    return absolute.relative_to(here) if absolute.is_relative_to(here) else path


# ---------------------------------------------------------------------------------------------
# Checks


def _check(draft: Draft) -> Recipe | None:
    """Check a draft against fields and rules; note every problem and fix it to find more."""
    for name in sections():
        if draft.values.get(name) is None:
            draft.values[name] = {}  # absent, or all of its settings are commented out
    fixed: set[str] = set()
    while True:
        try:
            return Recipe.model_validate(draft.values)
        except ValidationError as error:
            details = error.errors(include_url=False)
        if details[0]["type"] == "rules":
            _note_breaches(draft, details[0]["ctx"]["breaches"], fixed)
            return None
        for detail in details:
            _note(draft, detail, fixed)


def _note(draft: Draft, detail: "ErrorDetails", fixed: set[str]) -> None:
    """Note what pydantic has found wrong, and fix it."""
    if detail["loc"][:2] == ("data", "mix") and len(detail["loc"]) > 2:
        _note_wrong_source(draft, detail["loc"][2:], detail["input"], fixed)
        return
    section_name, key = ["", *map(str, detail["loc"][:2])][-2:]
    path = f"{section_name}.{key}" if section_name else key
    if detail["type"] == "extra_forbidden":
        _note_unknown(draft, section_name, key)
    elif detail["type"] == "refusal":
        _note_refusal(draft, key, fixed, **detail["ctx"])
    elif path not in fixed:
        fixed.add(path)
        _note_wrong(draft, path)


def _note_breaches(draft: Draft, breaches: Sequence[Breach], fixed: set[str]) -> None:
    """Note the broken rules, except those that read a setting or a section that was fixed."""
    for breach in breaches:
        read = {breach.field, breach.field.partition(".")[0], *breach.reads}
        if fixed.isdisjoint(read):
            draft.add_problem(
                draft.place(breach.field), breach.what, limit=breach.limit, hint=breach.hint
            )


def _note_refusal(
    draft: Draft, section: str, fixed: set[str], *, field: str, what: str, limit: str, hint: str
) -> None:
    """Note settings of a section that contradict each other, and leave its choice alone."""
    draft.add_problem(draft.place(f"{section}.{field}"), what, limit=limit, hint=hint)
    fixed |= {section, f"{section}.{field}"}
    draft.values[section] = {"method": draft.values[section]["method"]}


def _note_wrong(draft: Draft, path: str) -> None:
    """Note a section that is not a mapping, or a setting that is missing or wrong, and fix it."""
    if is_section(path):
        draft.add_problem(
            draft.place(path),
            f"{path} is {shown(draft.values[path])}",
            limit=f"{path} is a section, with settings such as {', '.join(settings(path)[:3])}",
            hint=f"`{path}:` and below it, indented, `{settings(path)[0]}: ...`",
        )
        draft.values[path] = {}
        return
    section_name, _, key = path.partition(".")
    section = draft.values[section_name]
    schema = field_schema(path, choice_of(section_name, section))
    value = example(schema)
    if key in section:
        seen, near = f"is {shown(section[key])}", near_value(section[key], schema)
    else:
        seen, near = "is not set", None
    meant = (path, near or value)
    if section.get(key) == "full" and path in ("adapter.method", "train.what"):
        meant = ALL_WEIGHTS
    draft.add_problem(
        draft.place(path),
        f"{path} {seen}",
        limit=f"it must be {describe(schema)}",
        hint=_setting(draft.place(path), *meant),
    )
    section[key] = value


def _note_wrong_source(
    draft: Draft, place: Sequence[int | str], value: Any, fixed: set[str]
) -> None:
    """Note what is wrong in an entry of `data.mix`, and fix the whole list to find more.

    Args:
        draft: The recipe.
        place: The entry's number, and the setting in it if it is one that is wrong.
        value: What is there.
        fixed: Settings that were fixed; gets `data.mix`.
    """
    number, *keys = place
    path = f"data.mix[{number}]" + (f".{keys[0]}" if keys else "")
    names, entry = list(MixSource.model_fields), draft.values["data"].get("mix") or [{}]
    known = not keys or keys[0] in names
    given = entry[number] if isinstance(number, int) and number < len(entry) else None
    is_missing = bool(keys) and isinstance(given, dict) and keys[0] not in given
    limits = {
        "weight": "it must be a number above 0",
        "path": "it must be a file, a directory or a hub id",
        "max_rows": "it must be a whole number of at least 1",
    }
    limit = limits.get(str(keys[0]) if keys else "", f"an entry has {', '.join(names)}")
    hint = "`- {path: data/train.jsonl, weight: 1}`"
    if keys and keys[0] == "weight":
        hint = "leave the entry out, or `weight: 1`"
    elif not known:
        near = difflib.get_close_matches(str(keys[0]), names, n=1)
        hint = f"use `{near[0]}`" if near else f"remove `{keys[0]}`"
    seen = "is not set" if is_missing else f"is {shown(value)}"
    draft.add_problem(
        draft.place("data.mix"),
        f"{path} {seen}" if known else f"{path} is not a setting",
        limit=limit,
        hint=hint,
    )
    if "data.mix" not in fixed:
        fixed.add("data.mix")
    draft.values["data"]["mix"] = field_schema("data.mix")["examples"][0]


def _note_unknown(draft: Draft, section_name: str, key: str) -> None:
    """Note a key that no recipe has, and read it as its nearest neighbour if that is not set.

    Args:
        draft: The recipe.
        section_name: The section that holds the key; empty for a key at the top level.
        key: The unknown key.
    """
    path = f"{section_name}.{key}" if section_name else key
    holder = draft.values[section_name] if section_name else draft.values
    place, value, word = draft.place(path), holder.pop(key), plain(key)
    words = renamed()
    word = f"{section_name}.{word}" if f"{section_name}.{word}" in words else word
    meant = words.get(word) or near_path(section_name, key)
    if meant == path and "." not in key:  # of a choice that is not the section's
        meant = None
    owner = section_with_method(value)
    if owner is not None and word not in (*words, *UNSUPPORTED, *REPLACED):
        meant = f"{owner}.method"
    choice = choice_of(section_name, draft.values[section_name]) if section_name else ""
    others = choices_with(section_name, key, value) if choice else []
    if others:
        also = f" ({', '.join(others[1:])} have it too)" if others[1:] else ""
        draft.add_problem(
            place,
            f"{path} is {shown(value)} and {section_name}.method is {choice}",
            limit=f"{choice} has {', '.join(settings(section_name, choice))}",
            hint=f"leave `{path}` out, or `{section_name}.method: {others[0]}`{also}",
        )
        return
    if word in UNSUPPORTED:
        limit, hint = f"not supported: {UNSUPPORTED[word]}", f"remove `{key}`"
    elif value == "full" or word in REPLACED:
        meant, other = ALL_WEIGHTS if value == "full" else REPLACED[word]
        equals = "=" if place.is_override else ": "
        limit, hint = f"here it is {meant}", f"use `{meant}{equals}{other}`"
    elif word in words:
        assert meant is not None
        paths = _listed_paths(value) if meant == "data.path" else []
        value = paths[0] if paths else value
        limit, hint = f"here it is {meant}", f"use {_setting(place, meant, value)}"
        if len(paths) > 1:
            limit = "here it is data.mix"
            hint = f"`data.mix:` and below it, for each, `- {{path: {paths[0]}, weight: 1}}`"
        _move(draft, value, path, meant)
    elif meant is None:
        own = settings(section_name) if section_name else sections()
        owner = f"the section {section_name}" if section_name else "a recipe"
        limit, hint = f"{owner} has {', '.join(own)}", f"remove `{key}`"
    elif meant == path:
        section, _, setting = meant.partition(".")
        limit = f"in a file, {setting} is in the section {section}"
        hint = f"`{section}:` and below it, indented, `{setting}: {written(value)}`"
        _move(draft, value, path, meant)
    else:
        limit, hint = f"the nearest is {meant}", _setting(place, meant, value)
        _move(draft, value, path, meant)
    draft.add_problem(place, f"{path} is not a setting", limit=limit, hint=hint)


def _listed_paths(value: Any) -> list[str]:
    """Return the paths of Axolotl's list of data sets; none if it is no such list."""
    entries = value if isinstance(value, list) else []
    found = (entry.get("path") if isinstance(entry, dict) else entry for entry in entries)
    paths = [path for path in found if isinstance(path, str)]
    return paths if len(paths) == len(entries) else []


def _setting(place: Place, path: str, value: Any) -> str:
    """Write a setting as it is written at a place: in a recipe, or on the command line."""
    is_of_section = isinstance(value, dict) and not path.count(".")
    if is_of_section and not place.is_override:
        return f"`{path}:`"
    if is_of_section:
        return " ".join(f"`{path}.{key}={written(item)}`" for key, item in value.items())
    return f"`{path}={written(value)}`" if place.is_override else f"`{path}: {written(value)}`"


def _move(draft: Draft, value: Any, path: str, meant: str) -> None:
    """Move the value of a misspelt key to the intended setting, unless that is set."""
    section_name, dot, key = meant.partition(".")
    holder = draft.values[section_name] if dot else draft.values
    if isinstance(value, dict) == bool(dot) or not isinstance(holder, dict):
        return
    if holder.get(key or meant) not in (None, {}):
        return
    holder[key or meant] = value
    for place_path, place in list(draft.places.items()):
        if place_path == path or place_path.startswith(f"{path}."):
            draft.places[meant + place_path.removeprefix(path)] = place


def copy_recipe(name: str, to: Path) -> list[Path]:
    """Copy a recipe, and the files that it names to the same places relative to the copy.

    Returns:
        The recipe's copy, then the files copied with it; an existing file is left unchanged.

    Raises:
        ConfigError: There is no such recipe, or another file is where one would be written.
    """
    source = shipped_recipe(name)
    pairs = [(source.parent / path, to.parent / path) for path in _named_files(source)]
    missing = [(file, target) for file, target in pairs if not target.exists()]
    changed = [
        target
        for file, target in pairs
        if target.exists() and not (target.is_file() and cmp(file, target, shallow=False))
    ]
    for taken in [to] if to.exists() else changed:
        raise ConfigError(f"{taken} exists", hint="name a file in a new folder")
    for file, target in missing:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    to.write_text(source.read_text())
    return [to, *(target for _, target in missing)]


def _named_files(recipe: Path) -> list[Path]:
    """Return the files that a recipe names relative to its own folder; those of named folders."""
    values = read_draft(str(recipe), recipe.read_text()).values
    found: list[Path] = []
    for path_field in PATH_FIELDS:
        section, _, key = path_field.partition(".")
        value = values.get(section, {}).get(key)
        path = recipe.parent / value if isinstance(value, str) else None
        if path is None or not path.exists():
            continue
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [file.relative_to(recipe.parent) for file in files if file.is_file()]
    return found
