"""Steps whose recomputes leave out what nothing reads: no bit differs, and the plan knows them."""

import copy
import ctypes
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune.adapter.linear_lora import compute_beside, compute_in_base_dtype
from finetune.training.compile import compile_layers
from offload.engine.batch import Batch
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.model.hooks import visit_with_graph
from offload.engine.model.layers import LayeredModel
from offload.engine.recompute.unread import Unread
from offload.plan.facts.facts import AdapterSpec, model_facts
from offload.plan.time.adapters import branches
from offload.plan.time.costs import layer_work, price, recomputed_products
from offload.plan.time.pricer import Pricer
from tests.builders import byte_machine, workload
from tests.counted import Counted
from tests.parity.architectures import micro_batches
from tests.parity.experts import adapted_by_peft
from tests.parity.steps import OPTIONS
from tests.parity.tiny_models import tiny_model
from tests.tiers import each_value, mostly_slow, tiered

pytestmark = pytest.mark.usefixtures("one_thread")
DOWN = frozenset({"mlp.down_proj"})
SHARED = frozenset({"mlp.shared_experts.down_proj"})
NONE: frozenset[str] = frozenset()
FOUND = {
    "llama": (DOWN,) * 4,
    "qwen3": (DOWN,) * 4,
    "phi3": (DOWN,) * 4,
    "granite": (DOWN,) * 4,
    "starcoder2": (frozenset({"mlp.c_proj"}),) * 4,  # with biases
    "opt": (frozenset({"fc2"}),) * 4,
    "cohere": (frozenset({"self_attn.o_proj", "mlp.down_proj"}),) * 4,  # beside each other
    "deepseek_v3": (DOWN, SHARED, SHARED, SHARED),
    "qwen3_moe": (NONE,) * 4,
    "qwen2_moe": (NONE,) * 4,  # a gate multiplies the shared expert
    "gemma2": (NONE,) * 4,
    "gemma3_text": (NONE,) * 4,
    "olmo2": (NONE,) * 4,
    "glm4": (NONE,) * 4,
    "gpt2": (NONE,) * 4,  # no linear layers: `Conv1D`
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapted(
    model_type: str,
    *,
    dtype: torch.dtype = torch.float32,
    targets: Any = "all-linear",
    is_grouped: bool = True,
    **settings: Any,
) -> nn.Module:
    base: Any = tiny_model(model_type)
    torch.manual_seed(0)
    model: Any = get_peft_model(base, LoraConfig(r=3, target_modules=targets, **settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
        elif "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    if is_grouped:
        compute_in_base_dtype(model)
    trained: nn.Module = model.train()
    return trained


Step = tuple[list[float], dict[str, torch.Tensor]]


def attached(model: nn.Module, options: EngineOptions) -> Engine:
    return Engine(model, device=torch.device("cpu"), options=options)


def steps(model: nn.Module, options: EngineOptions, num: int = 2) -> tuple[Step, Engine]:
    """Return losses and the sum of the gradients of some steps, each after an update."""
    model = copy.deepcopy(model)
    engine = attached(model, options)
    losses, sums = [], dict[str, torch.Tensor]()
    for seed in range(num):
        losses.append(engine.forward_backward(micro_batches(), dropout_seed=seed).loss)
        for name, parameter in engine.trained_parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.clone()
                sums[f"{seed} {name}"] = gradient
                parameter.data -= 0.1 * gradient
                parameter.grad = None
    engine.close()
    return (losses, sums), engine


def require_same_bits(
    model: nn.Module, options: EngineOptions = OPTIONS
) -> tuple[frozenset[str], ...]:
    """Check a step with and without what is left out; return that."""
    (losses, ours), engine = steps(model, options)
    (whole_losses, whole), plain = steps(model, replace(options, leaves_out=False))
    assert not any(plain.unread)
    assert losses == whole_losses
    assert ours.keys() == whole.keys()
    assert all(torch.equal(ours[name], whole[name]) for name in whole)
    return engine.unread


@pytest.mark.parametrize("model_type", mostly_slow(list(FOUND), "cohere"))
def test_what_nothing_reads_is_left_out_without_a_bit_of_difference(model_type: str) -> None:
    targets = "all-linear" if model_type != "gpt2" else ["c_attn"]
    assert require_same_bits(adapted(model_type, targets=targets)) == FOUND[model_type]


EXPERTS = frozenset({"mlp.experts"})
WITH_EXPERTS = {
    "qwen3_moe": (EXPERTS,) * 4,
    "deepseek_v3": (DOWN, *(EXPERTS | SHARED,) * 3),
    "qwen2_moe": (EXPERTS,) * 4,
    "gpt_oss": (NONE,) * 4,  # the router's gradient reads a bias of each expert
}
EXPERT_CASES = (tuple(WITH_EXPERTS), ("eager", "grouped_mm"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "path"),
    tiered(
        itertools.product(*EXPERT_CASES),
        default=[("deepseek_v3", "grouped_mm")],
        slow=list(itertools.product(*EXPERT_CASES)),
    ),
)
def test_adapted_experts_leave_their_last_product_out(model_type: str, path: str) -> None:
    base = tiny_model(model_type)
    base.set_experts_implementation(path)
    model = compute_beside(adapted_by_peft(base)).train()
    assert require_same_bits(model) == WITH_EXPERTS[model_type]


def test_the_plan_knows_of_which_experts_the_last_product_is_left_out() -> None:
    base: Any = tiny_model("deepseek_v3")
    facts = model_facts(base.config.to_dict())
    for has_experts in (False, True):
        load = workload(adapter=AdapterSpec(rank=4, targets=("q_proj",), experts=has_experts))
        groups = {x.group for layer in facts.layers[1:] for x in load.left_out(layer)}
        assert groups == {"shared_experts"} | ({"experts"} if has_experts else set())


STORED = {
    "resident": replace(OPTIONS, num_slots=8),
    "nf4": replace(OPTIONS, codec="nf4"),
    "int8": replace(OPTIONS, codec="int8"),
    "kept graphs": replace(OPTIONS, num_kept_graphs=2),
    "stash": replace(OPTIONS, stash="host"),
}
TARGETS = {"all-linear": "all-linear", "queries": ["q_proj"]}
STORED_CASES = (tuple(STORED), (torch.bfloat16, torch.float32), tuple(TARGETS))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stored", "dtype", "targets"),
    tiered(
        itertools.product(*STORED_CASES),
        default=[("kept graphs", torch.bfloat16, "all-linear")],
        slow=each_value(*STORED_CASES),
    ),
)
def test_however_layers_are_stored_no_bit_differs(
    stored: str, dtype: torch.dtype, targets: str
) -> None:
    model = adapted("qwen3", dtype=dtype, targets=TARGETS[targets], lora_dropout=0.2)
    assert require_same_bits(model, STORED[stored]) == FOUND["qwen3"]


@pytest.mark.thorough
def test_trained_weights_on_the_host_and_a_product_that_trains_are_computed() -> None:
    model = adapted("llama", targets=["q_proj"], modules_to_save=["down_proj"])
    for where in ("device", "host"):
        found = require_same_bits(model, replace(OPTIONS, trained_weights=where))
        assert found == (NONE,) * 4


@pytest.mark.thorough
def test_of_adapters_that_peft_computes_only_the_frozen_product_is_left_out() -> None:
    base = frozenset({"mlp.down_proj.base_layer"})
    assert require_same_bits(adapted("qwen3", is_grouped=False)) == (base,) * 4
    assert require_same_bits(adapted("qwen3", use_dora=True)) == (NONE,) * 4


@pytest.mark.thorough
def test_router_losses_are_the_same() -> None:
    routed: Any = adapted("qwen3_moe")
    routed.config.output_router_logits = True
    assert require_same_bits(routed) == (NONE,) * 4


def test_compiled_layers_are_computed() -> None:
    model = adapted("llama")
    compile_layers(LayeredModel(model).layers)
    engine = attached(model, OPTIONS)
    for layer in LayeredModel(model).layers:  # compiling takes minutes; what counts is the mark
        assert layer._compiled_call_impl is not None
    engine._inspect([{"input_ids": torch.arange(8)[None]}], has_labels=True)
    assert engine.unread == (NONE,) * 4
    engine.close()


@pytest.mark.thorough
def test_hooks_that_come_later_see_their_values_and_those_that_go_leave_none() -> None:
    model = adapted("llama")
    engine = attached(model, OPTIONS)
    engine.forward_backward(micro_batches(), dropout_seed=0)
    assert engine.unread == FOUND["llama"]
    seen: list[bool] = []
    layer: Any = LayeredModel(model).layers[1]
    handle = layer.register_forward_hook(
        lambda _module, _inputs, output: seen.append(bool(output.isnan().any()))
    )
    engine.forward_backward(micro_batches(), dropout_seed=0)
    assert seen
    assert not any(seen)
    assert engine.unread == (DOWN, NONE, DOWN, DOWN)
    handle.remove()
    engine.forward_backward(micro_batches(), dropout_seed=0)
    assert engine.unread == FOUND["llama"]
    engine.close()


Use = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def with_use(model: nn.Module, use: Use) -> nn.Module:
    """Let MLPs return what is made of their input and output by their number; copies do as well."""
    for number, layer in enumerate(LayeredModel(model).layers):
        mlp: Any = layer.mlp
        mlp.number, kind = number, type(mlp)

        def forward(self: Any, x: torch.Tensor, kind: Any = kind) -> torch.Tensor:
            return use(x, kind.forward(self, x), self.number)

        mlp.__class__ = type("Used", (kind,), {"forward": forward})
    return model


@pytest.mark.thorough
def test_a_visit_that_is_not_as_it_was_inspected_computes_all() -> None:
    """A layer with a norm after its MLP for long rows only."""
    model = adapted("llama")

    def with_norm(x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True)) if x.shape[1] > 5 else y

    assert require_same_bits(with_use(model, with_norm)) == (NONE,) * 4


def halved_if_large(x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    return y * 0.5 if x.shape[1] > 5 and y.abs().max() > 0.001 else y


def halved_if_large_for_numpy(x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    return y * 0.5 if x.shape[1] > 5 and y.detach().abs().max().numpy() > 0.001 else y


def halved_unless_an_error(x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    try:
        return y * 0.5 if x.shape[1] > 5 and y.abs().max() > 0.001 else y
    except RuntimeError:
        return y


def halved_in_one_layer(_: torch.Tensor, y: torch.Tensor, layer: int) -> torch.Tensor:
    return y * 0.5 if layer == 2 and y.abs().max() > 0.001 else y


def halved_in_place(x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    return y.mul_(0.5) if x.shape[1] > 5 else y


def scaled_by_signs(x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    return y * ((y.detach() > 0).float() + 0.1 if x.shape[1] > 5 else torch.ones(()))


def with_a_hook_on_its_gradient(x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    if x.shape[1] > 5 and y.requires_grad:
        y.register_hook(lambda gradient: gradient * (y.detach() < 0.01))
    return y


class Pointer(torch.autograd.Function):
    """Adds what a pointer points to, as kernels do that torch does not know."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values = (ctypes.c_float * x.numel()).from_address(y.data_ptr())
        return x + torch.tensor(list(values)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient


def added_by_a_foreign_kernel(x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    added: torch.Tensor = Pointer.apply(x.contiguous(), y)
    return added


@pytest.mark.thorough
@pytest.mark.parametrize(
    "use",
    mostly_slow(
        [
            halved_if_large,
            halved_if_large_for_numpy,
            halved_unless_an_error,
            halved_in_one_layer,
            halved_in_place,
            scaled_by_signs,
            with_a_hook_on_its_gradient,
            added_by_a_foreign_kernel,
        ],
        halved_in_one_layer,
    ),
)
@pytest.mark.parametrize(
    "targets",
    mostly_slow(["all-linear", ["q_proj"]], ["q_proj"], rest=pytest.mark.exhaustive),
    ids=str,
)
def test_a_layer_that_reads_only_where_it_was_not_inspected_is_computed(
    use: Use, targets: Any
) -> None:
    model = adapted("llama", targets=targets)
    others = DOWN if use is halved_in_one_layer else NONE
    assert require_same_bits(with_use(model, use)) == (others, others, NONE, others)


@pytest.mark.thorough
def test_layers_that_threshold_their_mlp_have_the_gradients_of_a_plain_loop() -> None:
    """Inspection sees rows of 3 tokens, and these are longer: each layer falls back, and does so
    in several micro-batches and steps. The loop and its loss are written out here.
    """
    model = with_use(adapted("llama"), halved_if_large)
    reference, ids = copy.deepcopy(model), torch.arange(2, 26).view(2, 12) % 60
    batches = [{"input_ids": ids, "labels": ids}, {"input_ids": ids.flip(1), "labels": ids.flip(1)}]
    engine = attached(model, OPTIONS)
    for _ in range(2):
        engine.forward_backward(batches, dropout_seed=0)
        for batch in batches:
            logits = reference(input_ids=batch["input_ids"], use_cache=False).logits
            log_probs = logits[:, :-1].log_softmax(-1)
            chosen = log_probs.gather(-1, batch["labels"][:, 1:, None])
            (-chosen.sum() / (2 * 2 * 11)).backward()
    theirs = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    assert len(theirs) == 56
    for name, parameter in engine.trained_parameters.items():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-7, msg=name)
    engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize("use", mostly_slow([halved_if_large, halved_in_place], halved_in_place))
def test_a_visit_that_is_repeated_draws_the_same_masks(use: Use) -> None:
    model = with_use(adapted("llama", lora_dropout=0.4), use)
    assert require_same_bits(model) == (NONE,) * 4


@pytest.mark.thorough
def test_evaluations_and_kept_graphs_have_values() -> None:
    model = adapted("llama")
    engine = attached(model, replace(OPTIONS, num_kept_graphs=4))
    assert torch.tensor(engine.forward_backward(micro_batches(), dropout_seed=0).loss).isfinite()
    batch: Batch = {"input_ids": micro_batches()[0]["input_ids"]}
    logits = engine.forward(batch).logits
    assert logits is not None
    assert logits.isfinite().all()
    engine.close()


# ------------------------------------------------------------------------------------- the prices

T, HIDDEN = 512, 512
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.float32), ids=str
)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]], ids=["adapted", "plain"])
def test_a_recompute_saves_the_bytes_and_operations_that_the_plan_says(
    targets: Any, dtype: torch.dtype
) -> None:
    base: Any = tiny_model("qwen3", **CONFIG)
    model: Any = get_peft_model(base.to(dtype), LoraConfig(r=16, target_modules=targets))
    compute_in_base_dtype(model)
    layered = LayeredModel(model)
    layer: Any = layered.layers[0]
    front = layered.front({"input_ids": torch.arange(T)[None] % 64})
    unread = Unread(module=layer.mlp.down_proj, path=(("AddBackward0", 1),))

    def counted(*left: Unread) -> Counted:
        count, input_BTD = Counted(), front.hidden_BTD.detach()
        with count:
            graph = visit_with_graph(
                layered, 0, input_BTD=input_BTD, call=front.calls[0], unread=left
            )
        assert graph.is_as_found
        return count

    whole, recompute = counted(), counted(unread)
    facts = model_facts({**base.config.to_dict(), "num_hidden_layers": 1})
    names = tuple(linear.name for linear in facts.layers[0].linears)
    spec = AdapterSpec(
        rank=16,
        targets=names if targets == "all-linear" else ("q_proj",),
        experts=False,
        is_in_base_dtype=True,
    )
    load = workload(
        micro_batch_size=1, seq_len=T, adapter=spec, dtype_bytes=dtype.itemsize, leaves_out=True
    )
    at = Pricer(machine=byte_machine(dtype.itemsize), facts=facts, workload=load)
    (cost,) = price(facts, at.machine, load).layers
    (down,) = load.left_out(facts.layers[0])
    found_bytes = whole.total_bytes - recompute.total_bytes
    saved_bytes = cost.forward_s - cost.recompute_s - at.matmul(down).memory_s  # not counted
    assert saved_bytes == pytest.approx(found_bytes, rel=0.1)
    every = replace(at, workload=replace(load, leaves_out=False))
    works = [layer_work(one, facts.layers[0]).visits for one in (every, at)]
    all_flops, own_flops = ((work.recompute + work.backward).flops for work in works)
    features = down.d_in + (16 if targets == "all-linear" else 0)
    assert all_flops - own_flops == 2 * T * HIDDEN * features
    adapters = [linear for linear in facts.layers[0].linears if linear.name in spec.targets]
    passes = branches(at, adapters, left_out=load.left_out(facts.layers[0]))
    products = sum(at.matmul(linear).num_ops for linear in facts.layers[0].linears)
    saved_ops = products - recomputed_products(at, facts.layers[0]).num_ops
    saved_ops += passes.forward.num_ops - passes.recompute.num_ops
    assert saved_ops == whole.total_ops - recompute.total_ops
