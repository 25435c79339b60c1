"""An attached model used as a model: the plain model's answer to the bit, or an error by name."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import parametrize
from transformers import Trainer, TrainingArguments

import offload
from tests.parity.attached import assert_same, attached, layer, layer_values, up_proj, values
from tests.parity.steps import MODELS, gradients, micro_batches, plain, tiny
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_outputs_that_the_config_asks_for_are_refused() -> None:
    model = tiny("qwen3").eval()
    model.config.output_hidden_states = True
    with (
        attached(model),
        torch.no_grad(),
        pytest.raises(offload.OffloadError, match="asked for `output_hidden_states`"),
    ):
        model(input_ids=micro_batches()[0]["input_ids"])


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


def test_a_load_into_a_layer_is_an_error_too() -> None:
    """Torch collects what loading a parameter raises."""
    model = tiny("qwen3")
    with attached(model), pytest.raises(RuntimeError, match=r"(?s)`copy_` would read or change"):
        layer(model).load_state_dict(layer_values(tiny("qwen3", seed=1).state_dict()))


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


def test_layers_on_disk_are_lost_to_an_engine_that_was_closed(tmp_path: Path) -> None:
    engine = offload.attach(
        tiny("qwen3"), num_slots=2, device="cpu", tier="disk", store_dir=str(tmp_path)
    )
    engine.close()
    with pytest.raises(offload.OffloadError, match=r"closed, and its layers are on disk"):
        engine.detach()


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
