"""Memory of a plan, by hand."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from finetune.adapter.lora import add_lora
from finetune.recipe.adapters import LoraSection
from offload.engine.engine import EngineOptions
from offload.engine.model.layers import LayeredModel
from offload.engine.model.visits import Graph, visit_with_graph
from offload.engine.tracing.visits import trace_visits
from offload.errors import DoesNotFitError, OffloadError
from offload.plan.facts.codec import CODECS
from offload.plan.facts.facts import AdapterSpec, linear_names
from offload.plan.facts.optimizer import (
    HOST_GRADIENTS,
    HOST_STATES,
    LOW_HALVES,
    host_update_bytes,
    optimizers_that,
    paged_bytes,
    state_bytes,
    temporary_bytes,
)
from offload.plan.facts.trainable import (
    EMBEDDING,
    HEAD,
    NORMS,
    adapter_tensor_sizes,
    all_weights,
    trained_parameters,
    trained_tensor_shapes,
)
from offload.plan.facts.workload import Workload, to_pages
from offload.plan.machine.machine import (
    GIB,
    ExpertsImplementation,
    Implementation,
    Machine,
    named_machine,
)
from offload.plan.memory.memory import (
    LAYER_GRADIENTS,
    SLAB,
    SLOTS,
    STAGING,
    VISIT,
    HostLoad,
    MemoryTerm,
    cache_bytes,
    device_needs,
    device_terms,
    fitting_rows,
    head_chunk_bytes,
    host_terms,
    layer_weight_bytes,
    recorded_bytes,
    require_room,
    total_bytes,
)
from offload.plan.memory.visit import visit_bytes
from offload.plan.plan import Plan, plan
from offload.plan.schedule.op import Kind
from offload.plan.time.optimizer import update_work
from offload.plan.what_if import what_if
from tests.builders import adapter, model_facts, qwen3_30b, workload
from tests.full_plans import facts_of, planned
from tests.tiers import each_value, mostly_slow, tiered

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
# str


@pytest.mark.parametrize(
    ("optimizer", "shape", "num_bytes"),
    [
        ("adamw", (1000, 100), 8 * 100_000),
        ("adamw_8bit", (4095,), 8 * 4095),  # small tensors stay in fp32
        ("adamw_8bit", (4097,), 2 * (4097 + 4 * 17)),
        ("paged_adamw_8bit", (99_999,), 2 * (99_999 + 4 * 391)),
        ("paged_adamw_8bit", (1000, 100), 2 * 4 * 391),  # moments of large ones are on the host
        ("adafactor", (300, 20), 4 * (300 + 20)),
        ("adafactor", (5, 300, 20), 4 * 5 * (300 + 20)),
        ("adafactor", (7,), 4 * 7),
        ("lion", (300, 20), 4 * 6000),
        ("sgd", (300, 20), 0),
    ],
)
def test_states_of_a_tensor_on_the_device(
    optimizer: str, shape: tuple[int, ...], num_bytes: int
) -> None:
    assert state_bytes([shape, shape], optimizer) == 2 * num_bytes


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


@pytest.mark.parametrize("optimizer", optimizers_that(lambda one: one.made_by is None))
def test_an_optimizer_of_weights_in_ram_has_no_states_on_the_device(optimizer: str) -> None:
    assert state_bytes([], optimizer) == 0
    with pytest.raises(OffloadError, match=f"{optimizer}, but what trains is on the device"):
        state_bytes([(300, 20)], optimizer)


def test_adafactor_takes_a_tensor_at_a_time() -> None:
    assert temporary_bytes([(300, 20), (7,)], "adafactor") == 4 * 6000


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
    assert encoded["decode workspace"] == CODECS["nf4"].workspace_bytes
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


# -------------------------------------------------------------------------------------------- visit


T = 512
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "olmo2": {},
    "gemma3_text": {"layer_types": ["full_attention"]},
}


BF16 = torch.bfloat16
CASES = (tuple(TYPES), ("all-linear", "attention"), (torch.float32, BF16, BF16, torch.float32))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "targets", "dtype"),
    tiered(
        itertools.product(*CASES),
        default=[("gemma3_text", "attention", BF16)],
        slow=[("qwen3", "all-linear", torch.float32), *each_value(*CASES)],
    ),
)
def test_a_visit_with_fused_parts_takes_what_is_traced_within_a_tenth(
    name: str, targets: Literal["all-linear", "attention"], dtype: torch.dtype
) -> None:
    config = {**SIZES, **TYPES[name], "model_type": name}
    facts = model_facts(config)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = add_lora(base, adapter(rank=2, targets=targets), seed=0).train()
    names = LoraSection(targets=targets).chosen_targets(linear_names(facts))
    spec = AdapterSpec(rank=2, targets=names, experts=False, is_in_base_dtype=True)
    load = workload(seq_len=T, adapter=spec, dtype_bytes=dtype.itemsize, leaves_out=False)
    machine = replace(named_machine("rtx3090"), device="cpu")
    sizes = {}
    for code in ("plain", "fused"):
        said = visit_bytes(
            facts, machine, facts.layers[0], replace(load, layer_code=code), is_padded=False
        )
        (found,) = trace_visits(
            model,
            batch_size=1,
            seq_len=T,
            is_padded=False,
            head_chunk_tokens=64,
            capability=None,
            plain_parts=frozenset() if code == "fused" else None,
        ).visits
        sizes[code] = (said.graph + said.gradients, found)
    said_fused, found_fused = sizes["fused"]
    assert said_fused == pytest.approx(found_fused, rel=0.1), sizes
    assert sizes["plain"][1] > found_fused


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(itertools.product(TYPES, [torch.float32, BF16]), ("qwen3", BF16)),
)
def test_a_visit_with_dora_takes_what_is_traced_within_a_tenth(
    name: str, dtype: torch.dtype
) -> None:
    config = {**SIZES, **TYPES[name], "model_type": name}
    facts = model_facts(config)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = add_lora(base, adapter(rank=2, dora=True), seed=0).train()
    spec = AdapterSpec(
        rank=2,
        targets=linear_names(facts),
        experts=False,
        is_in_base_dtype=True,
        is_dora=True,
    )
    load = workload(
        seq_len=T,
        adapter=spec,
        dtype_bytes=dtype.itemsize,
        leaves_out=False,
        layer_code="fused",
    )
    machine = replace(named_machine("rtx3090"), device="cpu")
    said = visit_bytes(facts, machine, facts.layers[0], load, is_padded=False)
    (found,) = trace_visits(
        model,
        batch_size=1,
        seq_len=T,
        is_padded=False,
        head_chunk_tokens=64,
        capability=None,
        plain_parts=frozenset(),
    ).visits
    assert said.dora == 0
    assert said.graph + said.gradients == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("name", "dtype", "code"),
    mostly_slow(
        itertools.product(["qwen3", "llama"], [torch.float32, BF16], ["plain", "fused"]),
        ("qwen3", BF16, "fused"),
        ("llama", torch.float32, "plain"),
    ),
)
def test_a_head_chunk_takes_what_is_traced_within_a_hundredth(
    name: str, dtype: torch.dtype, code: Literal["plain", "fused"]
) -> None:
    config = {**SIZES, "model_type": name, "vocab_size": 8192}
    facts = model_facts(config)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model = add_lora(base, adapter(rank=2, targets="attention"), seed=0).train()
    spec = AdapterSpec(rank=2, targets=("q_proj",), experts=False)
    load = workload(seq_len=T, adapter=spec, dtype_bytes=dtype.itemsize, head_chunk_tokens=128)
    found = trace_visits(
        model,
        batch_size=1,
        seq_len=T,
        is_padded=False,
        head_chunk_tokens=128,
        capability=None,
        plain_parts=frozenset() if code == "fused" else None,
    ).head_chunk
    said = head_chunk_bytes(facts, load, is_fused=code == "fused")
    assert said == pytest.approx(found, rel=0.01)


# -------------------------------------------------------------------------------------------- cache


FACTS = qwen3_30b()
ROW_BYTES = 48 * 2 * 4 * 128 * 2  # a token: layers, keys and values, heads, features, bf16


def test_a_row_takes_keys_and_values_of_all_tokens_that_were_computed() -> None:
    found = cache_bytes(FACTS, prompt_tokens=1000, new_tokens=25, dtype_bytes=2)
    assert found == ROW_BYTES * 1024


def test_rows_that_do_not_fit_are_refused_with_the_number_that_do() -> None:
    terms = [
        MemoryTerm(name=SLOTS, num_bytes=10 * GIB),
        MemoryTerm(name=VISIT, num_bytes=5 * GIB),  # of a step: not there while it generates
    ]
    asked = {"prompt_tokens": 10_000, "new_tokens": 241, "dtype_bytes": 2}
    limit_bytes = 10 * GIB + 4 * ROW_BYTES * 10_240
    assert fitting_rows(FACTS, terms, limit_bytes=limit_bytes, **asked) == 4
    require_room(FACTS, terms, limit_bytes=limit_bytes, num_rows=4, **asked)
    with pytest.raises(
        DoesNotFitError,
        match=r"of 5 rows of 10000 tokens and 241 new ones take 4\.69 GiB; 3\.75 GiB of device"
        r" memory is free next to the slots\n\nhint: at most 4 rows at a time",
    ):
        require_room(FACTS, terms, limit_bytes=limit_bytes, num_rows=5, **asked)
    with pytest.raises(DoesNotFitError, match=r"0\.00 GiB .*\n\nhint: a smaller `--max-new"):
        require_room(FACTS, terms, limit_bytes=10 * GIB, num_rows=1, **asked)


# ------------------------------------------------------------------------------------ whole weights


DOCS = Path(__file__).parents[4] / "docs"


def test_all_weights_are_all_of_the_models_and_tied_ones_count_once() -> None:
    for name in ("qwen3-8b", "qwen3-0.6b", "qwen3-30b-a3b"):
        facts = facts_of(name)
        spec = AdapterSpec.none(all_weights(facts))
        assert trained_parameters(facts, spec) == facts.num_parameters
    tied, untied = all_weights(facts_of("qwen3-0.6b")), all_weights(facts_of("qwen3-8b"))
    assert set(dict(tied.outer)) == {NORMS, EMBEDDING}
    assert set(dict(untied.outer)) == {NORMS, EMBEDDING, HEAD}


@pytest.mark.parametrize(
    ("optimizer", "in_bfloat16", "in_float32"),
    [
        ("adamw", 14, 16),
        ("adamw_bf16", 12, 14),
        ("lion", 10, 12),
        ("lion_bf16", 8, 10),
        ("adamw_8bit", 8.03, 10.03),
        ("adafactor", 6.01, 8.01),
        ("sgd", 6, 8),
    ],
)
def test_the_guide_has_the_bytes_of_a_weight(
    optimizer: str, in_bfloat16: float, in_float32: float
) -> None:
    sizes = [
        host_update_bytes(number, optimizer, low) for number, low in ((2, None), (2, 4), (4, None))
    ]
    all_of = [in_bfloat16, in_bfloat16 + 2, in_float32]
    assert [sum(of.values()) for of in sizes] == pytest.approx(all_of, abs=2e-3)
    states = f"{sizes[0][HOST_STATES]:.3g}"
    row = f"| `{optimizer}` | {states} | {' | '.join(f'{size:.4g}' for size in all_of)} |"
    assert row in (DOCS / "guides" / "full-fine-tuning.md").read_text()


def test_host_memory_is_bytes_times_weights() -> None:
    found = planned("qwen3-8b", ram_gib=192)
    terms = {term.name: term.num_bytes for term in found.host_memory}
    facts = found.facts
    num, outer = facts.num_parameters, facts.outer_parameters
    assert terms[LOW_HALVES] == 2 * num
    assert terms[HOST_STATES] == 8 * num
    assert terms[HOST_GRADIENTS] == 2 * (num - outer) + 4 * outer
    assert terms[SLAB] == pytest.approx(2 * (num - outer), rel=1e-3)
    on_device = {term.name: term.num_bytes for term in found.device_memory}
    assert on_device[LAYER_GRADIENTS] == 2 * 2 * max(x.num_parameters for x in facts.layers)
    assert on_device["gradients"] == 4 * outer


def test_states_of_fewer_bytes_take_less_memory_and_the_slow_ones_more_time() -> None:
    found = {
        name: planned("qwen3-8b", ram_gib=192, optimizer=name)
        for name in ("adamw", "adamw_bf16", "lion", "adamw_8bit", "lion_bf16", "adafactor", "sgd")
    }
    memory = {name: sum(t.num_bytes for t in one.host_memory) for name, one in found.items()}
    assert sorted(memory, key=lambda name: -memory[name]) == list(found)
    busy_s = {name: one.predict().busy_s(Kind.UPDATE) for name, one in found.items()}
    assert busy_s["sgd"] < busy_s["lion"] < busy_s["adamw"]
    assert busy_s["adamw_bf16"] < busy_s["adamw"]
    facts = found["sgd"].facts
    num_weights = facts.num_parameters - facts.outer_parameters
    assert busy_s["adamw_8bit"] == pytest.approx(23e-9 / 8 * num_weights)


@pytest.mark.parametrize("ram_gib", [64, 96])
def test_what_is_too_much_is_refused_without_hints_that_do_not_apply(ram_gib: int) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        planned("qwen3-8b", ram_gib=ram_gib)
    shown = str(caught.value)
    assert "optimizer states in RAM; less with `train.optimizer: lion`" in shown
    for other in ("adapter", "codec", "tier: disk"):
        assert other not in shown


def updated_layers(found: Plan) -> list[int]:
    return [op.layer_index for op in found.schedule.ops if op.kind is Kind.UPDATE]


def test_each_trained_layer_is_updated_and_loaded_anew() -> None:
    found = planned("qwen3-8b", ram_gib=192)
    assert updated_layers(found) == list(range(36))
    assert found.schedule.num_loads == 2 * 36 - found.num_slots


def test_layers_that_are_frozen_stay_in_their_slots() -> None:
    every = all_weights(facts_of("qwen3-8b"))
    top = replace(every, layers=(0,) * 30 + every.layers[30:], outer=())
    found = planned("qwen3-8b", ram_gib=192, whole=top, num_slots=4)
    assert updated_layers(found) == list(range(30, 36))
    assert found.schedule.num_loads == 2 * (36 - 4)


def test_a_slow_memory_exposes_updates_and_the_bound_holds() -> None:
    fast = planned("qwen3-8b", ram_gib=192)
    rate = replace(fast.machine.host_memory_bytes_per_s, value=2e9)
    slow = plan(fast.facts, replace(fast.machine, host_memory_bytes_per_s=rate), fast.request)
    updates_s = slow.predict().busy_s(Kind.UPDATE)
    assert updates_s == pytest.approx(
        sum(slow.facts.num_parameters for _ in [0]) * 26 / 2e9, rel=0.2
    )
    assert fast.predict().exposed_s(Kind.UPDATE) < 0.3 * fast.predict().busy_s(Kind.UPDATE)
    assert slow.predict().exposed_s(Kind.UPDATE) > 0.5 * updates_s
    for one in (fast, slow):
        assert one.bound_s <= one.step_s * (1 + 1e-9)
        assert one.bound_s > 0.9 * one.step_s


def test_gradients_of_layers_are_page_locked_beside_the_layers() -> None:
    """Both in bf16: where one of them alone can be locked, layers go through a ring."""
    found = planned("qwen3-8b", ram_gib=192)
    size = 2 * sum(layer.num_parameters for layer in found.facts.layers)

    def staging(pinned_bytes: int) -> int:
        made = plan(found.facts, replace(found.machine, pinned_bytes=pinned_bytes), found.request)
        return {term.name: term.num_bytes for term in made.host_memory}.get(STAGING, 0)

    slab = {term.name: term.num_bytes for term in found.host_memory}[SLAB]
    assert EngineOptions.planned(found).locked_bytes == size
    assert staging(slab + size) == 0
    assert staging(slab + size - 1) > 0
    with pytest.raises(DoesNotFitError, match="for gradients of the model's weights"):
        staging(size - 1)


def test_other_ways_are_priced() -> None:
    found = what_if(planned("qwen3-8b", ram_gib=192), num_cards=2)
    assert all("adapter" not in option.how for option in found.options)
    assert found.options
