"""Tiny models with the adapters of several runs, and each run's model as it is alone."""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from offload.engine.engine import Engine
from offload.engine.passes.part import RunStep
from offload.engine.results import StepResult
from tests.parity.steps import MODELS, OPTIONS, SHAPE

Config = Mapping[str, Any]
ATTENTION: Config = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"]}
WIDE: Config = {"r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"]}
LARGE: Config = {"r": 64, "target_modules": ["o_proj", "up_proj"], "lora_alpha": 7}
DORA: Config = {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True}
DROPPING: Config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.3}
WHOLE: Config = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
EXPERTS: Config = {
    "r": 4,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def run_name(number: int) -> str:
    """Return the adapter of a run in the model of all."""
    return f"run{number}"


def own_name(name: str, adapter: str) -> str:
    """Return a parameter's name without that of its adapter."""
    return ".".join(part for part in name.split(".") if part != adapter)


def joint_model(name: str, configs: Sequence[Config], **changes: Any) -> Any:
    """Return a model with the adapters of all runs, each drawn by itself."""
    return _model(name, {run_name(i): (i, config) for i, config in enumerate(configs)}, **changes)


def own_model(name: str, configs: Sequence[Config], number: int, **changes: Any) -> Any:
    """Return the same model with the adapter of one run, under peft's usual name."""
    return _model(name, {"default": (number, configs[number])}, **changes)


def _model(name: str, adapters: Mapping[str, tuple[int, Config]], **changes: Any) -> Any:
    torch.manual_seed(0)
    base = MODELS[name]()
    for key, value in changes.items():
        setattr(base.config, key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first, (_, config)), *rest = adapters.items()
        model = get_peft_model(base, LoraConfig(**config), adapter_name=first)
        for adapter, (_, other) in rest:
            model.add_adapter(adapter, LoraConfig(**other))
    for adapter, (number, _) in adapters.items():
        for path, parameter in model.named_parameters():
            if adapter in path.split("."):
                parameter.requires_grad_()
                _draw(parameter, own_name(path, adapter), number)
    compute_in_base_dtype(model)
    return compute_beside(model).train()


def _draw(parameter: nn.Parameter, name: str, number: int) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{number} {name}".encode()))
    with torch.no_grad():
        drawn = 0.1 * torch.randn(parameter.shape, generator=generator)
        is_drawn_by_peft = "lora_A" in name  # from torch's generator
        parameter.copy_(drawn if is_drawn_by_peft else parameter + drawn)


def engine_of(model: nn.Module, **changes: Any) -> Engine:
    """Return an engine with the tests' usual options."""
    return Engine(model, device=torch.device("cpu"), options=replace(OPTIONS, **changes))


def rows(seed: int, *widths: int, packed: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of two rows each, drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for width in widths:
        input_ids = torch.randint(0, SHAPE["vocab_size"], (2, width), generator=generator)
        labels = input_ids.clone()
        labels[:, : 2 + seed % 3] = -100
        batch = {"input_ids": input_ids, "labels": labels}
        if packed:
            batch = {key: value.reshape(1, -1) for key, value in batch.items()}
            batch["row_lens"] = torch.tensor([width, width])
        batches.append(batch)
    return batches


Found = tuple[float, dict[str, float], dict[str, torch.Tensor]]
"""Loss, metrics and gradients by name, of one run."""


def found(result: StepResult, model: nn.Module, adapter: str) -> Found:
    """Return what a step found for one run."""
    gradients = {
        own_name(path, adapter): parameter.grad.clone()
        for path, parameter in model.named_parameters()
        if adapter in path.split(".") and parameter.grad is not None
    }
    return result.loss, result.metrics, gradients


def together(
    name: str,
    configs: Sequence[Config],
    runs: Sequence[RunStep],
    *,
    num_steps: int = 1,
    **options: Any,
) -> list[Found]:
    """Run a step of all runs at once; gradients of several steps add up."""
    model = joint_model(name, configs, **options.pop("config", {}))
    engine = engine_of(model, **options)
    named = [replace(run, adapter=run_name(i)) for i, run in enumerate(runs)]
    try:
        results = [engine.forward_backward_runs(named) for _ in range(num_steps)][-1]
        return [found(one, model, run_name(i)) for i, one in enumerate(results)]
    finally:
        engine.close()


def apart(
    name: str,
    configs: Sequence[Config],
    runs: Sequence[RunStep],
    *,
    num_steps: int = 1,
    **options: Any,
) -> list[Found]:
    """Run the step of each run by itself, with a model that has its adapter only."""
    config, all_found = options.pop("config", {}), []
    for number, run in enumerate(runs):
        model = own_model(name, configs, number, **config)
        engine = engine_of(model, **options)
        try:
            results = [engine.forward_backward_runs([run]) for _ in range(num_steps)][-1]
            all_found.append(found(results[0], model, "default"))
        finally:
            engine.close()
    return all_found


def assert_same(a: Sequence[Found], b: Sequence[Found]) -> None:
    """Check that two ways found the same, to the bit."""
    for (loss, metrics, gradients), (other_loss, other_metrics, others) in zip(a, b, strict=True):
        assert loss == other_loss
        assert metrics == other_metrics
        assert gradients
        assert gradients.keys() == others.keys()
        different = [path for path in gradients if not torch.equal(gradients[path], others[path])]
        assert not different
        assert any(gradient.abs().sum() > 0 for gradient in gradients.values())
