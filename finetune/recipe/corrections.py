"""What is wrong with the settings of a recipe, in words, and what was meant by them.

This is imported where something is wrong. The tables have the setting names of other trainers: our
setting for each, or why there is none. The words are those of transformers and TRL, peft, Unsloth,
Axolotl, LLaMA-Factory, torchtune, DeepSpeed and accelerate. A word is in one table: RENAMED where a
setting of ours has the same values, REPLACED where it takes another value or several words make one
setting, UNSUPPORTED where nothing here does the same. A word that is a setting here, under any
section, is in none of them.
"""

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from finetune.recipe.capabilities import Breach
from finetune.recipe.draft import Draft, as_setting
from finetune.recipe.extensions import OBJECTIVES
from finetune.recipe.recipe import (
    choice_of,
    choices_with,
    describe,
    example,
    field_schema,
    is_section,
    near_path,
    near_value,
    plain,
    section_with_method,
    sections,
    settings,
    shown,
    written,
)
from finetune.recipe.sections import MixSource
from offload.plan.facts.codec import CODECS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

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
_REWARD = "rewards are in the rows, or of functions in objective.rewards, each with its weight"
_SAMPLER = "with objective.rewards the engine samples, or a server, objective.sampler; once a step"
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
    **dict.fromkeys(("reward_model", "reward_weights"), _REWARD),
    **dict.fromkeys(("use_vllm", "num_iterations"), _SAMPLER),
    **dict.fromkeys(
        ("f_divergence_type", "ld_alpha", "use_weighting", "loss_weights"), _DIVERGENCE
    ),
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), _RESUME),
    **dict.fromkeys(("resume", "checkpointer"), _RESUME),
    **dict.fromkeys(("scale_rewards", "importance_sampling_level"), _GROUPS),
    "gamma_beta_ratio": "objective.gamma is this times objective.beta",
    "discopop_tau": "it is 0.05",
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


def note(draft: Draft, detail: "ErrorDetails", fixed: set[str]) -> None:
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


def note_breaches(draft: Draft, breaches: Sequence[Breach], fixed: set[str]) -> None:
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
        hint=as_setting(draft.place(path), *meant),
    )
    section[key] = value


def _note_wrong_source(
    draft: Draft, place: Sequence[int | str], value: Any, fixed: set[str]
) -> None:
    """Note what is wrong in an entry of `data.mix`, and fix the whole list to find more.

    Args:
        draft: The recipe.
        place: The entry's number, and the setting in it if it is one that is wrong.
        value: The value in that place.
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
        limit, hint = f"here it is {meant}", f"use {as_setting(place, meant, value)}"
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
        limit, hint = f"the nearest is {meant}", as_setting(place, meant, value)
        _move(draft, value, path, meant)
    draft.add_problem(place, f"{path} is not a setting", limit=limit, hint=hint)


def _listed_paths(value: Any) -> list[str]:
    """Return the paths of Axolotl's list of data sets; none if it is no such list."""
    entries = value if isinstance(value, list) else []
    found = (entry.get("path") if isinstance(entry, dict) else entry for entry in entries)
    paths = [path for path in found if isinstance(path, str)]
    return paths if len(paths) == len(entries) else []


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
