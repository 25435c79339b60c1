"""Settings of a Trainer that an engine cannot follow exactly, each with the reason and the fix.

A setting that would have no effect, or another one than in the plain Trainer, is refused before the
model is touched: no run trains something else than its settings say.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from transformers import TrainingArguments

from finetune.errors import ConfigError

TAKES_STEPS = (
    "_get_num_items_in_batch",
    "_inner_training_loop",
    "_prepare_input",
    "_prepare_inputs",
    "_run_epoch",
    "compute_loss",
    "compute_loss_context_manager",
    "evaluation_loop",
    "get_batch_samples",
    "prediction_step",
    "training_step",
)
"""Methods of a Trainer that decide what a step computes."""


_OWN = "finetune.integrations."
_KNOWN = ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.base_trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One setting that is refused.

    Attributes:
        name: Of the setting.
        is_set: Whether arguments ask for it.
        why: The reason.
        fix: What to write in its place.
    """

    name: str
    is_set: Callable[[Any], bool]
    why: str
    fix: str


def _truthy(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name))


def _is_fused(args: TrainingArguments) -> bool:
    name = str(getattr(args.optim, "value", args.optim))
    return "lomo" in name or "layerwise" in name


_CAST = "the engine computes in the dtypes that the model was loaded in"
_ONE = "one process streams to one device"
_SLUICE = "`sluice finetune RECIPE`"

OF_ARGUMENTS = (
    Refusal(
        name="label_smoothing_factor",
        is_set=lambda args: args.label_smoothing_factor != 0,
        why="the loss is the cross-entropy of the label tokens",
        fix="label_smoothing_factor=0",
    ),
    Refusal(
        name="fp16",
        is_set=_truthy("fp16"),
        why=f"it scales losses, and casts; {_CAST}",
        fix="fp16=False, and load the model with dtype=torch.bfloat16",
    ),
    Refusal(
        name="bf16",
        is_set=_truthy("bf16"),
        why=f"it is autocast, which casts again at each operator; {_CAST}",
        fix="bf16=False, and load the model with dtype=torch.bfloat16",
    ),
    Refusal(
        name="fp16_full_eval",
        is_set=_truthy("fp16_full_eval"),
        why=f"it casts the whole model; {_CAST}",
        fix="fp16_full_eval=False",
    ),
    Refusal(
        name="bf16_full_eval",
        is_set=_truthy("bf16_full_eval"),
        why=f"it casts the whole model; {_CAST}",
        fix="bf16_full_eval=False",
    ),
    Refusal(
        name="auto_find_batch_size",
        is_set=_truthy("auto_find_batch_size"),
        why="a batch that does not fit is known from the plan, and not by trying",
        fix="auto_find_batch_size=False",
    ),
    Refusal(
        name="torch_compile",
        is_set=_truthy("torch_compile"),
        why="a compiled model is one graph, and layers are visited one by one",
        fix=f"torch_compile=False; {_SLUICE} with `train.compile: true` compiles the layers",
    ),
    Refusal(
        name="use_liger_kernel",
        is_set=_truthy("use_liger_kernel"),
        why="it replaces the model's forward, and with it the loss",
        fix='use_liger_kernel=False, and `Streaming(layer_kernels="fused")` on CUDA',
    ),
    Refusal(
        name="neftune_noise_alpha",
        is_set=lambda args: args.neftune_noise_alpha is not None,
        why="its noise is drawn in the forward that the engine replaces",
        fix=f"neftune_noise_alpha=None; {_SLUICE} has `train.neftune_alpha`",
    ),
    Refusal(
        name="optim",
        is_set=_is_fused,
        why="it updates weights inside the backward, before a step's gradients are complete",
        fix='optim="adamw_torch", or any other that updates after the step',
    ),
    Refusal(
        name="torch_empty_cache_steps",
        is_set=lambda args: args.torch_empty_cache_steps is not None,
        why="slots are allocated once, so there is nothing to empty",
        fix="torch_empty_cache_steps=None",
    ),
    Refusal(
        name="debug",
        is_set=lambda args: any("underflow" in str(one.value) for one in args.debug),
        why="it hooks the forward of every module, which visits call many times",
        fix='debug=""',
    ),
    Refusal(
        name="fsdp",
        is_set=_truthy("fsdp"),
        why=f"it shards the weights; {_ONE}",
        fix="fsdp=None",
    ),
    Refusal(
        name="deepspeed",
        is_set=_truthy("deepspeed"),
        why=f"it shards the weights; {_ONE}",
        fix="deepspeed=None",
    ),
    Refusal(
        name="parallelism_config",
        is_set=lambda args: args.parallelism_config is not None,
        why=f"it shards weights or sequences; {_ONE}",
        fix="parallelism_config=None",
    ),
    Refusal(
        name="world_size",
        is_set=lambda args: args.world_size > 1,
        why=_ONE,
        fix=f"start one process; {_SLUICE} shares a step among several",
    ),
    Refusal(
        name="n_gpu",
        is_set=lambda args: args.n_gpu > 1,
        why=f"DataParallel copies the model to each device; {_ONE}",
        fix="one visible device: CUDA_VISIBLE_DEVICES=0",
    ),
)

