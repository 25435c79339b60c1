"""Layers with fused operators, compiled layers, and adapters in the dtype of the base."""

import copy
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import offload
from finetune.adapter.linear_lora import Linear, compute_in_base_dtype
from finetune.adapter.lora import add_lora
from finetune.recipe.adapters import LoraSection
from finetune.training import compile as compiling
from finetune.training.compile import FAILURES, compile_layers, refusal
from offload.engine.batch import Batch
from offload.engine.engine import Engine, EngineOptions
from offload.engine.model.layers import LayeredModel
from offload.engine.visit_cache import VISIT_CACHE
from tests.counted import Counted
from tests.parity.architectures import Gradients, gradients, plain, rel_error, streamed, truth
from tests.parity.architectures import micro_batches as padded_batches
from tests.parity.held_choices import HeldChoices
from tests.parity.objectives import ByRow, in_order, pairs, plain_step
from tests.parity.steps import NUM_LAYERS, OPTIONS, SHAPE, micro_batches, tiny, truth_of
from tests.parity.tiny_models import NUM_LAYERS as NUM_MODEL_LAYERS
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

FUSED = replace(OPTIONS, layer_kernels="fused")
RESIDENT = replace(FUSED, num_slots=NUM_LAYERS)
Step = tuple[float, dict[str, torch.Tensor]]
# Fused parts of a layer: norms, rotations, gated MLPs.
FOUND = {
    "llama": (2, 1, 1),
    "qwen3": (4, 1, 1),
    "qwen3_moe": (4, 1, 0),
    "gemma3_text": (6, 1, 1),
    "gpt_oss": (2, 0, 0),
}


@pytest.fixture
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def step(model: nn.Module, options: EngineOptions) -> Step:
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        loss = engine.forward_backward(micro_batches(), dropout_seed=0).loss
        return loss, {
            name: parameter.grad.clone()
            for name, parameter in engine.trained_parameters.items()
            if parameter.grad is not None
        }
    finally:
        engine.detach()


def in_dtype(name: str, dtype: torch.dtype, **settings: Any) -> Any:
    model = tiny(name, **settings)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" not in parameter_name:
            parameter.data = parameter.data.to(dtype)
    return model


def require_same(a: Step, b: Step) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(FOUND), "qwen3", "gpt_oss"))
def test_what_is_fused_is_found_by_what_it_computes(name: str) -> None:
    layered = LayeredModel(tiny(name))
    layered.fuse()
    assert layered.fused is not None
    counts = layered.fused.counts(1)
    assert (counts["Norm"], counts["Rotary"], counts["GatedMlp"]) == FOUND[name]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(list(FOUND), "qwen3"))
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str
)
def test_reorder_fused_layers_are_as_exact_as_the_models_own_code(
    name: str, dtype: torch.dtype
) -> None:
    fused, plain = [], []
    for seed in range(8):
        model = in_dtype(name, dtype, seed=seed)
        truth = truth_of(model)
        fused.append(rel_error(step(model, FUSED)[1], truth))
        plain.append(rel_error(step(model, OPTIONS)[1], truth))
    assert fused != plain or name == "gpt_oss"  # whose norms alone are fused
    assert sum(fused) <= 1.4 * sum(plain) + 2 * torch.finfo(torch.float32).eps


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(["qwen3", "gemma3_text", "qwen3_moe"], "gemma3_text"))
@pytest.mark.parametrize(
    "dtype", mostly_slow([torch.float32, torch.bfloat16], torch.bfloat16), ids=str
)
def test_move_a_streamed_step_with_fused_layers_is_the_resident_one(
    name: str, dtype: torch.dtype
) -> None:
    model = in_dtype(name, dtype, dropout=0.2)
    require_same(step(model, FUSED), step(model, RESIDENT))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "reference"),
    mostly_slow(
        {
            "kept graphs": (replace(FUSED, num_kept_graphs=2), RESIDENT),
            "stash": (replace(FUSED, stash="host"), RESIDENT),
            "all products": (replace(FUSED, leaves_out=False), RESIDENT),
            "int8": (replace(FUSED, codec="int8"), replace(RESIDENT, codec="int8")),
            "packed": (replace(FUSED, codec="bf16_packed"), RESIDENT),
        },
        "packed",
    ),
)
def test_move_however_fused_layers_are_run_no_bit_differs(
    options: EngineOptions, reference: EngineOptions
) -> None:
    model = in_dtype("qwen3", torch.bfloat16)
    require_same(step(model, options), step(model, reference))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("codec", mostly_slow(["native", "int8"], "int8"))
