"""What the trainers of transformers and TRL stream, plan and refuse."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Seq2SeqTrainer, Trainer, TrainingArguments

import offload
from finetune.errors import ConfigError, DataError
from finetune.integrations import trainer
from finetune.integrations.trainer import (
    SluiceTrainer,
    StepBatches,
    Streaming,
    evaluated,
    micro_batch,
    plan_steps,
    require_arguments,
    require_own_methods,
)
from finetune.recipe.capabilities import OF_ARGUMENTS, OF_OPTIONS
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


# ----------------------------------------------------------------------------------------- refusals


def own(*_: object) -> None: ...


# Attributes of the arguments, other options of a Trainer, and what is said of them.
CASES: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor="),
    ({"fp16": True}, {}, "fp16="),
    ({"bf16": True}, {}, "bf16="),
    ({"fp16_full_eval": True}, {}, "fp16_full_eval="),
    ({"bf16_full_eval": True}, {}, "bf16_full_eval="),
    ({"auto_find_batch_size": True}, {}, "auto_find_batch_size="),
    ({"torch_compile": True}, {}, "torch_compile="),
    ({"use_liger_kernel": True}, {}, "use_liger_kernel="),
    ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha="),
    ({"optim": "lomo"}, {}, "optim="),
    ({"torch_empty_cache_steps": 4}, {}, "torch_empty_cache_steps="),
    ({"debug": "underflow_overflow"}, {}, "debug="),
    ({"fsdp": True}, {}, "fsdp="),
    ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {}, "deepspeed="),
    ({"parallelism_config": object()}, {}, "parallelism_config="),
    ({"world_size": 2}, {}, "world_size="),
    ({"n_gpu": 2}, {}, "n_gpu="),
    ({"loss_type": "dft"}, {}, "loss_type="),
    ({"activation_offloading": True}, {}, "activation_offloading="),
    ({"router_aux_loss_coef": 0.001}, {}, "router_aux_loss_coef="),
    ({"optim": "adalomo"}, {}, "optim=adalomo"),
    ({"optim": "galore_adamw_layerwise"}, {}, "optim=galore_adamw_layerwise"),
    ({"bf16": True, "label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1, bf16=True"),
    ({}, {"compute_loss_func": own}, "compute_loss_func=own"),
    ({}, {"model_init": own}, "model_init=own"),
)
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


@pytest.mark.parametrize(("changes", "options", "named"), CASES)
def test_a_setting_that_cannot_hold_is_refused_by_name_with_its_fix(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    rows = [row for row in (*OF_ARGUMENTS, *OF_OPTIONS) if row.field in {**changes, **options}]
    with pytest.raises(ConfigError, match=f"is given {named}") as caught:
        require_arguments(MODEL, arguments(tmp_path, **changes), options)
    assert caught.value.limit == "; ".join(f"{row.field}: {row.limit}" for row in rows)
    assert caught.value.hint == "; ".join(row.hint for row in rows)


def test_each_row_has_a_case() -> None:
    named = {name for changes, options, _ in CASES for name in (*changes, *options)}
    assert named == {row.field for row in (*OF_ARGUMENTS, *OF_OPTIONS)}


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (MODEL, "args is a NoneType"),
        ("Qwen/Qwen3-8B", "the model is 'Qwen/Qwen3-8B'"),
        (None, "the model is None"),
    ],
)
def test_what_is_no_model_or_no_arguments_is_refused(model: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        require_arguments(model, None, {})


def test_plain_arguments_pass(tmp_path: Path) -> None:
    require_arguments(
        MODEL, arguments(tmp_path), {"data_collator": print, "compute_loss_func": None}
    )


@pytest.mark.parametrize(
    ("bases", "own_methods", "match"),
    [
        *(
            ((SluiceTrainer,), {name: own}, rf"Mine.{name} is that of .*test_integrations")
            for name in ("compute_loss", "training_step", "prediction_step")
        ),
        ((SluiceTrainer, Seq2SeqTrainer), {}, r"prediction_step is that of .*trainer_seq2seq"),
    ],
)
def test_a_subclass_with_a_step_of_its_own_is_refused(
    bases: tuple[type, ...], own_methods: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        require_own_methods(type("Mine", bases, own_methods))
    require_own_methods(type("Mine", (SluiceTrainer,), {"log": own}))


def test_a_patched_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "get_batch_samples", own)
    with pytest.raises(ConfigError, match=r"Trainer.get_batch_samples is that of .*integrations"):
        require_own_methods(SluiceTrainer)


def test_a_router_loss_in_the_config_is_refused(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    config: Any = model.config
    config.output_router_logits = True
    with pytest.raises(ConfigError, match="output_router_logits=True"):
        SluiceTrainer(model, arguments(tmp_path), streaming=Streaming(num_slots=2))


@pytest.mark.parametrize(
    ("variable", "value", "match"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed_precision=bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend=inductor"),
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


# ------------------------------------------------------------------------------------------- stream


IDS = torch.arange(1, 11).unsqueeze(0)
FLAT: dict[str, Any] = {
    "input_ids": IDS,
    "labels": torch.tensor([[-100, 2, 3, -100, 5, 6, 7, -100, 9, 10]]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2]]),
    "cu_seq_lens_q": torch.tensor([0, 3, 7, 10], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 3, 7, 10], dtype=torch.int32),
    "max_length_q": 4,
    "max_length_k": 4,
    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]]),
}


def test_the_first_of_a_step_is_known_and_the_others_follow_in_order() -> None:
    step = StepBatches(fetched=[{"a": 1}, {"a": 2}, {"a": 3}])
    assert [step.take(one) for one in step.fetched] == [True, False, False]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_batch_that_is_not_the_next_of_its_step_is_refused(taken: int) -> None:
    step = StepBatches(fetched=[{"a": 1}, {"a": 2}, {"a": 3}])
    for one in step.fetched[:taken]:
        step.take(one)
    with pytest.raises(DataError, match="not the next of its step"):
        step.take({"a": taken + 1})  # equal to the next, and another object


def test_boundaries_of_a_flattened_sequence_become_lengths_of_rows() -> None:
    batch = micro_batch(FLAT)
    assert batch.keys() == {"input_ids", "labels", "row_lens"}
    assert batch["row_lens"].tolist() == [3, 4, 3]


FLATTENED = "a flattened batch with `cu_seq_lens_q` has "


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"labels": IDS}, f"{FLATTENED}a label at the first token of a row"),
        ({"position_ids": None}, f"{FLATTENED}no `position_ids` that begin at 0 in each row"),
        (
            {"position_ids": torch.arange(10).unsqueeze(0)},
            f"{FLATTENED}no `position_ids` that begin at 0",
        ),
        ({"attention_mask": torch.ones_like(IDS)}, f"{FLATTENED}an `attention_mask`"),
        ({"weights": torch.ones(1)}, "a batch has `weights`"),
        ({"labels": None}, "a batch has no `labels`, only input_ids, position_ids"),
    ],
)
def test_a_batch_that_is_not_computed_with_is_refused(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        micro_batch(FLAT | changes)


def test_entries_that_are_none_are_left_out() -> None:
    batch = micro_batch({"input_ids": IDS, "labels": IDS, "attention_mask": None})
    assert batch.keys() == {"input_ids", "labels"}


@pytest.mark.thorough
def test_rows_without_labels_change_no_loss() -> None:
    model = tiny("llama")
    model.eval()
    other = FLAT | {"labels": FLAT["labels"].clone()}
    other["labels"][0, 3:7] = -100  # the second row
    none = FLAT | {"labels": torch.full_like(IDS, -100)}
    with torch.no_grad():
        rows = [model(input_ids=IDS[:, a:b], use_cache=False).logits for a, b in ((0, 3), (7, 10))]
    labels = torch.cat([IDS[0, 1:3], IDS[0, 8:10]])
    logits = torch.cat([rows[0][0, :-1], rows[1][0, :-1]])
    loss = torch.nn.functional.cross_entropy(logits, labels).item()

    engine = offload.attach(model, num_slots=2, device="cpu")
    batches = [micro_batch(one) for one in (other, none, other)]
    found = evaluated(engine, batches, adapter="default")
    engine.detach()
    assert [one.num_label_tokens for one in found.batches] == [4, 0, 4]
    assert found.batches[0].loss == pytest.approx(loss, rel=1e-6)
    assert found.batches[1].loss != found.batches[1].loss, "NaN"
    right = (logits.argmax(-1) == labels).float().mean().item()
    assert found.batches[0].accuracy == pytest.approx(right)


def test_batches_that_have_no_label_at_all_load_nothing() -> None:
    engine = offload.attach(tiny("llama"), num_slots=2, device="cpu")
    none = micro_batch(FLAT | {"labels": torch.full_like(IDS, -100)})
    assert evaluated(engine, [none], adapter="default").num_loads == 0
    engine.detach()