OF_SFT = (
    Refusal(
        name="loss_type",
        is_set=lambda args: getattr(args, "loss_type", "nll") != "nll",
        why="the loss is the cross-entropy of the label tokens",
        fix='loss_type="nll"',
    ),
    Refusal(
        name="activation_offloading",
        is_set=lambda args: bool(getattr(args, "activation_offloading", False)),
        why="the engine decides where activations wait",
        fix='activation_offloading=False, and `Streaming(stash="host")`',
    ),
    Refusal(
        name="router_aux_loss_coef",
        is_set=lambda args: bool(getattr(args, "router_aux_loss_coef", None)),
        why="the plain Trainer adds a router loss per micro-batch, which is not the step's",
        fix=f"router_aux_loss_coef=0.0; {_SLUICE} has `train.router_loss_coef`",
    ),
)

_OPTIONS = {
    "compute_loss_func": "the loss is computed where the layers end, a chunk of tokens at a time",
    "model_init": "a model is attached once, and this makes another one in each `train`",
}


def require_arguments(model: object, args: object, options: dict[str, Any]) -> None:
    """Check what a Trainer is made with, before it is made.

    Args:
        model: Its model.
        args: Its TrainingArguments.
        options: Its other keyword arguments.

    Raises:
        ConfigError: An engine cannot do what one of them says; all such are named.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is {model!r}, a {type(model).__name__}",
            limit="it is loaded on the host, where its layers wait for the device",
            hint='`AutoModelForCausalLM.from_pretrained(name, device_map="cpu", dtype=...)`',
        )
    if not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"args is a {type(args).__name__}",
            limit="what a step is, is read off TrainingArguments before the model is attached",
            hint="`TrainingArguments(output_dir=..., ...)`",
        )
    _refuse(
        (one.name, getattr(args, one.name, None), one.why, one.fix)
        for one in (*OF_ARGUMENTS, *OF_SFT)
        if one.is_set(args)
    )
    _refuse(
        (name, options[name], why, f"leave `{name}` away")
        for name, why in _OPTIONS.items()
        if options.get(name) is not None
    )


def _refuse(found: Iterable[tuple[str, object, str, str]]) -> None:
    every = list(found)
    if every:
        named = ", ".join(f"{name}={_shown(value)}" for name, value, _, _ in every)
        raise ConfigError(
            f"a Trainer that streams is given {named}",
            limit="; ".join(f"{name}: {why}" for name, _, why, _ in every),
            hint="; ".join(fix for *_, fix in every),
        )


def _shown(value: object) -> str:
    text = str(getattr(value, "__name__", getattr(value, "value", value)))
    return text if len(text) < 60 else f"{text[:57]}..."


def require_own_methods(kind: type) -> None:
    """Check that no subclass, and no patch, computes a step in its own way.

    Args:
        kind: The class of the trainer.

    Raises:
        ConfigError: One does.
    """
    for one in kind.__mro__:
        for name in TAKES_STEPS:
            module = str(getattr(vars(one).get(name), "__module__", _OWN))
            if module not in _KNOWN and not module.startswith(_OWN):
                raise ConfigError(
                    f"{one.__name__}.{name} is that of {module}",
                    limit="a step is computed by the engine, which does not call it",
                    hint=f"leave `{name}` away; a loss of your own is an objective of"
                    " `engine.forward_backward(micro_batches, objective=...)`",
                )


def require_trainer(trainer: Any) -> None:
    """Check what a Trainer has found out when it was made, from its environment too.

    Args:
        trainer: Before its model is attached.

    Raises:
        ConfigError: It is set up in a way that an engine cannot follow.
    """
    state = trainer.accelerator.state
    for name, value, plain in (
        ("mixed_precision", trainer.accelerator.mixed_precision, "no"),
        ("dynamo_backend", state.dynamo_plugin.backend.value.lower(), "no"),
        ("distributed_type", state.distributed_type.value.lower(), "no"),
    ):
        if value != plain:
            _refuse_environment(name, value)
    if not trainer.model_accepts_loss_kwargs:
        raise ConfigError(
            f"{type(trainer.model).__name__} takes no `num_items_in_batch`",
            limit="the plain Trainer then takes the mean of its micro-batches' means, and the"
            " engine that over the label tokens of the step",
            hint="a causal language model of transformers, whose forward takes `**kwargs`",
        )
    if getattr(trainer, "padding_free", False) and trainer.compute_metrics is not None:
        refuse_packed_logits()
    config = trainer.model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "the model's config asks for its router loss (output_router_logits: true)",
            limit="the plain Trainer adds it once per micro-batch, so that it grows with their"
            " number; an engine takes it over the step",
            hint="`model.config.output_router_logits = False`, and router_aux_loss_coef=0.0 in an"
            f" SFTConfig; {_SLUICE} has `train.router_loss_coef`",
        )


def refuse_packed_logits() -> NoReturn:
    """Raise the error for logits of packed rows, which the engine does not return.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        "logits of rows that share a sequence are asked for",
        limit="the engine keeps such rows apart for their losses alone; logits are of padded rows",
        hint="leave `compute_metrics` away, or padding_free=False and packing=False;"
        " prediction_loss_only=True predicts losses",
    )


def _refuse_environment(name: str, value: str) -> NoReturn:
    raise ConfigError(
        f"accelerate is set up with {name} {value}",
        limit=f"{_ONE}, uncompiled; {_CAST}",
        hint="start the script with `python`, or run `accelerate config default`",
    )
