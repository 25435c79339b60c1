"""What a Trainer that streams refuses: each by its name, with a fix, before it starts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from finetune.errors import ConfigError
from finetune.integrations.trainer import (
    OF_ARGUMENTS,
    OF_SFT,
    SluiceTrainer,
    Streaming,
    require_arguments,
    require_own_methods,
)
from tests.parity.steps import tiny

CASES: dict[str, Any] = {
    "label_smoothing_factor": 0.1,
    "fp16": True,
    "bf16": True,
    "fp16_full_eval": True,
    "bf16_full_eval": True,
    "auto_find_batch_size": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "optim": "lomo",
    "torch_empty_cache_steps": 4,
    "debug": "underflow_overflow",
    "fsdp": True,
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "parallelism_config": object(),
    "world_size": 2,
    "n_gpu": 2,
    "loss_type": "dft",
    "activation_offloading": True,
    "router_aux_loss_coef": 0.001,
}
MODEL = torch.nn.Linear(1, 1)
PROPERTIES = ("world_size", "n_gpu")  # read-only; they come from the environment


@pytest.fixture
def fresh_accelerate() -> Iterator[Callable[[], None]]:
    """Return what makes accelerate read the environment again."""
    yield AcceleratorState._reset_state
    AcceleratorState._reset_state()


def arguments(folder: Path, **changes: Any) -> Any:
    """Return arguments with attributes that TrainingArguments might not let pass here."""

    class Changed(TrainingArguments):
        pass

    made = Changed(output_dir=str(folder), use_cpu=True, report_to="none")
    for name, value in changes.items():
        if name in PROPERTIES:
            setattr(Changed, name, value)
        elif name == "debug":
            made.debug = TrainingArguments(output_dir=str(folder), use_cpu=True, debug=value).debug
        else:
            setattr(made, name, value)
    return made


def test_each_refusal_has_a_case() -> None:
    assert [one.name for one in (*OF_ARGUMENTS, *OF_SFT)] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_setting_that_cannot_hold_is_refused_by_name_with_its_fix(
    tmp_path: Path, name: str
) -> None:
    refusal = next(one for one in (*OF_ARGUMENTS, *OF_SFT) if one.name == name)
    with pytest.raises(ConfigError, match=f"is given {name}=") as caught:
        require_arguments(MODEL, arguments(tmp_path, **{name: CASES[name]}), {})
    assert caught.value.limit == f"{name}: {refusal.why}"
    assert caught.value.hint == refusal.fix


@pytest.mark.parametrize("optim", ["adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_optimizers_that_step_in_the_backward_are_refused(tmp_path: Path, optim: str) -> None:
    with pytest.raises(ConfigError, match=f"optim={optim}"):
        require_arguments(MODEL, arguments(tmp_path, optim=optim), {})


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0.1, bf16=True"):
        require_arguments(MODEL, arguments(tmp_path, bf16=True, label_smoothing_factor=0.1), {})


def test_plain_arguments_pass(tmp_path: Path) -> None:
    require_arguments(
        MODEL, arguments(tmp_path), {"data_collator": print, "compute_loss_func": None}
    )


@pytest.mark.parametrize("name", ["compute_loss_func", "model_init"])
def test_options_of_the_constructor_are_refused_by_name(tmp_path: Path, name: str) -> None:
    def own() -> None: ...

    with pytest.raises(ConfigError, match=f"is given {name}=own"):
        require_arguments(MODEL, arguments(tmp_path), {name: own})


def test_no_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="args is a NoneType"):
        require_arguments(MODEL, None, {})


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", None])
def test_a_model_that_is_not_loaded_is_refused(tmp_path: Path, model: object) -> None:
    with pytest.raises(ConfigError, match=f"the model is {model!r}"):
        require_arguments(model, arguments(tmp_path), {})


def _overriding(name: str) -> type[SluiceTrainer]:
    return type("Mine", (SluiceTrainer,), {name: lambda *_: None})


@pytest.mark.parametrize("name", ["compute_loss", "training_step", "prediction_step"])
def test_a_subclass_with_a_step_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Mine.{name} is that of .*test_refusals"):
        require_own_methods(_overriding(name))


def test_a_patched_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def patched(*_: object) -> None: ...

    monkeypatch.setattr(Trainer, "get_batch_samples", patched)
    with pytest.raises(ConfigError, match=r"Trainer.get_batch_samples is that of .*refusals"):
        require_own_methods(SluiceTrainer)


def test_a_trainer_of_another_library_module_is_refused() -> None:
    kind = type("Mine", (SluiceTrainer, Seq2SeqTrainer), {})
    with pytest.raises(ConfigError, match=r"prediction_step is that of .*trainer_seq2seq"):
        require_own_methods(kind)


def test_a_subclass_that_computes_nothing_is_taken() -> None:
    require_own_methods(type("Mine", (SluiceTrainer,), {"log": lambda *_: None}))


def test_a_router_loss_in_the_config_is_refused(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    config: Any = model.config
    config.output_router_logits = True
    with pytest.raises(ConfigError, match="output_router_logits: true"):
        SluiceTrainer(model, arguments(tmp_path), streaming=Streaming(num_slots=2))


@pytest.mark.parametrize(
    ("variable", "value", "match"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed_precision bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend inductor"),
    ],
)
def test_what_accelerate_is_set_up_with_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_accelerate: Callable[[], None],
    variable: str,
    value: str,
    match: str,
) -> None:
    monkeypatch.setenv(variable, value)
    fresh_accelerate()
    with pytest.raises(ConfigError, match=match):
        SluiceTrainer(tiny("llama"), arguments(tmp_path), streaming=Streaming(num_slots=2))
    assert not torch.is_autocast_enabled("cpu")
