from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from offload.engine.model.hooks import Graph, visit_with_graph
from offload.engine.model.layers import LayeredModel
from offload.errors import OffloadError
from offload.plan.facts.codec import decode_workspace_bytes
from offload.plan.facts.facts import AdapterSpec, linear_names, model_facts
from offload.plan.facts.optimizer import (
    HOST_ONLY,
    Optimizer,
    paged_bytes,
    state_bytes,
    temporary_bytes,
)
from offload.plan.facts.trainable import adapter_tensor_sizes, trained_tensor_shapes
from offload.plan.facts.workload import Workload, to_pages
from offload.plan.machine.machine import (
    ExpertsImplementation,
    Implementation,
    Machine,
    named_machine,
)
from offload.plan.memory.memory import (
    HostLoad,
    MemoryTerm,
    device_needs,
    device_terms,
    host_terms,
    layer_weight_bytes,
    recorded_bytes,
    total_bytes,
)
from offload.plan.time.optimizer import update_work
from tests.builders import qwen3_30b, workload

WITHIN = 0.01
GB = 10**9
QWEN_30B = qwen3_30b()
GEMMA = model_facts(
    {
        "model_type": "gemma3_text",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "sliding_window": 1024,
        "vocab_size": 1000,
    }
)
WORKLOAD = workload(seq_len=4096, head_chunk_tokens=64)


def card(name: str, way: ExpertsImplementation) -> Machine:
    """Return a card that multiplies experts in a way."""
    return replace(
        named_machine(name), experts_implementation=Implementation(value=way, source="a test")
    )


def on_5090(workload: Workload = WORKLOAD, **changes: object) -> dict[str, int]:
    settings: dict[str, Any] = {
        "machine": named_machine("rtx5090"),
        "num_slots": 4,
        "num_micro_batches": 2,
        "is_padded": False,
        "is_stashed": False,
        "is_reduced": False,
    }
    settings |= changes
    terms = device_terms(QWEN_30B, workload=workload, **settings)
    names = [term.name for term in terms]
    assert len(names) == len(set(names))
    return {term.name: term.num_bytes for term in terms}


def by_name(terms: tuple[MemoryTerm, ...]) -> dict[str, int]:
    return {term.name: term.num_bytes for term in terms}


# ---------------------------------------------------------------------------------------------
# Optimizer


def test_adamw_keeps_8_bytes_per_weight_and_8_bit_adamw_2_031() -> None:
    assert state_bytes([(1 << 20,)], "adamw") / (1 << 20) == 8
    assert state_bytes([(1 << 20,)], "adamw_8bit") / (1 << 20) == pytest.approx(2.031, 1e-3)


def test_paged_adamw_keeps_the_moments_of_large_tensors_on_the_host() -> None:
    shapes = [(1000, 100), (99_999,)]
    assert paged_bytes(shapes, "paged_adamw_8bit") == 2 * 100_000
    assert paged_bytes(shapes, "adamw_8bit") == 0
    all_bytes = state_bytes(shapes, "adamw_8bit")
    assert state_bytes(shapes, "paged_adamw_8bit") == all_bytes - 2 * 100_000


def test_paged_states_leave_the_card_for_the_host_and_cross_the_link_twice() -> None:
    card = named_machine("rtx5090")
    adapter = replace(WORKLOAD.adapter, rank=128)
    shapes = trained_tensor_shapes(QWEN_30B, adapter)
    paged = paged_bytes(shapes, "paged_adamw_8bit")
    load = replace(WORKLOAD, adapter=adapter, optimizer="paged_adamw_8bit")
    host = host_terms(
        QWEN_30B,
        card,
        [HostLoad(workload=load, num_workers=0, num_stashed=0)],
        local_ranks=1,
        num_slabs=1,
        rank_device_bytes=0,
    )
    assert {term.name: term.num_bytes for term in host}["paged optimizer states"] == paged > 0
    more = update_work(card, shapes, "paged_adamw_8bit").memory_s
    less = update_work(card, shapes, "adamw_8bit").memory_s
    assert more - less == pytest.approx(2 * paged / card.h2d_bytes_per_s.value)


def test_paged_states_are_refused_on_a_cpu() -> None:
    cpu = replace(named_machine("rtx5090"), device="cpu")
    with pytest.raises(OffloadError, match=r"paged_adamw_8bit, but rtx5090 is a CPU") as error:
        update_work(cpu, [(8,)], "paged_adamw_8bit")
    assert error.value.hint == "`train.optimizer: adamw_8bit`"