def test_move_all_together_no_bit_differs(codec: str) -> None:
    """Fused parts, MLPs in tiles, attention outputs kept and sent, graphs kept, inputs stashed."""
    model = in_dtype("qwen3", torch.bfloat16, dropout=0.0)
    tiles = replace(FUSED, mlp_chunk_tokens=5, codec=codec)
    together = replace(
        tiles, num_kept_graphs=1, num_kept_outputs=2, num_sent_outputs=2, stash="host"
    )
    resident = replace(tiles, num_slots=NUM_LAYERS)
    require_same(step(model, together), step(model, resident))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
def test_a_fused_loss_is_one_operator_and_no_other_reads_the_logits_but_the_head() -> None:
    num_tokens, vocab = 32, 32768
    config = AutoConfig.for_model("qwen3", **{**SHAPE, "vocab_size": vocab})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(requires_grad=False)
    hidden_ND = torch.randn(num_tokens, SHAPE["hidden_size"], dtype=torch.bfloat16)
    labels_N = torch.arange(num_tokens)
    losses, gradients, moved, num_fused = [], [], [], []
    for is_fused in (False, True):
        layered = LayeredModel(model)
        if is_fused:
            layered.fuse()
        gradient_ND = torch.zeros_like(hidden_ND)
        with Counted() as counted:
            loss = layered.tail_loss(
                hidden_ND,
                positions_N=labels_N,
                next_N=labels_N,
                num_items=torch.tensor(float(num_tokens)),
                gradient_ND=gradient_ND,
            )
        losses.append(loss)
        gradients.append(gradient_ND.double())
        products = sum(counted.num_bytes[name] for name in ("mm", "embedding"))
        moved.append((counted.total_bytes - products) / (num_tokens * vocab * 2))
        num_fused.append(counted.num_ops["cross_entropy"])
    assert num_fused == [0, 1]
    assert 2.0 < moved[1] < 2.3  # logits in, their gradient out
    assert moved[0] > 18
    assert losses[1] == pytest.approx(float(losses[0]), rel=1e-5)
    assert rel_error({"": gradients[1]}, {"": gradients[0]}) < 0.01


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
@pytest.mark.thorough
def test_recomputes_of_fused_layers_leave_out_what_those_of_plain_ones_do() -> None:
    model = tiny("qwen3")
    unread = []
    for options in (OPTIONS, FUSED):
        engine = Engine(copy.deepcopy(model), device=torch.device("cpu"), options=options)
        engine.forward_backward(micro_batches(), dropout_seed=0)
        unread.append(engine.unread)
        engine.close()
    assert unread[0] == unread[1]
    assert all(unread[0])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
