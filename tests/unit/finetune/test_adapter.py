"""Adapters: what each method counts and draws, and what is saved of them."""

import io
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from bitsandbytes.optim.lion import Lion
from peft import (
    HiraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LagunaConfig,
    LagunaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.neftune import activate_neftune

import offload
from finetune.adapter.lora import (
    add_lora,
    add_noise,
    load_adapter,
    load_into,
    save_adapter,
    trained,
)
from finetune.adapter.methods import counted
from finetune.errors import CheckpointError, MergeError
from finetune.export.merge import merge
from finetune.export.vllm import write_vllm_adapter
from finetune.recipe.adapters import LoraSection
from finetune.recipe.sections import ModelSection, TrainSection
from finetune.training.optimizer import (
    AdapterUpdate,
    RoundedOptimizer,
    RoundedWeights,
    round_at_random,
)
from finetune.training.preflight import adapter_to_go_on_from
from finetune.training.ranks import Ranks
from offload.engine.randomness import FRONT_LAYER, seed_of
from offload.plan.facts.facts import MethodCounts, PeftMethod
from tests.builders import of_method
from tests.tiers import diagonal
from tests.unit.finetune.export.adapted import (
    MODELS,
    SHAPE,
    edit,
    load,
    logits,
    publish,
    rel,
    train,
    with_adapter,
)

K, M, R, T = 1024, 512, 8, 300


def method(name: str, *, dtype_bytes: int = 4, number: int = 1) -> PeftMethod:
    size = ("q_proj", K, M)
    return counted(
        of_method(name, rank=R), ((size, number),), model_type="qwen3", dtype_bytes=dtype_bytes
    )


def counts(name: str, *, dtype_bytes: int = 4) -> MethodCounts:
    return method(name, dtype_bytes=dtype_bytes).of("q_proj", K, M)


def test_loha_makes_a_weight_and_multiplies_by_it() -> None:
    found = counts("loha")
    assert sorted(found.shapes) == sorted([(M, R), (R, K)] * 2)
    weight, product = 2 * (2 * M * R * K), 2 * T * K * M
    assert found.forward.fp32_flops.at(T) == weight + product
    # both factors of either matrix, whose products are made again, and the input and the weight
    assert found.backward.fp32_flops.at(T) == 3 * weight + 2 * product
    assert found.saves_input


def test_in_16_bits_the_product_with_the_weight_is_made_in_fp32() -> None:
    found = counts("loha", dtype_bytes=2)
    assert found.forward.fp32_flops.at(T) == 2 * (2 * M * R * K) + 2 * T * K * M
    assert found.forward.half_flops.at(T) == 0
    assert found.saved.per_token == 4 * K  # the input in fp32
    assert not found.saves_input


def test_vera_trains_two_vectors_and_shares_two_matrices() -> None:
    found = counts("vera")
    assert sorted(found.shapes) == [(R,), (M,)]
    assert found.forward.fp32_flops.at(T) == 2 * T * R * (K + M)
    assert method("vera", number=36).frozen_bytes == 4 * R * (K + M)


def test_oft_holds_indices_for_each_layer() -> None:
    block = K // R
    elements = block * (block - 1) // 2
    assert counts("oft").shapes == ((R, elements),)
    assert method("oft", number=3).frozen_bytes == 3 * 2 * 8 * elements


@pytest.mark.parametrize("name", ["ia3", "miss"])
def test_others_add_no_product_as_large_as_the_layer(name: str) -> None:
    found = counts(name)
    assert found.shapes == (((M, 1),) if name == "ia3" else ((R, M),))
    assert found.forward.fp32_flops.at(T) <= 2 * T * R * M
    assert found.backward.fp32_flops.at(T) <= 4 * T * R * M
    assert found.forward.num_bytes.per_token > 0


# ---------------------------------------------------------------------------------- rounded weights


ROUNDED_WEIGHTS_SHAPE = (64, 80)  # enough for states in 8 bits
PLAIN: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adamw_8bit": lambda p: AdamW8bit(p, lr=1e-3, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3, weight_decay=0.1, eps=(None, 1.0)),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, weight_decay=0.1),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spacing(x: float) -> float:
    """Return the distance between the two bf16 numbers around x: it has 8 significant bits."""
    return math.ldexp(1.0, max(math.frexp(x)[1], -125) - 8)


def test_what_bf16_has_stays_and_so_do_infinities_and_nan() -> None:
    kept = torch.tensor([0.0, -0.0, 1.0, -1.0078125, 3.3895e38, 2.0**-133, torch.inf, -torch.inf])
    kept = kept.bfloat16().float()
    for seed in range(200):
        rounded = round_at_random(kept, generator(seed))
        assert rounded.dtype is torch.bfloat16
        assert torch.equal(rounded.float().view(torch.int32), kept.view(torch.int32))
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    for seed in range(200):
        assert round_at_random(payloads.view(torch.float32), generator(seed)).isnan().all()


@pytest.mark.parametrize("x", [1.0001, -1.0001, 0.1, 1.9999, -255.3, 3e-39, 1e-20, 7.7e30], ids=str)
def test_the_mean_of_many_draws_is_the_number_itself(x: float) -> None:
    num = 200_000
    exact = torch.tensor(x, dtype=torch.float32)
    drawn = round_at_random(exact.expand(num).contiguous(), generator()).double()
    x = float(exact)
    values = drawn.unique().tolist()
    assert len(values) == 2
    assert values[0] < x < values[1]
    assert values[1] - values[0] == spacing(x)
    share = (x - values[0]) / spacing(x)
    deviation = math.sqrt(share * (1 - share) / num)
    assert abs((float(drawn.mean()) - x) / spacing(x)) < 4 * deviation


def update_of(weights: dict[str, nn.Parameter], **settings: Any) -> AdapterUpdate:
    train = TrainSection(
        **{"grad_accum_steps": 1, "lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": None} | settings
    )
    return AdapterUpdate(
        weights, train=train, loraplus_ratio=None, ranks=Ranks(), rounded=weights.keys()
    )


@pytest.mark.parametrize("name", PLAIN)
def test_an_update_is_that_of_the_plain_optimizer_up_to_one_rounding(name: str) -> None:
    weight = nn.Parameter(torch.randn(ROUNDED_WEIGHTS_SHAPE, generator=generator()).bfloat16())
    update = update_of({"w": weight}, optimizer=name)
    plain = nn.Parameter(weight.detach().float())
    optimizer = PLAIN[name]([plain])
    draws = generator(1)
    for _ in range(4):
        factors = torch.randn(ROUNDED_WEIGHTS_SHAPE, generator=draws).bfloat16()
        for _ in range(2):  # micro-batches
            (weight * factors).sum().backward()
        assert weight.grad is None  # it is summed in fp32
        plain.data.copy_(weight)
        plain.grad = 2 * factors.float()
        optimizer.step()
        update.apply(lr=1e-3)
        apart = (weight.detach().double() - plain.detach().double()).abs()
        limits = torch.tensor([spacing(x) for x in plain.flatten().tolist()]).view(
            ROUNDED_WEIGHTS_SHAPE
        )
        assert bool((apart < limits).all())
        assert not torch.equal(weight.detach(), plain.detach().bfloat16())  # not to nearest


def test_steps_that_are_too_small_for_a_digit_add_up() -> None:
    weight = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    update = update_of({"w": weight}, optimizer="sgd", weight_decay=0.0)
    for _ in range(50):
        weight.sum().backward()
        update.apply(lr=2e-4)
    assert float(weight.detach().double().mean()) == pytest.approx(0.99, abs=2e-4)
    assert float(torch.tensor(1.0 - 2e-4).bfloat16()) == 1.0  # why


def test_copies_have_no_memory_between_updates() -> None:
    weights = RoundedWeights(
        {"w": nn.Parameter(torch.ones(ROUNDED_WEIGHTS_SHAPE).bfloat16())}, seed=0
    )
    (copy,) = weights.copies.values()
    assert copy.untyped_storage().nbytes() == 0
    with weights.updated():
        assert torch.equal(copy.detach(), torch.ones(ROUNDED_WEIGHTS_SHAPE))
    assert copy.untyped_storage().nbytes() == 0
    assert copy.shape == ROUNDED_WEIGHTS_SHAPE


def step(update: AdapterUpdate, weights: dict[str, nn.Parameter], number: int) -> None:
    draws = generator(number)
    for weight in weights.values():
        (weight * torch.randn(ROUNDED_WEIGHTS_SHAPE, generator=draws).bfloat16()).sum().backward()
    update.apply(lr=1e-3)


def two(order: str = "ab") -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(torch.ones(ROUNDED_WEIGHTS_SHAPE, dtype=torch.bfloat16))
        for name in order
    }