@pytest.mark.parametrize("optimizer", HOST_ONLY)
def test_an_optimizer_of_weights_in_ram_has_no_states_on_the_device(optimizer: Optimizer) -> None:
    assert state_bytes([], optimizer) == 0
    with pytest.raises(OffloadError, match=f"{optimizer}, but what trains is on the device"):
        state_bytes([(300, 20)], optimizer)


def test_adafactor_keeps_rows_and_columns_and_takes_a_tensor_at_a_time() -> None:
    assert state_bytes([(300, 20), (7,)], "adafactor") == 4 * (300 + 20 + 7)
    assert temporary_bytes([(300, 20), (7,)], "adafactor") == 4 * 6000


def test_small_tensors_stay_in_fp32_under_8_bit_adamw() -> None:
    assert state_bytes([(4095,)], "adamw_8bit") == 8 * 4095
    assert state_bytes([(4096,)], "adamw_8bit") < 3 * 4096


def test_8_bit_states_are_as_large_as_those_that_bitsandbytes_makes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    sizes = (4096, 10_000, 100)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = bitsandbytes.optim.AdamW8bit(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name in ("state1", "state2", "absmax1", "absmax2")
    )
    assert state_bytes([(size,) for size in sizes], "adamw_8bit") == made


def test_adapter_tensors_are_an_a_and_a_b_per_target_and_layer() -> None:
    sizes = adapter_tensor_sizes(QWEN_30B, WORKLOAD.adapter)
    assert sizes[:4] == (16 * 2048, 16 * 4096, 16 * 2048, 16 * 512)
    assert len(sizes) == 48 * 2 * 2


# ---------------------------------------------------------------------------------------------
# Device


def test_a_router_loss_of_each_micro_batch_keeps_the_logits_of_all_layers() -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
    }
    facts = model_facts(config)

    def router_logits(*, has_loss: bool) -> dict[str, int]:
        terms = device_terms(
            facts,
            named_machine("rtx4090"),
            replace(WORKLOAD, has_router_loss=has_loss),
            num_slots=2,
            num_micro_batches=3,
            is_reduced=False,
            is_padded=has_loss,
            is_stashed=False,
        )
        return {term.name: term.num_bytes for term in terms if "router" in term.name}

    one_bytes = 4096 * 8 * 2  # tokens, experts, bf16
    assert router_logits(has_loss=True) == {"a layer's router loss": (2 + 3 * 2) * one_bytes}
    assert router_logits(has_loss=False) == {}


def test_slots_take_the_largest_layer_each() -> None:
    one_layer = layer_weight_bytes(QWEN_30B, dtype_bytes=2)[0]
    assert on_5090()["slots"] == 4 * one_layer
    assert on_5090(num_slots=48)["slots"] == 48 * one_layer


def test_kept_inputs_grow_with_layers_and_micro_batches() -> None:
    assert on_5090()["kept layer inputs"] == 48 * 2 * 4096 * 2048 * 2
    assert on_5090(num_micro_batches=4)["kept layer inputs"] == 48 * 4 * 4096 * 2048 * 2


def test_adapters_gradients_and_states_are_fp32() -> None:
    count = sum(adapter_tensor_sizes(QWEN_30B, WORKLOAD.adapter))
    terms = on_5090()
    assert terms["adapters"] == terms["gradients"] == 4 * count
    assert terms["optimizer states"] == 8 * count


def test_adapters_on_experts_take_their_factors_and_never_merged_weights() -> None:
    plain = replace(WORKLOAD, micro_batch_size=8)  # so that a visit is the worst instant
    experts = replace(plain, adapter=replace(plain.adapter, experts=True))
    name = "one visit: adapter factors"
    assert "one visit: gradients" in on_5090(plain)
    assert name not in on_5090(plain)
    one_layer_bytes = 2 * QWEN_30B.layers[0].weights("experts")
    up, down = (16 * 128 * features for features in (2048 + 1536, 768 + 2048))
    assert on_5090(experts)[name] == (2 + 4) * (up + down) < one_layer_bytes / 15
    by_torch = on_5090(experts, machine=card("rtx5090", "grouped_mm"))
    assert by_torch[name] == 2 * (up + down) + 6 * up


def test_the_head_chunk_counts_only_when_it_is_larger_than_a_visit() -> None:
    assert "head chunk" not in on_5090()
    large = on_5090(replace(WORKLOAD, head_chunk_tokens=4096))
    assert large["head chunk"] == 4096 * (12 * 151936 + 6 * 2048)
    assert not any(name.startswith("one visit") for name in large)