@pytest.mark.thorough
def test_between_visits_and_for_another_model_of_its_class_the_code_is_the_models_own() -> None:
    first: Any = tiny("qwen3")
    second: Any = tiny("qwen3")
    code = vars(sys.modules[type(second.get_base_model()).__module__])
    rotate = code["apply_rotary_pos_emb"]
    engine = Engine(first, device=torch.device("cpu"), options=FUSED)
    engine.forward_backward(micro_batches(), dropout_seed=0)
    layers = [model.get_base_model().model.layers for model in (first, second)]
    assert all("forward" not in vars(m) for stack in layers for m in stack.modules())
    assert code["apply_rotary_pos_emb"] is rotate
    with Counted() as plain, torch.no_grad():
        second(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert "norm" not in plain.num_ops
    engine.detach()
    with Counted() as detached, torch.no_grad():
        first(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert detached.num_ops == plain.num_ops


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
def test_a_visit_that_fails_leaves_the_models_own_code_behind() -> None:
    model = tiny("qwen3")
    layered = LayeredModel(model)
    layered.fuse()
    assert layered.fused is not None
    fused = layered.fused

    def fail() -> None:
        with fused.visited(0):
            assert "forward" in vars(layered.layers[0].input_layernorm)
            assert "forward" not in vars(layered.layers[1].input_layernorm)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all("forward" not in vars(module) for module in layered.layers.modules())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.usefixtures("_quiet")
def test_a_hook_on_an_activation_keeps_its_calls() -> None:
    model: Any = tiny("qwen3")
    calls = []
    layer = model.get_base_model().model.layers[1]
    layer.mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    layered = LayeredModel(model)
    layered.fuse()
    assert layered.fused is not None
    with layered.fused.visited(1):
        layer.mlp(torch.randn(1, 2, SHAPE["hidden_size"]))
    assert calls


# ---------------------------------------------------------------------------------- compiled layers


@pytest.fixture
def fresh_compiler() -> Any:
    """Start without compiled code, and leave torch's settings as they were."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=8):
        yield
    torch._dynamo.reset()


def adapted(model_type: str, *, dropout: float = 0.0) -> nn.Module:
    base = tiny_model(model_type)
    has_experts = "moe" in model_type
    section = LoraSection(
        rank=4,
        alpha=8,
        dropout=0.0 if has_experts else dropout,
        targets="attention",
        experts=has_experts,
    )
    model = add_lora(base, section, seed=0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.train()


def step_compiled_layers(
    model: nn.Module, *, num_slots: int, kept_graphs: int = 0
) -> tuple[float, Gradients]:
    model = copy.deepcopy(model)
    compile_layers(LayeredModel(model).layers)  # a copy of it would not be compiled
    engine = offload.attach(model, num_slots=num_slots, device="cpu", kept_graphs=kept_graphs)
    try:
        loss = engine.forward_backward(padded_batches(), dropout_seed=0).loss
        return loss, gradients(model)
    finally:
        engine.detach()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.long
@pytest.mark.parametrize(
    "model_type", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)]
)
def test_compiled_layers_stream_to_the_bit_and_are_the_plain_ones_within_rounding(
    model_type: str,
) -> None:
    model = adapted(model_type)
    num_layers = len(LayeredModel(model).layers)
    plain_loss, plain = streamed(copy.deepcopy(model), padded_batches(), num_slots=2)
    loss, ours = step_compiled_layers(model, num_slots=2)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 2, "with a graph to keep and without"
    resident_loss, resident = step_compiled_layers(model, num_slots=num_layers)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in ours)
    assert loss == pytest.approx(plain_loss, rel=2e-6)
    assert rel_error(ours, plain) < 2e-6


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.exhaustive
def test_a_compiled_recomputation_drops_out_what_its_forward_did() -> None:
    model = adapted("qwen3", dropout=0.5)
    num_layers = len(LayeredModel(model).layers)
    loss, again = step_compiled_layers(model, num_slots=2)
    kept_loss, kept = step_compiled_layers(model, num_slots=num_layers, kept_graphs=num_layers)
    assert loss == pytest.approx(kept_loss, rel=1e-6)
    assert rel_error(again, kept) < 2e-6
    _, without = step_compiled_layers(adapted("qwen3"), num_slots=2)
    assert rel_error(again, without) > 0.1, "dropout has an effect"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_that_compile_again_and_again_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_FORMS", 1)
    model = adapted("qwen3")
    with pytest.raises(FAILURES) as caught:
        step_compiled_layers(model, num_slots=2)
    error = refusal(caught.value)
    assert "torch could not compile the layers: FailOnRecompileLimitHit" in error.what
    assert error.hint == "`train.compile: false`"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_compute_the_reference_of_an_objective() -> None:
    model = adapted("qwen3")
    _, truth = plain_step(model, pairs(3), in_order)
    found = []
    for num_slots in (2, 4):
        compiled = copy.deepcopy(model)
        layers = LayeredModel(compiled).layers
        compile_layers(layers)
        engine = offload.attach(compiled, num_slots=min(num_slots, len(layers)), device="cpu")
        objective = ByRow(in_order, num_trained=6)
        engine.forward_backward(pairs(1, 2), objective=objective, dropout_seed=0)
        found.append(gradients(compiled))
        engine.detach()
    assert rel_error(found[0], truth) < 3e-6
    assert all(torch.equal(found[0][name], found[1][name]) for name in truth)


# -------------------------------------------------------------------------------------- linear lora


TYPES = ("qwen3", "gemma2", "phi3", "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_neox", "cohere")
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
DORA = ("qwen2", "qwen3", "phi3", "gpt_neox", "cohere")  # qwen2 and gpt_neox have biases
MAX_SEEDS = 24


def adapted_linear_lora(model_type: str, *, seed: int = 0, **settings: Any) -> PeftModel:
    """Return a tiny model whose linears all have an adapter of peft, with B other than zero."""
    base: Any = tiny_model(model_type, seed=seed)
    torch.manual_seed(seed)
    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", **settings)
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
        elif "lora_magnitude" in name:
            parameter.data *= 0.5 + torch.rand_like(parameter)
    return model


def grouped(model: PeftModel) -> PeftModel:
    model = copy.deepcopy(model)
    compute_in_base_dtype(model)
    assert any(isinstance(module, Linear) for module in model.modules())
    return model


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(
    ("model_type", "use_dora"),
    mostly_slow(
        [*((name, False) for name in TYPES), *((name, True) for name in DORA)],
        ("phi3", False),
        ("qwen2", True),
    ),
)
def test_reorder_fp32_gradients_are_those_of_peft(model_type: str, use_dora: bool) -> None:
    model, batches = adapted_linear_lora(model_type, use_dora=use_dora), padded_batches()
    loss, ours = streamed(grouped(model), batches, num_slots=2)
    resident_loss, resident = streamed(grouped(model), batches, num_slots=8)
    assert loss == resident_loss
    assert all(torch.equal(ours[name], resident[name]) for name in resident)
    plain_loss, theirs = plain(model, batches)
    assert ours.keys() == theirs.keys()
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert rel_error(ours, theirs) < 1e-6
    for name, gradient in theirs.items():
        assert ours[name].dtype == torch.float32
        assert (ours[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-9, name


def under_autocast(model: PeftModel, batches: Sequence[Batch]) -> Gradients:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, batches)[1]


@pytest.mark.usefixtures("_quiet")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "use_dora"),
    [*((name, False) for name in (*TYPES, *MIXTURES)), *((name, True) for name in DORA)],
)
def test_reorder_bf16_gradients_are_no_worse_than_those_of_peft_under_autocast(
    model_type: str, use_dora: bool
) -> None:
    """Both take the experts that float64 takes."""
    squares = {"ours": 0.0, "peft": 0.0}
    for seed in range(MAX_SEEDS):
        model, batches = (
            adapted_linear_lora(model_type, seed=seed, use_dora=use_dora),
            padded_batches(),
        )
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.bfloat16()
        with HeldChoices() as noted:
            exact = truth(model, batches)
        assert exact is not None
        assert noted.notes or model_type not in MIXTURES
        with HeldChoices(noted):
            found = streamed(grouped(model), batches, num_slots=2)[1]
        with HeldChoices(noted):
            theirs = under_autocast(model, batches)
        squares["ours"] += rel_error(found, exact) ** 2
        squares["peft"] += rel_error(theirs, exact) ** 2
        if seed >= 3 and squares["ours"] <= squares["peft"]:
            return
    pytest.fail(f"squared errors {squares}")


@pytest.mark.usefixtures("_quiet")
def test_choices_that_rounding_would_move_are_held_and_keep_their_gradient() -> None:
    scores = torch.tensor([[0.500, 0.501, 0.2], [0.1, 0.7, 0.701]], dtype=torch.float64)
    with HeldChoices() as noted:
        first = scores.topk(1).indices
    moved = torch.tensor([[0.502, 0.501, 0.2], [0.1, 0.702, 0.701]], requires_grad=True)
    with HeldChoices(noted) as held:
        values, chosen = torch.topk(moved, 1, dim=-1)
        other = torch.topk(-moved, 1).indices  # scores of which there is no note
    assert held.num_moved == 2
    assert torch.equal(chosen, first)
    assert torch.equal(values, moved.gather(1, first))
    assert other.tolist() == [[2], [0]]
    values.sum().backward()
    assert moved.grad is not None
    assert torch.equal(moved.grad.nonzero()[:, 1:], first)


@pytest.mark.usefixtures("_quiet")
def test_sides_of_a_relu_that_rounding_would_move_are_held_and_keep_their_gradient() -> None:
    with HeldChoices() as noted:
        torch.relu(torch.tensor([0.001, -0.001, 0.5, -0.5], dtype=torch.float64))
    moved = torch.tensor([-0.001, 0.001, 0.5, -0.5], requires_grad=True)
    with HeldChoices(noted) as held:
        values = nn.ReLU()(moved)
        other = torch.relu(-moved)  # values of which there is no note
    assert held.num_moved == 2
    assert torch.equal(values, moved.detach() * torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert torch.equal(other, (-moved).clamp(min=0))
    values.sum().backward()
    assert moved.grad is not None
    assert moved.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("settings", [{"lora_dropout": 0.3}, {"use_rslora": True}])
def test_reorder_dropout_and_scaling_are_those_of_peft(settings: dict[str, Any]) -> None:
    model, batches = adapted_linear_lora("qwen3", **settings).train(), padded_batches()
    torch.manual_seed(5)
    _, theirs = plain(model, batches)
    torch.manual_seed(5)
    _, ours = plain(grouped(model), batches)
    assert rel_error(ours, theirs) < 1e-6


@pytest.mark.usefixtures("_quiet")
def test_two_adapters_at_once_are_summed_as_in_peft() -> None:
    model, batches = adapted_linear_lora("qwen3"), padded_batches()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(parameter, std=0.05)
    model.base_model.set_adapter(["default", "other"])  # type: ignore[operator]  # peft's
    _, theirs = plain(model, batches)
    _, ours = plain(grouped(model), batches)
    assert ours.keys() == theirs.keys()
    assert rel_error(ours, theirs) < 1e-6


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("settings", [{"use_dora": True, "lora_dropout": 0.3}, {"lora_bias": True}])
def test_move_what_is_not_plain_lora_stays_with_peft(settings: dict[str, Any]) -> None:
    model, batches = adapted_linear_lora("qwen3", **settings).train(), padded_batches()
    torch.manual_seed(5)
    _, theirs = plain(model, batches)
    torch.manual_seed(5)
    _, ours = plain(grouped(model), batches)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.usefixtures("_quiet")
def test_move_an_adapter_that_is_left_to_peft_stays_with_it() -> None:
    """Runs that share their steps may have been begun at another precision each."""
    model, batches = adapted_linear_lora("qwen3", use_dora=True), padded_batches()
    ours: Any = copy.deepcopy(model)
    compute_in_base_dtype(ours, by_peft=["default"])
    expected, found = plain(model, batches)[1], plain(ours, batches)[1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ours.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    linear = ours.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(1, 3, linear.in_features)
    assert not linear.is_plain(x)
    ours.set_adapter("other")
    assert linear.is_plain(x)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_that_are_off_or_merged_leave_the_base(use_dora: bool) -> None:
    model = grouped(adapted_linear_lora("qwen3", use_dora=use_dora)).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        adapted_logits = model(input_ids=ids).logits
        with model.disable_adapter():
            without = model(input_ids=ids).logits
        model.merge_adapter()
        merged = model(input_ids=ids).logits
        model.unmerge_adapter()
    assert not torch.allclose(adapted_logits, without, atol=1e-3)
    torch.testing.assert_close(merged, adapted_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_quiet")
def test_adapters_may_be_switched_off_within_a_visit() -> None:
    model: Any = grouped(adapted_linear_lora("qwen3")).eval()
    linear = model.get_base_model().model.layers[0].self_attn.o_proj
    x = torch.randn(1, 3, linear.in_features)
    VISIT_CACHE.enter("a visit")
    try:
        with torch.no_grad():
            with_adapter = linear(x)
            linear.enable_adapters(False)
            without = linear(x)
            linear.enable_adapters(True)
            again = linear(x)
            base = linear.base_layer(x)
    finally:
        VISIT_CACHE.enter(None)
    assert torch.equal(without, base)
    assert not torch.allclose(with_adapter, base)
    assert torch.equal(again, with_adapter)


@pytest.mark.usefixtures("_quiet")
def test_a_step_computes_each_norm_of_dora_once_and_the_next_step_its_own() -> None:
    model, batches = grouped(adapted_linear_lora("qwen3", use_dora=True)), padded_batches()
    num_norms = sum(isinstance(module, Linear) for module in model.modules())
    twin = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    engine.forward_backward(batches, dropout_seed=0)  # inspects the layers before
    for _ in range(2):
        for one in (model, twin):
            for name, parameter in one.named_parameters():
                if "lora_" in name:
                    parameter.grad = None
                    parameter.data.mul_(1.5)
        with Counted() as counted:
            loss = engine.forward_backward(batches, dropout_seed=0).loss
        assert counted.num_ops["linalg_vector_norm"] == num_norms
        wanted_loss, wanted = streamed(twin, batches, num_slots=NUM_MODEL_LAYERS)
        assert loss == wanted_loss
        assert all(torch.equal(g, wanted[name]) for name, g in gradients(model).items())
    engine.detach()


ODD_ADAPTER = LoraConfig(
    r=2, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
)


class Odd(nn.Module):
    """Reads another input for each of its linears."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) + self.k_proj(x * 2) * self.v_proj(x)


@pytest.mark.usefixtures("_quiet")
def test_linears_that_read_different_inputs_compute_by_themselves() -> None:
    torch.manual_seed(0)
    model = get_peft_model(Odd(), ODD_ADAPTER)
    ours, x = copy.deepcopy(model), torch.randn(3, 6)
    compute_in_base_dtype(ours)
    for _ in range(2):
        wanted, found = model(x), ours(x)
        torch.testing.assert_close(found, wanted)
        wanted.square().sum().backward()
        found.square().sum().backward()
        for (name, one), other in zip(model.named_parameters(), ours.parameters(), strict=True):
            if one.requires_grad:
                torch.testing.assert_close(other.grad, one.grad, msg=name)


@pytest.mark.usefixtures("_quiet")
def test_an_input_that_changes_in_place_is_not_taken_for_the_same() -> None:
    class InPlace(Odd):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            return self.q_proj(x) + self.k_proj(x.mul_(2)) + self.v_proj(x)

    torch.manual_seed(0)
    model = get_peft_model(InPlace(), ODD_ADAPTER)
    ours, x = copy.deepcopy(model), torch.randn(3, 6)
    compute_in_base_dtype(ours)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(ours(x), model(x))


@pytest.mark.usefixtures("_quiet")
def test_a_pass_that_was_cut_off_between_siblings_changes_no_later_bit() -> None:
    class Failing(Odd):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q_proj(x)
            if self.fails:
                raise ValueError("cut off")
            return q + self.k_proj(x) * self.v_proj(x)

    torch.manual_seed(0)
    ours: Any = get_peft_model(Failing(), ODD_ADAPTER)
    compute_in_base_dtype(ours)
    x = torch.randn(3, 6)
    with torch.no_grad():
        before = ours(x)
        ours.base_model.model.fails = True
        with pytest.raises(ValueError, match="cut off"):
            ours(torch.randn(3, 6))
        ours.base_model.model.fails = False
        assert torch.equal(ours(x), before)
        assert ours.base_model.model.k_proj.siblings._share


@pytest.mark.usefixtures("_quiet")
def test_hooks_on_a_and_b_still_run() -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(Odd(), ODD_ADAPTER)
    model.base_model.model.k_proj.lora_A["default"].register_forward_hook(lambda *a: a[-1] * 3)
    ours, x = copy.deepcopy(model), torch.randn(3, 6)
    compute_in_base_dtype(ours)
    torch.testing.assert_close(ours(x), model(x))


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("shape", [(6,), (0, 6), (1, 1, 6)])
def test_inputs_of_any_shape_are_taken(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = get_peft_model(Odd(), ODD_ADAPTER)
    ours, x = copy.deepcopy(model), torch.randn(*shape)
    compute_in_base_dtype(ours)
    torch.testing.assert_close(ours(x), model(x))


@pytest.mark.usefixtures("_quiet")
def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    torch.manual_seed(0)
    ours = get_peft_model(Odd(), ODD_ADAPTER)
    compute_in_base_dtype(ours)
    x = torch.randn(3, 6).requires_grad_()
    (first,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
