"""Plans of a Trainer's steps: what is read off its model and arguments."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from finetune.errors import ConfigError
from finetune.integrations import trainer
from finetune.integrations.trainer import SluiceTrainer, Streaming, plan_steps
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB, MIB, Machine, named_machine
from tests.parity.steps import MODELS, NUM_LAYERS, tiny

CARD = named_machine("rtx3060", dtype="float32")


def planned(
    folder: Path,
    model: Any,
    *,
    machine: Machine = CARD,
    seq_len=64,
    compute_dtype="float32",
    **changes: Any,
) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "dataloader_num_workers": 1,
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), report_to="none", **settings | changes)
    return plan_steps(model, args, seq_len=seq_len, compute_dtype=compute_dtype, machine=machine)


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


def wide(**changes: Any) -> Any:
    """Return a model whose MLPs take most of the memory of a visit, if rows are long."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=32000,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, **changes))


@pytest.mark.parametrize("compute_dtype", ["float32", "auto"])
def test_streaming_is_as_planned(tmp_path: Path, compute_dtype: str) -> None:
    plan = planned(tmp_path, tiny("llama"), compute_dtype=compute_dtype)
    assert asdict(Streaming.of(plan)) == {
        "num_slots": plan.residency.num_slots,
        "codec": "native",
        "stash": "host" if plan.request.is_stashed else "device",
        "head_chunk_tokens": plan.request.typical.head_chunk_tokens,
        "kept_graphs": plan.residency.num_kept_graphs,
        "kept_outputs": plan.residency.num_kept_outputs,
        "sent_outputs": plan.residency.num_sent_outputs,
        "sent_graphs": plan.residency.num_sent_graphs,
        "mlp_chunk_tokens": plan.request.typical.mlp_chunk_tokens,
        "layer_kernels": "plain",
        "embeddings": plan.request.typical.embeddings,
        "head": plan.request.typical.head,
        "compute_dtype": compute_dtype,
    }


@pytest.mark.parametrize("own", [{"lora_bias": True}, {"bias": "lora_only"}])
def test_branches_with_a_bias_are_planned_as_peft_computes_them(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], **own)
    model = get_peft_model(MODELS["gpt_oss"](), config)
    plan = planned(tmp_path, model, compute_dtype="auto")
    assert not plan.request.typical.adapter.is_in_base_dtype


def test_all_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "num_slots": 3,
        "codec": "int8",
        "stash": "host",
        "head_chunk_tokens": 5,
        "kept_graphs": 1,
        "kept_outputs": 2,
        "sent_outputs": 3,
        "sent_graphs": 4,
        "mlp_chunk_tokens": 6,
        "layer_kernels": "fused",
        "embeddings": "host",
        "head": "host",
    }
    given: dict[str, Any] = {}
    monkeypatch.setattr(trainer, "attach", lambda _model, **asked: given.update(asked))
    Streaming(**settings).attach(tiny("llama"), device=torch.device("cpu"))
    assert given == settings | {"device": "cpu"}


def test_outputs_of_attention_are_kept_where_torchs_kernel_computes_it(tmp_path: Path) -> None:
    card = replace(CARD, vram_bytes=1500 * MIB)
    residency = planned(tmp_path, wide(), machine=card, seq_len=2048).residency
    assert residency.num_kept_outputs + residency.num_sent_outputs == 8
    model = wide()
    model.set_attn_implementation("eager")
    residency = planned(tmp_path, model, machine=card, seq_len=2048).residency
    assert residency.num_kept_outputs + residency.num_sent_outputs == 0


def test_where_a_step_does_not_fit_tiles_of_mlps_are_tried(tmp_path: Path) -> None:
    card = replace(CARD, vram_bytes=1400 * MIB)
    plan = planned(tmp_path, wide(), machine=card, seq_len=2048)
    assert plan.request.typical.mlp_chunk_tokens == 512
    with pytest.raises(DoesNotFitError):  # dropout is drawn for whole micro-batches
        planned(tmp_path, wide(lora_dropout=0.1), machine=card, seq_len=2048)


def test_where_weights_do_not_fit_the_embedding_is_in_ram(tmp_path: Path) -> None:
    card = replace(CARD, vram_bytes=1060 * MIB)
    assert planned(tmp_path, wide(), machine=card).request.typical.embeddings == "host"


def test_one_weight_of_embedding_and_head_is_in_ram_for_both(tmp_path: Path) -> None:
    """Two slots are larger than the table, which is on the device while there is room for it."""
    places = []
    for mib in (4000, 1000):
        model = wide()
        base = model.get_base_model()
        base.lm_head.weight = base.model.embed_tokens.weight
        card = replace(CARD, vram_bytes=mib * MIB)
        typical = planned(tmp_path, model, machine=card).request.typical
        places.append((typical.embeddings, typical.head))
    assert places == [("device", "device"), ("host", "host")]


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