def test_a_checkpoint_has_seed_and_number_and_goes_on_to_the_bit() -> None:
    weights = two()
    update = update_of(weights, seed=5)
    for number in range(3):
        step(update, weights, number)
    file = io.BytesIO()
    torch.save(update.optimizer.state_dict(), file)
    file.seek(0)
    content = torch.load(file, weights_only=True)
    assert content["rounding"] == {"seed": 5, "num_updates": 3}
    again = two()
    resumed = update_of(again, seed=6)  # the checkpoint's counts
    undo = resumed.rehearsal()
    step(resumed, again, 0)
    undo()
    assert isinstance(resumed.optimizer, RoundedOptimizer)
    assert resumed.optimizer.state_dict()["rounding"]["num_updates"] == 0
    with torch.no_grad():
        for name, weight in resumed.weights.items():
            weight.copy_(update.weights[name])
    resumed.optimizer.load_state_dict(content)
    for number in range(3, 6):
        step(update, weights, number)
        step(resumed, again, number)
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_random_numbers_depend_on_seed_number_and_name_alone() -> None:
    def rounded(order: str, *, seed: int = 0, num_updates: int = 0) -> dict[str, torch.Tensor]:
        weights = RoundedWeights(two(order), seed=seed)
        weights.num_updates = num_updates
        torch.manual_seed(seed + num_updates)
        with weights.updated():
            for copy in weights.copies.values():
                copy.data.add_(0.003)
        return {name: tensor.detach() for name, tensor in weights.held.items()}

    first = rounded("ab")
    assert all(torch.equal(first[name], tensor) for name, tensor in rounded("ba").items())
    assert not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], rounded("ab", seed=1)["a"])
    assert not torch.equal(first["a"], rounded("ab", num_updates=1)["a"])