def test_encoded_slots_shrink_and_one_decoded_layer_stands_beside_them() -> None:
    encoded = on_5090(replace(WORKLOAD, codec="nf4"))
    assert encoded["slots"] == pytest.approx(0.2584 * on_5090()["slots"], rel=1e-3)
    layer_bytes = layer_weight_bytes(QWEN_30B, dtype_bytes=2)[0]
    assert encoded["decoded layer"] == layer_bytes
    assert encoded["decode workspace"] == decode_workspace_bytes("nf4")
    assert "decoded layer" not in on_5090()
    assert on_5090(replace(WORKLOAD, codec="bf16")) == on_5090()


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (WORKLOAD, replace(WORKLOAD, seq_len=8192, label_tokens=8192)),
        (WORKLOAD, replace(WORKLOAD, micro_batch_size=2, label_tokens=8192)),
        (WORKLOAD, replace(WORKLOAD, dtype_bytes=4)),
        (replace(WORKLOAD, optimizer="adamw_8bit"), WORKLOAD),
        (WORKLOAD, replace(WORKLOAD, adapter=replace(WORKLOAD.adapter, rank=64))),
    ],
)
def test_more_work_takes_more_memory(smaller: Workload, larger: Workload) -> None:
    assert sum(on_5090(smaller).values()) < sum(on_5090(larger).values())


def test_masks_are_recorded_for_padding_and_for_windows_that_bind() -> None:
    mask = 4096 * 4096
    plain = recorded_bytes(QWEN_30B, WORKLOAD, is_padded=False)
    assert recorded_bytes(QWEN_30B, WORKLOAD, is_padded=True) - plain == mask
    windowed = recorded_bytes(GEMMA, WORKLOAD, is_padded=False)
    assert recorded_bytes(GEMMA, WORKLOAD, is_padded=True) - windowed == mask
    short = replace(WORKLOAD, seq_len=512)
    unbound = recorded_bytes(GEMMA, short, is_padded=False)
    assert recorded_bytes(GEMMA, short, is_padded=True) - unbound == 2 * 512 * 512


def test_an_8k_mask_is_67_mb() -> None:
    long = replace(WORKLOAD, seq_len=8192)
    difference = recorded_bytes(QWEN_30B, long, is_padded=True) - recorded_bytes(
        QWEN_30B, long, is_padded=False
    )
    assert difference / 1e6 == pytest.approx(67, rel=WITHIN)


SMALL_DENSE: dict[str, object] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 32,
}
SMALL_MOE = SMALL_DENSE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


class Saved:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
@pytest.mark.parametrize(
    ("config", "experts", "is_dora"),
    [
        (SMALL_DENSE, False, False),
        (SMALL_DENSE, False, True),
        (SMALL_MOE, False, False),
        (SMALL_MOE, True, False),
    ],
    ids=["dense", "dense, DoRA", "moe", "moe, experts adapted"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("is_in_base_dtype", [False, True], ids=["by peft", "grouped"])
def test_saved_bytes_are_those_that_autograd_saves_within_a_tenth(
    config: dict[str, Any],
    experts: bool,
    is_dora: bool,
    dtype: torch.dtype,
    is_in_base_dtype: bool,
) -> None:
    facts, num_tokens = model_facts(config), 512
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    targets = linear_names(facts)
    parameters = ["experts.gate_up_proj", "experts.down_proj"] if experts else None
    lora = LoraConfig(
        r=2, target_modules=list(targets), target_parameters=parameters, use_dora=is_dora
    )
    model = compute_beside(get_peft_model(base, lora))
    if is_in_base_dtype:
        compute_in_base_dtype(model)
    hidden = torch.randn(1, num_tokens, 128, dtype=dtype, requires_grad=True)
    rotary = base.model.rotary_emb(hidden, torch.arange(num_tokens)[None])
    known = {t.untyped_storage().data_ptr() for t in (hidden, *rotary, *base.parameters())}
    live = WeakSet[Saved]()  # without those of a graph that ended, as that of peft's DoRA norm

    def note(tensor: torch.Tensor) -> Saved:
        live.add(saved := Saved(tensor))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved.tensor):
        output = base.model.layers[0](hidden, position_embeddings=rotary, attention_mask=None)
    assert output.requires_grad
    storages = [one.tensor.untyped_storage() for one in live]
    saved = {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in known}
    workload = replace(
        WORKLOAD,
        seq_len=num_tokens,
        label_tokens=num_tokens,
        head_chunk_tokens=1,
        adapter=AdapterSpec(
            rank=2,
            targets=targets,
            experts=experts,
            is_in_base_dtype=is_in_base_dtype,
            is_dora=is_dora,
        ),
        dtype_bytes=dtype.itemsize,
    )
    terms = by_name(
        device_terms(
            facts,
            card("rtx3060", "grouped_mm"),
            workload,
            num_slots=1,
            num_micro_batches=1,
            is_reduced=False,
            is_padded=False,
            is_stashed=False,
        )
    )
    names = ("saved activations", "attention scores", "adapter inputs")
    predicted = sum(terms.get(f"one visit: {name}", 0) for name in names)
    assert predicted == pytest.approx(sum(saved.values()), rel=0.1)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
@pytest.mark.parametrize("config", [SMALL_DENSE, SMALL_MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kept_graphs_take_what_the_engine_keeps_within_a_tenth(
    config: dict[str, Any], dtype: torch.dtype
) -> None:
    """Three layers, two of which keep their graphs of two micro-batches."""
    config, num_tokens = config | {"num_hidden_layers": 3}, 256
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = LayeredModel(get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])))
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    graphs: list[Graph] = []
    fronts = []
    for seed in range(2):
        fronts.append(model.front({"input_ids": torch.full((1, num_tokens), seed)}))
        hidden = torch.randn(1, num_tokens, 128, dtype=dtype)
        for layer in (1, 2):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                call = fronts[-1].calls[layer]
                graphs.append(visit_with_graph(model, layer, input_BTD=hidden, call=call))
            hidden = graphs[-1].output
    known = [*base.parameters(), *(graph.input_BTD for graph in graphs)]
    known += [p for f in fronts for p in f.calls[0].parts() if isinstance(p, torch.Tensor)]
    places = {tensor.untyped_storage().data_ptr() for tensor in known}
    found = sum(size for place, size in saved.items() if place not in places)
    outputs = sum(graph.output.nbytes for graph in graphs[1::2])
    needs = device_needs(
        model_facts(config),
        card("rtx3060", "grouped_mm"),
        replace(
            WORKLOAD,
            seq_len=num_tokens,
            adapter=AdapterSpec(rank=2, targets=("q_proj", "v_proj"), experts=False),
            dtype_bytes=dtype.itemsize,
        ),
        num_micro_batches=2,
        is_reduced=False,
        is_padded=False,
        is_stashed=False,
        traced=None,
    )
    assert needs.graph_bytes[2] == pytest.approx(found + outputs, rel=0.1)


