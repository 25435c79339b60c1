"""An attached model used as a model, saved, loaded, changed, and in loops of others."""

import contextlib
import copy
import io
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_model
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

import offload
from tests.parity.attached import (
    UP,
    assert_same,
    attached,
    layer,
    layer_values,
    two_adapters,
    up_proj,
    values,
)
from tests.parity.steps import MODELS, NUM_LAYERS, gradients, micro_batches, plain, tiny
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

# --------------------------------------------------------------------------- what is answered


def left_padded() -> dict[str, torch.Tensor]:
    batch = {name: tensor.clone() for name, tensor in micro_batches()[0].items()}
    return {name: torch.cat([t[:1], t[1:].roll(3, dims=1)]) for name, t in batch.items()}


BATCHES: dict[str, dict[str, Any]] = {
    "labels": micro_batches()[1],
    "left padding": left_padded(),
    "no labels": {"input_ids": micro_batches()[0]["input_ids"]},
    "last logits": {"input_ids": micro_batches()[0]["input_ids"], "logits_to_keep": 2},
    "positions": {
        "input_ids": micro_batches()[0]["input_ids"],
        "position_ids": torch.arange(12).flip(0).expand(2, 12),
    },
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", mostly_slow(list(MODELS), "qwen3_moe"))
def test_move_a_forward_of_the_attached_model_is_that_of_the_plain_model(name: str) -> None:
    model = tiny(name).eval()
    reference = copy.deepcopy(model)
    with attached(model), torch.no_grad():
        for batch in BATCHES.values():
            expected = reference(**batch, use_cache=False)
            for called in (model, model.get_base_model()):
                found = called(**batch)
                assert type(found) is type(expected)
                assert torch.equal(found.logits, expected.logits)
                assert (found.loss is None) == (expected.loss is None)
                assert expected.loss is None or torch.equal(found.loss, expected.loss)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_move_a_forward_by_position_and_as_a_tuple_is_that_of_the_plain_model() -> None:
    model = tiny("qwen3").eval().get_base_model()
    batch = micro_batches()[0]
    inputs = (batch["input_ids"], batch["attention_mask"])
    with torch.no_grad():
        expected = copy.deepcopy(model)(*inputs, use_cache=False, return_dict=False)
    with attached(model), torch.inference_mode():
        found = model(*inputs, return_dict=False)
    assert len(found) == len(expected) == 1
    assert torch.equal(found[0], expected[0])


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("settings", mostly_slow(GENERATIONS, "beams"))
def test_move_generate_gives_the_tokens_of_the_plain_model(settings: dict[str, Any]) -> None:
    model = tiny("qwen3").eval()
    batch = {n: t for n, t in left_padded().items() if n != "labels"}

    def tokens(generating: Any) -> torch.Tensor:
        torch.manual_seed(5)
        found: torch.Tensor = generating.generate(
            **batch, max_new_tokens=5, pad_token_id=0, **settings
        )
        return found

    expected = tokens(copy.deepcopy(model))
    with attached(model):
        assert torch.equal(tokens(model), expected)
        assert torch.equal(tokens(model.get_base_model()), expected)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_generating_leaves_the_next_step_as_it_was() -> None:
    model = tiny("qwen3")
    loss, expected = plain(model)
    with attached(model) as engine:
        model.eval()
        with torch.inference_mode():
            model.generate(input_ids=micro_batches()[0]["input_ids"], max_new_tokens=2)
        model.train()
        assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
        found = gradients(model)
    assert all(torch.allclose(found[n], g, rtol=1e-3, atol=1e-6) for n, g in expected.items())


REFUSED_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden states": ({"output_hidden_states": True}, "asked for `output_hidden_states`"),
    "a cache": ({"use_cache": True}, "asked for `use_cache`"),
    "embeddings": (
        {"input_ids": None, "inputs_embeds": torch.zeros(2, 12, 32)},
        "asked for `inputs_embeds`",
    ),
    "nothing": ({"input_ids": None}, "called without `input_ids`"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("extra", "what"), REFUSED_CALLS.values(), ids=REFUSED_CALLS)
def test_a_forward_that_the_engine_cannot_answer_is_refused(
    extra: dict[str, Any], what: str
) -> None:
    model = tiny("qwen3").eval()
    batch = {"input_ids": micro_batches()[0]["input_ids"]} | extra
    with (
        attached(model),
        torch.no_grad(),
        pytest.raises(offload.OffloadError, match=rf"{what}.*\n\nhint: .*"),
    ):
        model(**batch)


@pytest.mark.usefixtures("one_thread")
def test_outputs_that_the_config_asks_for_are_refused() -> None:
    model = tiny("qwen3").eval()
    model.config.output_hidden_states = True
    with (
        attached(model),
        torch.no_grad(),
        pytest.raises(offload.OffloadError, match="asked for `output_hidden_states`"),
    ):
        model(input_ids=micro_batches()[0]["input_ids"])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_a_forward_with_gradients_or_in_training_mode_and_a_cache_are_refused() -> None:
    model = tiny("qwen3", dropout=0.5)
    batch = micro_batches()[0]
    with attached(model):
        with pytest.raises(offload.OffloadError, match=r"(?s)gradients.*`engine.forward_backward"):
            model(**batch)
        with (
            torch.no_grad(),
            pytest.raises(offload.OffloadError, match=r"training mode.*\n\nhint: `model.eval"),
        ):
            model(**batch)
        model.eval()
        with pytest.raises(offload.OffloadError, match="generate with `use_cache=True`"):
            model.generate(input_ids=batch["input_ids"], use_cache=True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_the_base_is_asked_through_the_engine_too() -> None:
    """As a reference model: with its adapters switched off, where nothing has a gradient."""
    model = tiny("qwen3").eval()
    batch = micro_batches()[0]
    reference = copy.deepcopy(model)
    with reference.disable_adapter(), torch.no_grad():
        expected = reference(**batch, use_cache=False).logits
    with attached(model) as engine:
        with model.disable_adapter():
            assert torch.equal(model(**batch).logits, expected)
            with pytest.raises(offload.OffloadError, match=r"lora_A.* was frozen since"):
                engine.forward_backward(micro_batches())
        engine.forward_backward(micro_batches())


# ------------------------------------------------------------------------- what is refused


def train_it(model: nn.Module) -> None:
    rows = [{"input_ids": b["input_ids"][0], "labels": b["labels"][0]} for b in micro_batches()]
    args = TrainingArguments(output_dir="unused", use_cpu=True, max_steps=1, report_to=[])
    Trainer(model=model, args=args, train_dataset=rows).train()


USES: dict[str, Callable[[Any], object]] = {
    "inner model": lambda m: m.get_base_model().model(micro_batches()[0]["input_ids"]),
    "layer": lambda m: layer(m).mlp(torch.zeros(1, 3, 32)),
    "linear": lambda m: up_proj(m)(torch.zeros(1, 32)),
    "functional_call": lambda m: torch.func.functional_call(m, {}, kwargs=micro_batches()[0]),
    "Trainer": train_it,
    "accelerate": lambda m: Accelerator(cpu=True).prepare(m),
    "deepcopy": copy.deepcopy,
    "deepcopy of a layer": lambda m: copy.deepcopy(layer(m)),
    "pickle": pickle.dumps,
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "EMA": torch.optim.swa_utils.AveragedModel,
    "to": lambda m: m.to("cpu"),
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "layers to bf16": lambda m: m.get_base_model().model.layers.to(torch.bfloat16),
    "a layer to bf16": lambda m: layer(m).to(torch.bfloat16),
    "share_memory": lambda m: m.share_memory(),
    "load_state_dict": lambda m: m.load_state_dict(tiny("qwen3", seed=1).state_dict()),
    "load_state_dict, assigned": lambda m: m.load_state_dict(
        tiny("qwen3", seed=1).state_dict(), assign=True
    ),
    "merge_adapter": lambda m: m.merge_adapter(),
    "merge_and_unload": lambda m: m.merge_and_unload(),
    "norm of parameters": lambda m: sum(float(p.norm()) for p in m.parameters()),
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "data": lambda m: up_proj(m).weight.data.add_(1),
    "data, set": lambda m: setattr(up_proj(m).weight, "data", torch.zeros(64, 32)),
    "in place": lambda m: up_proj(m).weight.requires_grad_(False).mul_(2),
    "init": lambda m: nn.init.zeros_(up_proj(m).weight),
    "numpy": lambda m: up_proj(m).weight.numpy(),
    "dlpack": lambda m: up_proj(m).weight.__dlpack__(),
    "data_ptr": lambda m: up_proj(m).weight.data_ptr(),
    "foreach": lambda m: torch._foreach_norm([up_proj(m).weight]),
    "aten": lambda m: torch.ops.aten.mm(up_proj(m).weight, torch.zeros(32, 1)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_any_other_use_is_refused_by_name_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny("qwen3")
    before, (loss, expected) = values(model), plain(model)
    with attached(model) as engine:
        loss_sum = engine.forward(micro_batches()[0]).loss_sum
        for name, use in USES.items():
            try:
                with pytest.raises(offload.OffloadError, match=r"(?s)hint: .*engine\.detach\(\)"):
                    use(model)
            except pytest.fail.Exception:
                pytest.fail(f"{name} is not refused")
            assert engine.forward(micro_batches()[0]).loss_sum == loss_sum, name
        assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
        found = gradients(model)
    assert all(torch.allclose(found[n], g, rtol=1e-3, atol=1e-6) for n, g in expected.items())
    assert_same(values(model), before)


@pytest.mark.usefixtures("one_thread")
def test_a_load_into_a_layer_is_an_error_too() -> None:
    """Torch collects what loading a parameter raises."""
    model = tiny("qwen3")
    with attached(model), pytest.raises(RuntimeError, match=r"(?s)`copy_` would read or change"):
        layer(model).load_state_dict(layer_values(tiny("qwen3", seed=1).state_dict()))


@pytest.mark.usefixtures("one_thread")
def test_an_attached_model_can_be_looked_at() -> None:
    model = tiny("qwen3")
    looks: tuple[Callable[[Any], object], ...] = (
        lambda m: [(n, p.shape, p.dtype, p.device, p.nbytes) for n, p in m.named_parameters()],
        lambda m: sum(p.numel() for p in m.parameters() if p.requires_grad),
        lambda m: [(len(p), p.dim(), p.is_leaf, p.stride()) for p in m.parameters()],
        lambda m: m.get_nb_trainable_parameters(),
        lambda m: (m.get_base_model().dtype, m.get_base_model().num_parameters()),
        repr,
    )
    expected = [look(model) for look in looks]
    with attached(model):
        assert [look(model) for look in looks] == expected
        assert "up_proj.weight: (64, 32), torch.float32, streamed>" in repr(up_proj(model).weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.AdamW(model.parameters()).step()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_an_optimizer_made_before_it_was_attached_trains_the_adapter() -> None:
    def trained(*, is_attached: bool) -> dict[str, torch.Tensor]:
        model = tiny("qwen3")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with attached(model) if is_attached else contextlib.nullcontext() as engine:
            for _ in range(3):
                optimizer.zero_grad()
                if engine is None:
                    accumulate(model)
                else:
                    engine.forward_backward(micro_batches())
                optimizer.step()
        return values(model)

    expected, found = trained(is_attached=False), trained(is_attached=True)
    assert all(torch.allclose(found[n], w, rtol=1e-4, atol=1e-5) for n, w in expected.items())


def accumulate(model: nn.Module) -> None:
    batches = micro_batches()
    num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    for batch in batches:
        model(**batch, use_cache=False, num_items_in_batch=num_items).loss.backward()


@pytest.mark.usefixtures("one_thread")
def test_an_optimizer_or_clipping_over_weights_whose_masters_train_is_refused() -> None:
    """Their gradients are on the masters: it would train, or clip, what is left."""
    model = MODELS["qwen3"]().train()
    engine = offload.attach(model, num_slots=2, device="cpu", trained_weights="host")
    engine.forward_backward(micro_batches())
    uses: tuple[Callable[[], object], ...] = (
        torch.optim.SGD(model.parameters(), lr=0.1).step,
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        model.zero_grad,
    )
    for use in uses:
        with pytest.raises(offload.OffloadError, match=r"hint: give `engine.trained_parameters`"):
            use()
    trained = {name: p.detach().clone() for name, p in engine.trained_parameters.items()}
    assert_same({n: t for n, t in model.state_dict().items() if n in trained}, trained)
    engine.detach()


# ------------------------------------------------------------------------- attached once


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_attaching_twice_is_refused_and_the_first_engine_goes_on() -> None:
    model = tiny("qwen3")
    before, loss = values(model), plain(model)[0]
    with attached(model) as engine:
        for given in (model, model.get_base_model()):
            with pytest.raises(
                offload.OffloadError, match=r"held by an attached.*\n\nhint: `engine.detach"
            ):
                offload.attach(given, num_slots=2, device="cpu")
        assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
    assert_same(values(model), before)


@pytest.mark.usefixtures("one_thread")
def test_a_model_whose_engine_is_gone_is_detached_by_itself() -> None:
    model = tiny("qwen3")
    before = values(model)
    offload.attach(model, num_slots=2, device="cpu").forward_backward(micro_batches())
    with pytest.raises(offload.OffloadError, match=r"or `offload.detach\(model\)`"):
        offload.attach(model, num_slots=2, device="cpu")
    offload.detach(model)
    assert_same(values(model), before)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not any({"forward", "generate", "_apply"} & vars(m).keys() for m in model.modules())
    with pytest.raises(offload.OffloadError, match="the model is not attached"):
        offload.detach(model)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_a_model_whose_engine_was_closed_is_refused_until_it_has_its_weights_back() -> None:
    model = tiny("qwen3")
    before = values(model)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(micro_batches())
    engine.close()
    closed = r"an engine that was closed.*\n\nhint: `engine.detach\(\)` gives them back"
    uses: tuple[Callable[[], object], ...] = (
        lambda: offload.attach(model, num_slots=2, device="cpu"),
        lambda: offload.detach(model),
        lambda: model(**micro_batches()[0]),
        lambda: copy.deepcopy(model),
    )
    for use in uses:
        with pytest.raises(offload.OffloadError, match=closed):
            use()
    with pytest.raises(offload.OffloadError, match="the engine is closed"):
        engine.forward(micro_batches()[0])
    engine.detach()
    engine.detach()
    assert_same(values(model), before)
    assert plain(model)[0] == pytest.approx(engine_loss(model), rel=1e-5)


def engine_loss(model: nn.Module) -> float:
    engine = offload.attach(model, num_slots=2, device="cpu")
    loss = engine.forward_backward(micro_batches()).loss
    engine.detach()
    return loss


@pytest.mark.usefixtures("one_thread")
def test_layers_on_disk_are_lost_to_an_engine_that_was_closed(tmp_path: Path) -> None:
    engine = offload.attach(
        tiny("qwen3"), num_slots=2, device="cpu", tier="disk", store_dir=str(tmp_path)
    )
    engine.close()
    with pytest.raises(offload.OffloadError, match=r"closed, and its layers are on disk"):
        engine.detach()


@pytest.mark.usefixtures("one_thread")
def test_a_detached_model_is_a_plain_model_again() -> None:
    model = tiny("qwen3")
    expected = plain(model)[0]
    with attached(model):
        pass
    assert type(model.get_base_model()(**micro_batches()[0]).logits.grad_fn) is not None
    assert plain(model)[0] == expected
    assert model.double().dtype == torch.float64
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


# ------------------------------------------------------------------------------- passes


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_a_pass_where_torch_caches_parametrized_weights_is_refused() -> None:
    model = tiny("qwen3")
    what = r"(?s)in `torch.nn.utils.parametrize.cached\(\)`.*hint: leave the block"
    with attached(model) as engine:
        with parametrize.cached():
            with pytest.raises(offload.OffloadError, match=what):
                engine.forward_backward(micro_batches())
            with pytest.raises(offload.OffloadError, match=what):
                engine.forward(micro_batches()[0])
        assert all(p.grad is None for p in model.parameters())
        engine.forward_backward(micro_batches())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_a_pass_inside_of_a_pass_is_refused() -> None:
    model = tiny("qwen3")
    batch = {n: t for n, t in micro_batches()[0].items() if n != "labels"}
    with attached(model) as engine:
        handle = layer(model).register_forward_hook(lambda *_: engine.forward(batch))
        with pytest.raises(offload.OffloadError, match="a pass inside of another"):
            engine.forward(batch)
        handle.remove()
        assert engine.forward(batch).logits is not None


# ----------------------------------------------------------------------------------- attached state


@pytest.mark.usefixtures("one_thread")
def test_move_a_state_dict_holds_the_true_weights() -> None:
    model = tiny("qwen3")
    expected = values(model)
    with attached(model):
        found = model.state_dict()
        assert_same(found, expected)
        assert_same(model.base_model.state_dict(), values(copy_of_base(expected)))
        file = io.BytesIO()
        torch.save(found, file)
        file.seek(0)
        assert_same(torch.load(file), expected)
        assert_same(layer(model).state_dict(), layer_values(expected))
    assert_same(values(model), expected)


def copy_of_base(expected: dict[str, torch.Tensor]) -> nn.Module:
    model = tiny("qwen3")
    model.load_state_dict(expected)
    base: nn.Module = model.base_model
    return base


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_move_saved_files_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model = two_adapters()
    reference = copy.deepcopy(model)
    reference.save_pretrained(str(tmp_path / "adapters"))
    reference.get_base_model().save_pretrained(str(tmp_path / "base"))
    save_model(reference, str(tmp_path / "whole.safetensors"))
    with attached(model):
        model.save_pretrained(str(tmp_path / "found" / "adapters"))
        model.get_base_model().save_pretrained(str(tmp_path / "found" / "base"))
        save_model(model, str(tmp_path / "found" / "whole.safetensors"))
    files = [f.relative_to(tmp_path) for f in tmp_path.rglob("*.safetensors")]
    files = [file for file in files if file.parts[0] != "found"]
    assert len(files) == 4
    for file in files:
        assert_same(load_file(tmp_path / "found" / file), load_file(tmp_path / file))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("codec", mostly_slow(["int8", "bf16_packed"], "int8"))
def test_of_encoded_layers_adapters_are_saved_and_the_rest_is_refused(
    codec: str, tmp_path: Path
) -> None:
    model: Any = tiny("qwen3").to(torch.bfloat16)
    expected = {n: t.clone() for n, t in get_peft_model_state_dict(model).items()}
    with attached(model, codec=codec):
        model.save_pretrained(str(tmp_path))
        assert_same(load_file(tmp_path / "adapter_model.safetensors"), expected)
        state = model.state_dict()
        with pytest.raises(offload.OffloadError, match=rf"`norm` .*{UP}.*\n\nhint: .*detach"):
            state[UP].norm()
        with pytest.raises(offload.OffloadError, match="whose layer is streamed"):
            torch.save(state, io.BytesIO())
        with pytest.raises(offload.OffloadError, match="whose layer is streamed"):
            model.get_base_model().save_pretrained(str(tmp_path))
    with pytest.raises(offload.OffloadError, match=r"detached since.*\n\nhint: take it again"):
        state[UP].norm()
    assert bool(model.state_dict()[UP].norm())


@pytest.mark.usefixtures("one_thread")
def test_of_layers_on_disk_adapters_are_saved(tmp_path: Path) -> None:
    model = tiny("qwen3")
    expected = {n: t.clone() for n, t in get_peft_model_state_dict(model).items()}
    with attached(model, tier="disk", store_dir=str(tmp_path)):
        assert_same(get_peft_model_state_dict(model), expected)
        with pytest.raises(offload.OffloadError, match="`clone` would read or change"):
            model.state_dict()[UP].clone()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_what_is_written_through_a_state_dict_is_trained_on() -> None:
    """As in the plain model, whose state_dict shares its memory; also where all is resident."""
    model = tiny("qwen3")
    reference = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=NUM_LAYERS, device="cpu")
    engine.forward_backward(micro_batches())
    model.zero_grad()
    with torch.no_grad():
        for written in (model, reference):
            written.state_dict()[UP].mul_(3)
    loss, expected = plain(reference)
    assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-6)
    found = gradients(model)
    engine.detach()
    assert all(torch.allclose(found[n], g, rtol=1e-3, atol=1e-6) for n, g in expected.items())
    assert torch.equal(up_proj(model).weight, up_proj(reference).weight)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_an_adapter_is_loaded_into_an_attached_model() -> None:
    model = tiny("qwen3")
    other = tiny("qwen3", seed=1)
    with attached(model) as engine:
        set_peft_model_state_dict(model, get_peft_model_state_dict(other))
        assert_same(get_peft_model_state_dict(model), get_peft_model_state_dict(other))
        found = engine.forward_backward(micro_batches()).loss
    assert found == pytest.approx(plain(model)[0], rel=1e-5)


# ----------------------------------------------------------------------------- changes after attach


def frozen_zeros() -> nn.Parameter:
    return nn.Parameter(torch.zeros(64, 32), requires_grad=False)


def freeze(model: Any) -> None:
    next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "set_adapter": (lambda m: m.set_adapter("b"), r"lora_A.default.weight was frozen since"),
    "unfreeze a streamed weight": (
        lambda m: up_proj(m).weight.requires_grad_(True),
        r"up_proj.weight was unfrozen since",
    ),
    "unfreeze a streamed weight by its attribute": (
        lambda m: setattr(up_proj(m).weight, "requires_grad", True),
        r"up_proj.weight was unfrozen since",
    ),
    "unfreeze the embedding": (
        lambda m: m.get_input_embeddings().weight.requires_grad_(True),
        r"embed_tokens.weight was unfrozen since",
    ),
    "freeze": (freeze, r"lora_A.default.weight was frozen since"),
    "freeze all": (lambda m: m.requires_grad_(False), r"was frozen since .* more\);"),
    "add an adapter": (
        lambda m: m.add_adapter("c", LoraConfig(target_modules=["q_proj"])),
        r"lora_dropout.c was added since",
    ),
    "delete an adapter": (lambda m: m.delete_adapter("b"), r"lora_dropout.b was removed since"),
    "replace a parameter": (
        lambda m: setattr(up_proj(m), "weight", nn.Parameter(torch.zeros(64, 32))),
        r"up_proj.weight was replaced since",
    ),
    "replace a module": (
        lambda m: setattr(layer(m).mlp, "up_proj", nn.Linear(32, 64, bias=False)),
        r"up_proj was replaced since",
    ),
    "assign weights to a layer": (
        lambda m: layer(m).load_state_dict(layer(two_adapters()).state_dict(), assign=True),
        r"was replaced since",
    ),
    "another type": (
        lambda m: m.get_input_embeddings().double(),
        r"embed_tokens.weight became torch.float64 on cpu from torch.float32 on cpu since",
    ),
    "swap tensors": (
        lambda m: torch.utils.swap_tensors(up_proj(m).weight, frozen_zeros()),
        r"up_proj.weight was exchanged with another tensor",
    ),
    "resize": (lambda m: m.resize_token_embeddings(70), r"lm_head was replaced since"),
    "unload": (lambda m: m.unload(), r"was replaced since"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:Already found:UserWarning")
@pytest.mark.parametrize(
    ("change", "what"),
    mostly_slow(CHANGES, "set_adapter", "unfreeze a streamed weight", "another type"),
)
def test_a_change_after_attach_is_refused_before_any_gradient_is_written(
    change: Callable[[Any], object], what: str
) -> None:
    model = two_adapters()
    parameters = list(model.parameters())
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward(micro_batches())
    model.zero_grad()
    change(model)
    for _ in range(2):
        with pytest.raises(offload.OffloadError, match=rf"(?s){what}.*hint: .*`engine.detach"):
            engine.forward_backward(micro_batches())
    engine.detach()
    assert all(p.grad is None for p in (*parameters, *model.parameters()))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("is_on", [True, False])
def test_a_router_loss_that_is_switched_after_attach_is_refused(is_on: bool) -> None:
    model: Any = tiny_model("qwen3_moe", output_router_logits=not is_on)
    model.model.layers[0].requires_grad_(False)
    engine = offload.attach(model, num_slots=2, device="cpu")
    model.config.output_router_logits = is_on
    what = rf"`config.output_router_logits` became {is_on} since .*hint: .*`engine.detach"
    with pytest.raises(offload.OffloadError, match=rf"(?s){what}"):
        engine.forward_backward(micro_batches())
    assert all(p.grad is None for p in model.parameters())
    model.config.output_router_logits = not is_on
    assert engine.forward_backward(micro_batches()).loss > 0
    engine.detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_what_trains_is_not_listed_from_a_model_that_has_changed() -> None:
    model = two_adapters()
    with attached(model) as engine:
        model.set_adapter("b")
        with pytest.raises(offload.OffloadError, match="was frozen since"):
            _ = engine.trained_parameters
        model.set_adapter("default")
        assert all(".default." in name for name in engine.trained_parameters)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_a_change_that_is_undone_or_attached_anew_trains_like_the_plain_model() -> None:
    model = two_adapters()
    with attached(model) as engine:
        model.set_adapter("b")
        model.set_adapter("default")
        found = engine.forward_backward(micro_batches()).loss
    assert found == pytest.approx(plain(model)[0], rel=1e-5)
    model.zero_grad()
    model.set_adapter("b")
    loss, expected = plain(model)
    with attached(model) as engine:
        assert engine.forward_backward(micro_batches()).loss == pytest.approx(loss, rel=1e-5)
        grads = gradients(model)
    assert all(torch.allclose(grads[n], g, rtol=1e-3, atol=1e-6) for n, g in expected.items())


# ---------------------------------------------------------------------------------------- read back


READS_BACK = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}


class Watch(TorchDispatchMode):
    """Notes the functions in whose call a value is read back, in the forward and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[set[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS_BACK:
            self.readers.append({frame.name for frame in traceback.extract_stack()})
        return func(*args, **(kwargs or {}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"], "qwen3_moe")
)
def test_only_masks_and_labels_are_looked_at_inside_a_step(name: str) -> None:
    """transformers looks whether a mask is all ones, and whether positions are of packed rows.

    Both before the layers and before the head, so never inside or between visits. The labels are
    looked at on the host.
    """
    model = tiny(name)
    model.config._experts_implementation = "grouped_mm"
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    batches = micro_batches()
    engine.forward_backward(batches, dropout_seed=0)
    with Watch() as watch:
        engine.forward_backward(batches, dropout_seed=0)
    engine.detach()
    looks = {"find_packed_sequence_indices", "_ignore_causal_mask_sdpa", "with_labels"}
    assert watch.readers, "labels are always looked at"
    assert [reader for reader in watch.readers if not reader & looks] == []
    assert not any("layer_forward" in reader for reader in watch.readers)


@pytest.mark.thorough
def test_a_value_read_back_in_a_visit_would_be_seen() -> None:
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu", head_chunk_tokens=7)
    layer = model.get_base_model().get_submodule("model.layers.1.mlp")

    def look(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
        assert output.sum().item() is not None

    layer.register_forward_hook(look)
    engine.forward_backward(micro_batches(), dropout_seed=0)
    with Watch() as watch:
        engine.forward_backward(micro_batches(), dropout_seed=0)
    engine.detach()
    assert sum("layer_forward" in reader for reader in watch.readers) == 6  # two visits of three


# -------------------------------------------------------------------------------------------- loops


NUM_STEPS = 3


def weights_after(prepare: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train for some steps with an optimizer and a schedule of the learning rate."""
    model = copy.deepcopy(tiny("qwen3"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=NUM_STEPS)
    engine = offload.attach(model, num_slots=2, device="cpu")
    optimizer, scheduler = prepare(optimizer, scheduler)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(engine.forward_backward(micro_batches(), dropout_seed=step).loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    engine.detach()
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def test_a_loop_with_accelerate_trains_like_a_plain_loop_to_the_bit() -> None:
    plain_losses, plain = weights_after(lambda *parts: parts)
    losses, found = weights_after(Accelerator(cpu=True).prepare)
    assert losses == plain_losses
    assert losses[-1] < losses[0]
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_step_runs_under_the_callers_autocast() -> None:
    """Visits run on the caller's thread, whose settings a lane's own thread would not have."""
    model = tiny("qwen3")
    engine = offload.attach(model, num_slots=2, device="cpu")
    batch = {k: v for k, v in micro_batches()[0].items() if k != "labels"}
    plain = engine.forward(batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        cast = engine.forward(batch).logits
    engine.detach()
    assert plain is not None
    assert cast is not None
    assert not torch.equal(plain, cast.float())
    assert torch.allclose(plain, cast.float(), atol=0.05)