# ------------------------------------------------------------------------------------------ neftune


NEFTUNE_SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
}


def make_model(kind: str = "qwen3") -> Any:
    torch.manual_seed(0)
    plain: Any = (
        Qwen3ForCausalLM(Qwen3Config(**NEFTUNE_SHAPE))
        if kind == "qwen3"
        else Gemma3ForCausalLM(Gemma3TextConfig(**NEFTUNE_SHAPE))  # scales its embeddings
    )
    model = get_peft_model(plain, LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.1)
    return model.train()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("alpha", "width"), [(5.0, 7), (0.3, 24), (7.7, 1001)])
def test_the_noise_is_that_of_transformers_to_the_bit(
    kind: str, dtype: torch.dtype, alpha: float, width: int
) -> None:
    ids = torch.randint(0, 32, (2, width), generator=torch.Generator().manual_seed(1))
    ours, theirs = make_model(kind).to(dtype), make_model(kind).to(dtype)
    handle = add_noise(ours.get_base_model(), alpha=alpha)
    activate_neftune(theirs, alpha)
    embedded = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        embedded.append(model.get_base_model().get_input_embeddings()(ids))
    assert torch.equal(*embedded)
    plain = make_model(kind).to(dtype).get_base_model().get_input_embeddings()(ids)
    assert not torch.equal(embedded[0], plain)
    ours.eval()
    assert torch.equal(ours.get_base_model().get_input_embeddings()(ids), plain)
    ours.train()
    handle.remove()
    assert torch.equal(ours.get_base_model().get_input_embeddings()(ids), plain)