# ---------------------------------------------------------------------------------------------
# Host


def host(machine: Machine, **changes: int) -> tuple[MemoryTerm, ...]:
    run = HostLoad(
        workload=WORKLOAD,
        num_workers=changes.pop("num_workers", 0),
        num_stashed=changes.pop("num_stashed", 0),
    )
    settings = {"local_ranks": 1, "rank_device_bytes": 10**9}
    settings |= {"num_slabs": changes.get("local_ranks", 1)} | changes
    return host_terms(QWEN_30B, machine, [run], **settings)


def test_the_slab_holds_exactly_the_weights_of_all_layers() -> None:
    terms = by_name(host(named_machine("rtx5090"), num_workers=2))
    assert terms["slab"] == sum(to_pages(2 * x.num_parameters) for x in QWEN_30B.layers)
    assert "staging" not in terms


def test_a_cpu_counts_its_process_once_with_the_device() -> None:
    cpu = replace(named_machine("rtx5090"), device="cpu")
    assert "process" not in by_name(host(cpu))
    terms = device_terms(
        QWEN_30B,
        cpu,
        WORKLOAD,
        num_slots=2,
        num_micro_batches=1,
        is_reduced=False,
        is_padded=False,
        is_stashed=False,
    )
    assert by_name(terms)["context"] == cpu.context_bytes
    assert "cuBLAS workspaces" not in by_name(terms)


def test_stashed_inputs_leave_those_of_three_layers_on_the_device() -> None:
    each = 4096 * 2048 * 2
    assert on_5090(num_micro_batches=8, is_stashed=True)["kept layer inputs"] == 3 * 8 * each
    terms = by_name(host(named_machine("rtx5090"), num_stashed=8))
    assert terms["stashed layer inputs"] == 47 * 8 * each


def test_each_further_rank_has_a_slab_workers_and_a_process_of_its_own() -> None:
    gpu = replace(named_machine("rtx5090"), pinned_bytes=10**12)
    alone = total_bytes(host(gpu, num_workers=2))
    assert by_name(host(gpu, num_workers=2, local_ranks=3))["other ranks"] == 2 * alone
    cpu = replace(gpu, device="cpu")
    others = by_name(host(cpu, local_ranks=2, rank_device_bytes=7 * GB))["other ranks"]
    assert others == total_bytes(host(cpu)) + 7 * GB


def test_gradients_go_to_other_ranks_through_a_bucket() -> None:
    assert "gradient bucket" not in on_5090()
    adapter_bytes = 4 * sum(adapter_tensor_sizes(QWEN_30B, WORKLOAD.adapter))
    # what is sent, and what arrives
    assert on_5090(is_reduced=True)["gradient bucket"] == min(2 * adapter_bytes, 64 * 2**20)
