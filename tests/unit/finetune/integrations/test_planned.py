"""Plans of a Trainer's steps: what is read off its model and arguments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import TrainingArguments

from finetune.errors import ConfigError
from finetune.integrations.planned import plan_steps
from finetune.integrations.trainer import SluiceTrainer, Streaming
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB, Machine, named_machine
from tests.parity.steps import MODELS, NUM_LAYERS, tiny

CARD = named_machine("rtx3060", dtype="float32")


def planned(folder: Path, model: Any, *, machine: Machine = CARD, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "dataloader_num_workers": 1,
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), report_to="none", **settings | changes)
    return plan_steps(model, args, seq_len=64, machine=machine)


def test_the_request_is_what_model_and_arguments_say(tmp_path: Path) -> None:
    plan = planned(tmp_path, tiny("llama"), optim="paged_adamw_8bit")
    request, workload = plan.request, plan.request.typical
    assert (workload.micro_batch_size, workload.seq_len, workload.dtype_bytes) == (2, 64, 4)
    assert (request.num_micro_batches, request.num_workers) == (3, 1)
    assert (workload.adapter.rank, workload.optimizer) == (4, "paged_adamw_8bit")
    assert set(workload.adapter.targets) == {"q_proj", "v_proj", "o_proj"}
    assert not workload.adapter.experts


def test_adapters_on_experts_are_counted(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    model = get_peft_model(MODELS["qwen3_moe"](), config)
    spec = planned(tmp_path, model).request.typical.adapter
    assert (spec.experts, spec.targets) == (True, ("q_proj",))


def test_streaming_is_as_planned(tmp_path: Path) -> None:
    plan = planned(tmp_path, tiny("llama"))
    streaming = Streaming.of(plan)
    assert streaming.num_slots == plan.num_slots
    assert streaming.kept_graphs == plan.num_kept_graphs
    assert streaming.stash == ("host" if plan.request.is_stashed else "device")
    assert streaming.head_chunk_tokens == plan.request.typical.head_chunk_tokens


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    full = replace(CARD, vram_bytes=GIB // 64)
    with pytest.raises(DoesNotFitError, match="GiB"):
        planned(tmp_path, tiny("llama"), machine=full)


def test_another_adapter_than_lora_is_refused(tmp_path: Path) -> None:
    model = get_peft_model(
        MODELS["llama"](), IA3Config(target_modules=["v_proj"], feedforward_modules=[])
    )
    with pytest.raises(ConfigError, match="has the adapters IA3; the steps of one LoRA"):
        planned(tmp_path, model)


def test_a_model_in_half_precision_is_refused(tmp_path: Path) -> None:
    model = get_peft_model(MODELS["llama"]().half(), LoraConfig(r=4))
    with pytest.raises(ConfigError, match=r"the frozen weights are of torch.float16"):
        planned(tmp_path, model)


@pytest.mark.thorough
def test_a_trainer_runs_the_plan_of_this_machine(tmp_path: Path, machine_file: Path) -> None:
    model: Any = tiny("llama")
    machine = Machine.from_json(machine_file.read_text())
    plan = planned(tmp_path, model, machine=machine)
    trainer = SluiceTrainer(
        model,
        TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", save_strategy="no"
        ),
        streaming=Streaming.of(plan),
        train_dataset=[{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}],
    )
    assert trainer.train().global_step == 3
    assert trainer.num_loads <= 3 * 2 * NUM_LAYERS