@pytest.mark.thorough
@pytest.mark.parametrize(("stash", "kept_graphs"), diagonal(["device", "host"], [0, 2]))
def test_gradients_of_a_streamed_step_are_those_of_transformers_under_the_same_noise(
    stash: Any, kept_graphs: int
) -> None:
    """Padding counts in the width: rows are 10 of 16 tokens long."""
    ids = torch.randint(1, 32, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :, 10:] = -100
    model = make_model()
    add_noise(model.get_base_model(), alpha=5.0)
    engine = offload.attach(model, num_slots=2, device="cpu", stash=stash, kept_graphs=kept_graphs)
    found = engine.forward_backward(
        [{"input_ids": ids[m], "labels": labels[m]} for m in range(2)], dropout_seed=5
    )
    plain = make_model()
    activate_neftune(plain, 5.0)
    loss = torch.zeros(())
    for m in range(2):
        torch.manual_seed(seed_of(5, FRONT_LAYER, m))
        logits = plain(input_ids=ids[m]).logits[:, :-1]
        loss = loss + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[m][:, 1:].flatten(), reduction="sum"
        )
    loss = loss / int((labels[:, :, 1:] != -100).sum())
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    parameters = dict(model.named_parameters())
    for name, expected in plain.named_parameters():
        if expected.requires_grad:
            torch.testing.assert_close(parameters[name].grad, expected.grad, rtol=1e-4, atol=1e-6)
    quiet = make_model()
    still = offload.attach(quiet, num_slots=2, device="cpu").forward_backward(
        [{"input_ids": ids[m], "labels": labels[m]} for m in range(2)], dropout_seed=5
    )
    assert abs(still.loss - found.loss) > 1e-3


# -------------------------------------------------------------------------------------------- saved


DOORS: dict[str, Callable[[Path, Path], object]] = {
    "merge": lambda base, adapter: merge(base, adapter, base.parent / "out"),
    "vllm": lambda base, adapter: write_vllm_adapter(adapter, base.parent / "out", base=base),
    "score, chat and generate": lambda base, adapter: load_adapter(load(base), adapter),
    "before training": lambda base, adapter: adapter_to_go_on_from(
        adapter, model=ModelSection(path=str(base))
    ),
    "init_from": lambda base, adapter: load_into(
        add_lora(load(base), LoraSection(rank=4), seed=0), adapter
    ),
}
REFUSED: dict[str, tuple[object, str]] = {
    "bias": ("all", r"biases of the base .*merge_and_unload\(\)\.save_pretrained"),
    "init_lora_weights": ("pissa_niter_4", r"changed the base .*path_initial_model_for_weight_con"),
    "alora_invocation_tokens": ([5, 6], r"activated LoRA.*with plain peft"),
    "layer_replication": ([[0, 2], [1, 2]], r"repeats layers.*merge_and_unload"),
    "trainable_token_indices": ([1, 2], r"rows of the embedding.*merge_and_unload"),
    "kasa_config": ({"beta": 0.0001}, r"not known what that changes.*merge_and_unload"),
    "of_a_later_peft": (True, r"not known what that changes.*merge_and_unload"),
}
OTHERS: dict[str, Any] = {
    "loha": LoHaConfig(r=4, alpha=8),
    "lokr": LoKrConfig(r=4, alpha=8),
    "ia3": IA3Config(feedforward_modules=["down_proj"]),
    "vera": VeraConfig(r=4),
    "oft of blocks": OFTConfig(r=0, oft_block_size=4),
    "oft of a number": OFTConfig(r=4, oft_block_size=0, coft=True, eps=1.0, block_share=True),
    "miss": MissConfig(r=4),
    "bat": MissConfig(r=4, init_weights="bat"),
    "hira": HiraConfig(r=4),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return publish(MODELS["qwen3"](), tmp_path / "base", torch.float32)


def set_to(adapter: Path, **settings: object) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return adapter


def saved(base: Path, folder: Path, config: Any, *, seed: int = 1) -> PeftModel:
    """Write an adapter of peft's with other values than it began with, and return its model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load(base), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(str(folder))
    return model.eval()


@pytest.mark.parametrize("setting", REFUSED)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_not_computed_is_refused_by_name_by_all_readers(
    door: str, setting: str, base: Path, tmp_path: Path
) -> None:
    """Each reader had a list of its own, and most passed over what was not on it (#41)."""
    value, words = REFUSED[setting]
    adapter = set_to(train(base, tmp_path / "adapter"), **{setting: value})
    with pytest.raises(CheckpointError, match=rf"(?s)has {setting}: .*{words}"):
        DOORS[door](base, adapter)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("door", DOORS)
def test_a_setting_of_a_later_peft_that_is_off_is_no_obstacle(
    door: str, base: Path, tmp_path: Path
) -> None:
    adapter = set_to(train(base, tmp_path / "adapter"), new_a=None, new_b=False, new_c={})
    set_to(adapter, base_model_name_or_path="someone/the-same-base")  # peft would warn
    DOORS[door](base, set_to(adapter, lora_alpha=32))  # as a recipe has it


@pytest.mark.parametrize("kind", ["pissa", "olora", "pissa_niter_4"])
def test_what_began_in_the_base_is_merged_once_it_is_converted(
    kind: Any, base: Path, tmp_path: Path
) -> None:
    """Unconverted, it was added to a base that still had what it began with (#41)."""
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=kind
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load(base), config)
        model.save_pretrained(str(tmp_path / "initial"))
        with torch.no_grad():
            for parameter in trained(model).values():
                parameter.add_(0.05 * torch.randn_like(parameter))
        wanted = logits(model)
        model.save_pretrained(str(tmp_path / "adapter"))
        model.save_pretrained(
            str(tmp_path / "converted"),
            path_initial_model_for_weight_conversion=str(tmp_path / "initial"),
        )
    with pytest.raises(CheckpointError, match=rf'init_lora_weights: "{kind}", so its training'):
        merge(base, tmp_path / "adapter", tmp_path / "out")
    merge(base, tmp_path / "converted", tmp_path / "out")
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5
    assert rel(logits(load_adapter(load(base), tmp_path / "converted")), wanted) < 1e-5


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal", "eva", "mica", False])
def test_no_initialisation_is_run_again_on_a_base_that_others_share(
    kind: object, base: Path, tmp_path: Path
) -> None:
    adapter = train(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    wanted = logits(with_adapter(base, adapter))
    adapter = set_to(adapter, init_lora_weights=kind)
    model = load(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = load_adapter(model, adapter)
    for name, tensor in adapted.get_base_model().state_dict().items():
        plain = name.replace(".base_layer", "")
        assert plain not in before or torch.equal(tensor, before[plain]), name
    assert torch.equal(logits(adapted.eval()), wanted)
    merge(base, adapter, tmp_path / "out")
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_give_what_peft_gives(name: str, base: Path, tmp_path: Path) -> None:
    """Blocks of OFT that have a size in place of a number were called damaged (#41)."""
    config = OTHERS[name]
    config.target_modules = ["q_proj", "down_proj"]
    config.task_type = "CAUSAL_LM"
    saved(base, tmp_path / "adapter", config)
    wanted = logits(with_adapter(base, tmp_path / "adapter"))
    assert rel(wanted, logits(load(base))) > 1e-3
    assert rel(logits(load_adapter(load(base), tmp_path / "adapter").eval()), wanted) < 1e-6
    merge(base, tmp_path / "adapter", tmp_path / "out")
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5


def test_vera_without_its_projections_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = VeraConfig(r=4, target_modules=["q_proj"], save_projection=False)
    saved(base, tmp_path / "adapter", config)
    for door in ("merge", "score, chat and generate", "before training"):
        with pytest.raises(
            CheckpointError, match=r"save_projection: false, and VeRA's projections"
        ):
            DOORS[door](base, tmp_path / "adapter")


def test_tensors_go_where_they_came_from_whatever_weights_are_called(tmp_path: Path) -> None:
    """By transformers' rules for laguna's weights, peft lost its shared expert's tensors (#41)."""
    sizes: dict[str, Any] = {
        **SHAPE,
        "num_experts_per_tok": 2,
        "num_experts": 5,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_attention_heads_per_layer": [4, 4],
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 8,
    }
    config = LagunaConfig(**sizes)
    base = publish(LagunaForCausalLM(config), tmp_path / "base", torch.float32)
    section = LoraSection(rank=4, experts=True)
    model = add_lora(load(base), section, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_adapter(model, tmp_path / "adapter")
    wanted = logits(model.eval())
    other = add_lora(load(base), section, seed=5)
    load_into(other, tmp_path / "adapter")
    assert torch.equal(logits(other.eval()), wanted)
    # Processors round sums by how tensors lie in memory, and those of a file lie otherwise.
    assert rel(logits(load_adapter(load(base), tmp_path / "adapter").eval()), wanted) < 1e-6
    merge(base, tmp_path / "adapter", tmp_path / "out")
    assert rel(logits(load(tmp_path / "out")), wanted) < 1e-5


def test_weights_of_the_base_in_the_file_must_be_those_of_the_base(
    base: Path, tmp_path: Path
) -> None:
    """peft saves an adapted embedding whole, and lets it replace the base's (#41)."""
    adapter = train(base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"])
    wanted = logits(with_adapter(base, adapter))
    assert rel(logits(load_adapter(load(base), adapter).eval()), wanted) < 1e-6
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    file = adapter / "adapter_model.safetensors"
    edit(file, lambda tensors: tensors.update({key: tensors[key] * 1.5}))
    with pytest.raises(CheckpointError, match=r"holds .*embed_tokens.*, and the base has other"):
        load_adapter(load(base), adapter)
    with pytest.raises(MergeError, match=r"holds .*embed_tokens.*, and the base has other"):
        merge(base, adapter, tmp_path / "out")
    stray = "base_model.model.lm_head.weight"
    edit(file, lambda tensors: tensors.update({stray: torch.zeros(64, 32)}))
    for door, error in (("merge", MergeError), ("score, chat and generate", CheckpointError)):
        with pytest.raises(error, match=r"no place for, 1 tensors, such as .*lm_head.weight"):
            DOORS[door](base, adapter)


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        ("lora", "lora_alpha", 7),
        ("lora", "use_rslora", True),
        ("ia3", "feedforward_modules", []),
        ("oft", "num_cayley_neumann_terms", 3),
        ("loha", "alpha_pattern", {"q_proj": 3}),
        ("miss", "init_weights", "bat"),
    ],
)
def test_a_run_goes_on_only_from_an_adapter_that_computes_alike(
    method: str, setting: str, value: object, base: Path, tmp_path: Path
) -> None:
    """Of other methods than LoRA only the alpha was compared (#41)."""
    section = of_method(method, rank=4)
    model = add_lora(load(base), section, seed=0)
    save_adapter(model, tmp_path / "adapter")
    load_into(model, tmp_path / "adapter")
    set_to(tmp_path / "adapter", **{setting: value})
    with pytest.raises(CheckpointError, match=rf"{setting} is .* in .*, and .* in this recipe"):
        load_into(model, tmp_path / "adapter")


def test_no_hint_asks_for_a_copy_where_nothing_is_damaged(base: Path, tmp_path: Path) -> None:
    adapter = train(base, tmp_path / "adapter")
    larger = publish(MODELS["qwen3_moe"](), tmp_path / "larger", torch.float32)
    for door in (DOORS["init_from"], lambda _, folder: load_adapter(load(larger), folder)):
        with pytest.raises(CheckpointError) as caught:
            door(base, adapter)
        assert "from a copy" not in str(caught.value)
