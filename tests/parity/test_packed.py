"""Packed rows: each is what it is alone in plain transformers, and none sees another."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import offload
from finetune.adapter.linear_lora import compute_in_base_dtype
from offload.engine.engine import Engine, EngineOptions
from offload.engine.model.layers import LayeredModel
from offload.engine.model.packed_rows import JoinedRows, call_operator, joined_attention
from offload.engine.streams import device_named
from offload.errors import OffloadError
from tests.parity.architectures import PACKED, rel_error
from tests.parity.custom_model import WIDTH, CustomConfig, CustomLayer, CustomModel
from tests.parity.steps import NUM_LAYERS, OPTIONS, assert_equal, gradients, tiny
from tests.parity.tiny_models import tiny_model, with_adapters
from tests.tiers import mostly_slow
from tests.variable_length import VariableLength, variable_length

LENS = ((12, 5, 17), (3, 12, 12))


def rows_of(*lens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (1, n), generator=generator) for n in lens]


def packed(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    ids, lens = torch.cat(rows, dim=1), torch.tensor([row.shape[1] for row in rows])
    return {"input_ids": ids, "labels": ids.clone(), "row_lens": lens}


def plain_alone(model: PeftModel) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute each row by itself, by transformers, and its loss as its text defines it."""
    model, loss = copy.deepcopy(model), 0.0
    rows = [row for m, lens in enumerate(LENS) for row in rows_of(*lens, seed=m)]
    num = sum(row.shape[1] - 1 for row in rows)
    for row in rows:
        logits_BTV = model(input_ids=row, use_cache=False).logits.float()
        log_BTV = logits_BTV[:, :-1].log_softmax(-1)
        part = -log_BTV.gather(-1, row[:, 1:, None]).sum() / num
        part.backward()
        loss += part.item()
    return loss, gradients(model)


# ------------------------------------------------------------------------------------------- packed


NAMES = ("qwen3", "llama", "qwen3_moe", "gemma3_text", "gpt_oss")
ROW_LEN = 9  # longer than any that is tried, shorter than all that are tried together


def batches() -> list[dict[str, torch.Tensor]]:
    return [packed(*rows_of(*lens, seed=m)) for m, lens in enumerate(LENS)]


def step(
    model: nn.Module, options: EngineOptions = OPTIONS, **arguments: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    engine = Engine(model, device=torch.device("cpu"), options=options)
    try:
        loss = engine.forward_backward(batches(), dropout_seed=0, **arguments).loss
        return loss, gradients(model)  # type: ignore[arg-type]
    finally:
        engine.detach()


# Norms, rotations, gates and the loss fused; inputs on the host; graphs and outputs kept and sent.
ALL_LEVERS = replace(
    OPTIONS,
    layer_kernels="fused",
    stash="host",
    num_kept_graphs=1,
    num_sent_graphs=2,
    num_kept_outputs=1,
    num_sent_outputs=1,
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "options"),
    mostly_slow(
        {
            **{name: (name, OPTIONS) for name in NAMES},
            "qwen3 in tiles": ("qwen3", replace(OPTIONS, mlp_chunk_tokens=5)),
            **{f"{name} with all levers": (name, ALL_LEVERS) for name in NAMES},
        },
        "gemma3_text with all levers",
    ),
)
def test_reorder_packed_rows_have_the_gradients_of_rows_alone_in_plain_transformers(
    name: str, options: EngineOptions
) -> None:
    model = tiny(name)
    loss, ours = step(model, options)
    plain_loss, reference = plain_alone(model)
    assert rel_error(ours, reference) <= PACKED
    assert math.isclose(loss, plain_loss, rel_tol=PACKED)


WAYS = {
    "graphs": replace(OPTIONS, num_kept_graphs=2),
    "kept outputs": replace(OPTIONS, num_kept_outputs=NUM_LAYERS),
    "sent outputs": replace(OPTIONS, num_sent_outputs=NUM_LAYERS),
    "host stash": replace(OPTIONS, stash="host"),
    "resident": replace(OPTIONS, num_slots=NUM_LAYERS),
    "all computed": replace(OPTIONS, leaves_out=False),
    "both outputs": replace(OPTIONS, num_kept_outputs=1, num_sent_outputs=2),
    "sent graphs": replace(OPTIONS, num_sent_graphs=NUM_LAYERS),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("options", mostly_slow(WAYS, "sent outputs"))
def test_move_no_bit_of_a_packed_step_depends_on_what_is_kept(options: EngineOptions) -> None:
    model = tiny("qwen3")
    assert_equal(step(model, options), step(model))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_move_packed_rows_with_dropout_do_not_depend_on_what_is_kept() -> None:
    model = tiny("qwen3", dropout=0.2)
    assert_equal(step(model, WAYS["graphs"]), step(model))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(("qwen3", "gemma3_text", "gpt_oss"), "gpt_oss"))
def test_other_tokens_in_other_rows_change_a_row_by_rounding_only(name: str) -> None:
    engine = offload.attach(tiny(name).eval(), num_slots=2, device="cpu")
    first, second, third = rows_of(12, 5, 17)
    one = _logits(engine, packed(first, second, third))
    other = _logits(engine, packed(*rows_of(12, seed=7), second, *rows_of(17, seed=8)))
    alone = _logits(engine, {"input_ids": second})
    engine.detach()
    scale = float(alone.abs().max())
    assert float((one[:, 12:17] - other[:, 12:17]).abs().max()) <= 1e-6 * scale
    assert float((one[:, 12:17] - alone).abs().max()) <= 1e-6 * scale
    assert float((one[:, :12] - other[:, :12]).abs().max()) > 1e-3 * scale


def _logits(engine: Engine, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = engine.forward({n: t for n, t in batch.items() if n != "labels"}).logits
    assert logits is not None
    return logits


@pytest.mark.usefixtures("one_thread")
def test_the_first_token_of_a_packed_row_has_no_loss() -> None:
    engine = offload.attach(tiny("qwen3").eval(), num_slots=2, device="cpu")
    batch = packed(*rows_of(12, 5, 17))
    result = engine.forward(batch)
    batch["labels"][0, [0, 12, 17]] = -100
    without = engine.forward(batch)
    engine.detach()
    assert result.num_label_tokens == without.num_label_tokens == 11 + 4 + 16
    assert result.loss_sum == without.loss_sum


class Seen(TorchFunctionMode):
    """The queries' lengths in calls of attention, and the elements of its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.lens: list[int] = []
        self.mask_sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.lens.append(args[0].shape[2])
            mask = kwargs.get("attn_mask")
            self.mask_sizes.append(0 if mask is None else mask.numel())
        return func(*args, **kwargs)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_attention_never_sees_more_than_a_row_and_has_no_mask() -> None:
    engine = offload.attach(tiny("qwen3").eval(), num_slots=2, device="cpu")
    batch = packed(*rows_of(12, 5, 17))
    engine.forward(batch)  # the model is inspected
    with Seen() as seen:
        engine.forward(batch)
    assert len(engine.rows_together) == NUM_LAYERS
    engine.detach()
    assert seen.lens == [12, 5, 17] * NUM_LAYERS
    assert not any(seen.mask_sizes)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "together"),
    mostly_slow(
        {
            "lfm2": ("lfm2", {1, 3}),
            "qwen3_next": ("qwen3_next", {3}),
            "bamba": ("bamba", {1, 3}),
            "mamba2": ("mamba2", set()),
            "gpt_oss": ("gpt_oss", {0, 1, 2, 3}),
        },
        "lfm2",
    ),
)
def test_only_layers_that_keep_rows_apart_compute_them_together(
    model_type: str, together: set[int]
) -> None:
    base = tiny_model(model_type)
    model = with_adapters(base, LayeredModel(base).layers)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward(packed(*rows_of(9, 4)))
    assert engine.rows_together == together
    engine.detach()


class Leaking(nn.Module):
    """An MLP that adds a little of the token before to each token."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        before_BTD = nn.functional.pad(x_BTD[:, :-1], (0, 0, 1, 0))
        return self.mlp(x_BTD) + 1e-12 * before_BTD


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_a_leak_below_rounding_is_seen_and_its_layer_takes_row_after_row() -> None:
    model = tiny("qwen3").eval()
    layers = model.get_base_model().model.layers  # type: ignore[union-attr]
    layers[2].mlp = Leaking(layers[2].mlp)  # type: ignore[union-attr, index]
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward(packed(*rows_of(9, 4)))
    assert engine.rows_together == {0, 1, 3}
    engine.detach()


class ReadsBack(nn.Module):
    """An MLP that also reads the token some places before, as a dilated convolution does."""

    def __init__(self, mlp: nn.Module, distance: int) -> None:
        super().__init__()
        self.mlp, self.distance = mlp, distance

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        far = self.distance
        if x_BTD.shape[1] <= far:
            return self.mlp(x_BTD)
        return self.mlp(x_BTD + 0.5 * nn.functional.pad(x_BTD[:, :-far], (0, 0, far, 0)))


class InBlocks(nn.Module):
    """An MLP that adds to each full block of tokens its own first token."""

    def __init__(self, mlp: nn.Module, size: int) -> None:
        super().__init__()
        self.mlp, self.size = mlp, size

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        num = x_BTD.shape[1] // self.size * self.size
        blocks_BTD = x_BTD[:, :num].unflatten(1, (-1, self.size))
        y_BTD = torch.cat(((blocks_BTD + blocks_BTD[:, :, :1]).flatten(1, 2), x_BTD[:, num:]), 1)
        return self.mlp(y_BTD)


class Numbered(nn.Module):
    """An MLP that counts positions itself, from the 40th token on."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        late_T1 = (torch.arange(x_BTD.shape[1]) >= 40).to(x_BTD)[:, None]
        return self.mlp(x_BTD) * (1 + 0.1 * late_T1)


FAR: dict[str, Callable[[nn.Module], nn.Module]] = {
    "20 back": partial(ReadsBack, distance=20),
    "61 back": partial(ReadsBack, distance=61),
    "blocks of 16": partial(InBlocks, size=16),
    "blocks of 31": partial(InBlocks, size=31),
    "its own positions": Numbered,
}


def reached(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of all that has one."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def errors(model: nn.Module, *steps: tuple[int, ...]) -> tuple[list[float], list[frozenset[int]]]:
    """Return the errors of the gradients of packed rows, and the layers that compute all rows.

    The reference is each row alone, by transformers and autograd.
    """
    alone, found, together = copy.deepcopy(model), [], []
    engine = offload.attach(model, num_slots=2, device="cpu")
    for lens in steps:
        alone.zero_grad()
        model.zero_grad()
        rows = rows_of(*lens)
        for row in rows:
            log_BTV = alone(input_ids=row, use_cache=False).logits.float()[:, :-1].log_softmax(-1)
            (-log_BTV.gather(-1, row[:, 1:, None]).sum() / (sum(lens) - len(lens))).backward()
        engine.forward_backward([packed(*rows)], dropout_seed=0)
        found.append(rel_error(reached(model), reached(alone)))
        together.append(engine.rows_together)
    engine.detach()
    return found, together


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("change", FAR.values(), ids=FAR)
@pytest.mark.parametrize(
    "steps", [((32, 16, 32),), ((5, 4), (30, 18, 26))], ids=["at once", "later"]
)
def test_a_layer_that_mixes_tokens_far_apart_takes_row_after_row(
    change: Callable[[nn.Module], nn.Module], steps: tuple[tuple[int, ...], ...]
) -> None:
    model = tiny("qwen3")
    layers = model.get_base_model().model.layers  # type: ignore[union-attr]
    layers[2].mlp = change(layers[2].mlp)  # type: ignore[union-attr, index]
    found, together = errors(model, *steps)
    assert max(found) <= PACKED
    assert together[-1] == {0, 1, 3}


@pytest.mark.usefixtures("one_thread")
def test_a_layer_that_mixes_tokens_far_apart_is_seen_in_bfloat16() -> None:
    model = tiny("qwen3").bfloat16().eval()
    layers = model.get_base_model().model.layers  # type: ignore[union-attr]
    layers[2].mlp = ReadsBack(layers[2].mlp, 20)  # type: ignore[union-attr, index]
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward(packed(*rows_of(30, 18, 26)))
    assert engine.rows_together == {0, 1, 3}
    engine.detach()


KINDS = {
    "sliding": "sliding_attention",
    "blocks of 4": "compressed_sparse_attention",
    "blocks of 128": "heavily_compressed_attention",
}


def deepseek_v4() -> nn.Module:
    """Return a DeepSeek-V4 with a layer of each kind of attention, and LoRA on all linears."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(
        DeepseekV4Config(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=2048,
            pad_token_id=None,
            head_dim=16,
            q_lora_rank=16,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            layer_types=list(KINDS.values()),
            mlp_layer_types=["moe"] * len(KINDS),
            sliding_window=16,
            o_groups=2,
            o_lora_rank=8,
            index_n_heads=2,
            index_head_dim=16,
            index_topk=4,
            hc_mult=2,
        )
    )
    return with_adapters(model, LayeredModel(model).layers)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "steps",
    mostly_slow(
        {
            "128": [(128, 128)],
            "300": [(300, 150, 70)],
            "1,000": [(1000, 300)],
            "longer each time": [(20, 9), (60, 50), (256, 128, 128), (1000, 300)],
        },
        "300",
    ),
)
def test_deepseek_v4_packs_rows_that_are_longer_than_its_blocks(
    steps: list[tuple[int, ...]],
) -> None:
    found, together = errors(deepseek_v4(), *steps)
    assert max(found) <= PACKED
    assert together[-1] == {0}


class HalfBlind(nn.Module):
    """An MLP that adds less than a bfloat16 shows, by a comparison, which hides a NaN."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        before_BTD = nn.functional.pad(x_BTD[:, :-1], (0, 0, 1, 0))
        y_BTD = self.mlp(x_BTD)
        return y_BTD + torch.where(before_BTD > 0, 1e-3, -1e-3).to(y_BTD) * y_BTD.abs()


class HalfOnly(nn.Module):
    """An MLP that has no kernel for float32."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if x_BTD.dtype is torch.float32:
            raise RuntimeError("no kernel for float32\n  at line 3")
        return self.mlp(x_BTD)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_slow(("qwen3", "qwen3_moe", "gpt_oss"), "qwen3"))
def test_one_layer_of_each_kind_of_a_model_of_16_bits_is_tried_in_float32(name: str) -> None:
    model = tiny(name).eval().bfloat16()
    layers = model.get_base_model().model.layers  # type: ignore[union-attr]
    layers[2].mlp = HalfBlind(layers[2].mlp) if name == "qwen3" else layers[2].mlp  # type: ignore[union-attr, index]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward(packed(*rows_of(9, 4)))
    assert (2 in engine.rows_together) == (name != "qwen3")
    assert engine.rows_together >= {0, 1, 3}
    engine.detach()
    after = model.state_dict()
    assert all(x.dtype == before[n].dtype and torch.equal(x, before[n]) for n, x in after.items())


class Coarse(nn.Module):
    """An MLP whose products of many tokens are larger, the layer's output by 15 to 26 roundings."""

    def __init__(self, mlp: nn.Module, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mlp, self.dtype = mlp, dtype

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        own = x_BTD.dtype if x_BTD.dtype.itemsize >= torch.float32.itemsize else torch.float32
        is_larger = x_BTD.shape[1] > ROW_LEN
        larger = 1 + is_larger * 2000 * torch.finfo(self.dtype or own).eps
        return larger * self.mlp(x_BTD)


class CoarseOnly(Coarse):
    """The same without a kernel for float64."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if x_BTD.dtype is torch.float64:
            raise RuntimeError("no kernel for float64")
        return super().forward(x_BTD)


DOUBTFUL: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "rounding": (Coarse, True),
    "error": (partial(Coarse, dtype=torch.float32), False),
    "no float64": (CoarseOnly, False),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("changed", "is_together"), DOUBTFUL.values(), ids=DOUBTFUL)
def test_more_roundings_of_float32_than_usual_are_allowed_if_float64_takes_them_away(
    changed: Callable[[nn.Module], nn.Module], is_together: bool, dtype: torch.dtype
) -> None:
    model = tiny("qwen3").eval().to(dtype)
    layers = model.get_base_model().model.layers  # type: ignore[union-attr]
    layers[2].mlp = changed(layers[2].mlp)  # type: ignore[union-attr, index]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward(packed(*rows_of(ROW_LEN, 4)))
    assert engine.rows_together == ({0, 1, 2, 3} if is_together else {0, 1, 3})
    engine.detach()
    after = model.state_dict()
    assert all(x.dtype == before[n].dtype and torch.equal(x, before[n]) for n, x in after.items())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_layers_that_cannot_be_tried_in_float32_are_named() -> None:
    model = tiny("qwen3").eval().bfloat16()
    layers = model.get_base_model().model.layers  # type: ignore[union-attr]
    layers[1].mlp = HalfOnly(layers[1].mlp)  # type: ignore[union-attr, index]
    engine = offload.attach(model, num_slots=2, device="cpu")
    said = "packed rows of layer 1 were tried in torch.bfloat16 alone, .*: no kernel for float32$"
    with pytest.warns(UserWarning, match=said):
        engine.forward(packed(*rows_of(9, 4)))
    assert engine.rows_together == {0, 1, 2, 3}
    engine.detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_rounding_packed_rows_in_bfloat16_are_as_near_as_rows_alone() -> None:
    model = tiny("qwen3")
    truth = plain_alone(model)[1]
    half = copy.deepcopy(model).bfloat16()
    compute_in_base_dtype(half)
    ours, alone = step(half)[1], plain_alone(half)[1]
    assert rel_error(ours, truth) <= 1.3 * rel_error(alone, truth)  # of two roundings of one model


REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "too few": (
        lambda b: b | {"row_lens": torch.tensor([3, 4])},
        r"\[3, 4\], `input_ids` \(1, 9\)",
    ),
    "an empty row": (lambda b: b | {"row_lens": torch.tensor([9, 0])}, r"is \[9, 0\]"),
    "no row": (lambda b: b | {"row_lens": torch.tensor([], dtype=torch.long)}, r"is \[\]"),
    "floats": (lambda b: b | {"row_lens": torch.tensor([4.0, 5.0])}, "of torch.float32"),
    "a table": (lambda b: b | {"row_lens": torch.tensor([[4, 5]])}, r"is \(1, 2\)"),
    "a mask": (lambda b: b | {"attention_mask": torch.ones(1, 9)}, "`attention_mask`"),
    "positions": (lambda b: b | {"position_ids": torch.arange(9)[None]}, "`position_ids`"),
    "two sequences": (
        lambda b: {n: t.repeat(2, 1) if t.ndim > 1 else t for n, t in b.items()},
        r"`input_ids` \(2, 9\)",
    ),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
@pytest.mark.parametrize(("change", "what"), REFUSED.values(), ids=REFUSED)
def test_row_lens_that_do_not_fit_are_refused(change: Any, what: str) -> None:
    engine = offload.attach(tiny("qwen3"), num_slots=2, device="cpu")
    with pytest.raises(OffloadError, match=what):
        engine.forward_backward([change(packed(*rows_of(4, 5)))])
    engine.detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "num_calls"), [("qwen3", 1), ("gpt_oss", NUM_LAYERS)])
def test_layers_share_one_call_where_the_one_before_is_passed_the_same_objects(
    name: str, num_calls: int
) -> None:
    """Those of gpt_oss are passed another mask in turn: of all tokens, and of a window."""
    batch = packed(*rows_of(12, 5, 17))
    del batch["labels"]
    calls = LayeredModel(tiny(name)).front(batch).packed
    assert len(calls) == NUM_LAYERS
    assert len({id(call) for call in calls}) == num_calls


class Scaled(CustomLayer):
    def forward(self, hidden: torch.Tensor, factor: Any = None, **arguments: Any) -> Any:
        return hidden + factor * torch.tanh(self.mlp(self.attend(hidden)))


class PassesWhatTrains(CustomModel):
    """Passes one tensor that requires grad, with a value for each token, to all its layers."""

    layer = Scaled

    def prepare(self) -> None:
        self.gate = nn.Linear(WIDTH, 1)

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.factor = torch.tanh(self.gate(hidden))
        output: torch.Tensor = layer(hidden, factor=self.factor)
        return output


@pytest.mark.usefixtures("one_thread")
def test_reorder_a_trained_argument_of_all_layers_gets_the_gradients_of_rows_alone() -> None:
    """All layers share one record of it; the reference is plain autograd, row by row."""
    torch.manual_seed(0)
    model = PassesWhatTrains(CustomConfig()).requires_grad_(requires_grad=False)
    model.gate.requires_grad_()
    alone = copy.deepcopy(model)
    rows = rows_of(12, 5, 17)
    num = sum(row.shape[1] - 1 for row in rows)
    for row in rows:
        log_BTV = alone(row).logits[:, :-1].log_softmax(-1)
        (-log_BTV.gather(-1, row[:, 1:, None]).sum() / num).backward()
    engine = Engine(model, device=torch.device("cpu"), options=OPTIONS)
    engine.forward_backward([packed(*rows)])
    engine.detach()
    for ours, theirs in zip(model.gate.parameters(), alone.gate.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


# -------------------------------------------------------------------------------------- joined rows


JOINS = replace(OPTIONS, joins_rows=True)
KEPT = replace(JOINS, num_kept_graphs=0, num_kept_outputs=1, num_sent_outputs=1)


@pytest.fixture(name="operator")
def operator_fixture() -> Iterator[VariableLength]:
    with variable_length() as operator:
        yield operator


def model_of(name: str) -> Any:
    model = tiny_model(name)
    return with_adapters(model, LayeredModel(model).layers)


def halved(model: nn.Module) -> nn.Module:
    half = copy.deepcopy(model).bfloat16()
    compute_in_base_dtype(half)
    return half


def step_joined_rows(
    model: nn.Module, options: EngineOptions, device: str = "cpu"
) -> tuple[float, dict[str, torch.Tensor], frozenset[int]]:
    model = copy.deepcopy(model)
    engine = Engine(model, device=device_named(device), options=options)
    try:
        batches = [packed(*rows_of(*lens, seed=m)) for m, lens in enumerate(LENS)]
        loss = engine.forward_backward(batches, dropout_seed=0).loss
        return loss, gradients(model), engine.rows_joined  # type: ignore[arg-type]
    finally:
        engine.detach()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", mostly_slow(("qwen3", "gemma3_text", "mistral", "llama", "qwen3_moe"), "qwen3")
)
def test_rounding_joined_rows_have_the_gradients_of_rows_taken_one_by_one(
    name: str, operator: VariableLength
) -> None:
    model = model_of(name)
    truth = plain_alone(model)[1]
    _, apart, none = step_joined_rows(halved(model), OPTIONS)
    assert not none
    assert not operator.windows
    _, found, joined = step_joined_rows(halved(model), JOINS)
    assert len(joined) == model.config.get_text_config().num_hidden_layers
    assert operator.num_backwards == len(LENS) * len(joined)
    assert rel_error(found, truth) <= 1.3 * rel_error(apart, truth)  # two roundings of one model


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_a_window_is_passed_on_as_a_number(operator: VariableLength) -> None:
    config = tiny_model("gemma3_text").config
    step_joined_rows(halved(model_of("gemma3_text")), JOINS)
    windows = {"full_attention": (-1, 0), "sliding_attention": (config.sliding_window - 1, 0)}
    assert config.sliding_window < 17
    # the first rows that are tried are shorter than the window
    assert set(operator.windows) == {(-1, 0), *(windows[kind] for kind in config.layer_types)}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_move_no_bit_differs_where_joined_attention_is_not_computed_again(
    operator: VariableLength,
) -> None:
    model = halved(model_of("qwen3"))
    expected = step_joined_rows(model, replace(JOINS, num_kept_graphs=0))
    num_all = len(operator.windows)
    operator.windows.clear()
    found = step_joined_rows(model, KEPT)
    assert_equal(found[:2], expected[:2])
    assert found[2] == expected[2]
    assert len(operator.windows) == num_all - 2 * len(LENS)  # of two layers each


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_an_operator_that_does_not_keep_rows_apart_is_not_used() -> None:
    model = halved(model_of("qwen3"))
    expected = step_joined_rows(model, OPTIONS)
    with variable_length(leaks=True) as operator:
        found = step_joined_rows(model, JOINS)
    assert operator.windows  # it was tried
    assert operator.num_backwards == 0
    assert not found[2]
    assert_equal(found[:2], expected[:2])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.thorough
def test_rows_in_float32_are_taken_one_by_one(operator: VariableLength) -> None:
    model = model_of("qwen3")
    found, expected = step_joined_rows(model, JOINS), step_joined_rows(model, OPTIONS)
    assert_equal(found[:2], expected[:2])
    assert not found[2]
    assert not operator.windows


@pytest.mark.usefixtures("one_thread")
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "mistral", "llama", "qwen3_moe"])
def test_rounding_joined_rows_on_a_card_are_as_near_as_rows_taken_one_by_one(name: str) -> None:
    model = model_of(name)
    truth = plain_alone(model)[1]
    apart = step_joined_rows(halved(model), OPTIONS, "cuda")
    found = step_joined_rows(halved(model), JOINS, "cuda")
    assert not apart[2]
    assert len(found[2]) == model.config.get_text_config().num_hidden_layers
    errors = (rel_error({n: g.cpu() for n, g in x[1].items()}, truth) for x in (found, apart))
    assert next(errors) <= 1.3 * next(errors)  # two roundings of one model


@pytest.mark.usefixtures("one_thread")
@pytest.mark.gpu
def test_move_no_bit_differs_on_a_card_where_joined_attention_is_not_computed_again() -> None:
    model = halved(model_of("qwen3"))
    torch.use_deterministic_algorithms(mode=True)
    try:
        expected, found = (
            step_joined_rows(model, JOINS, "cuda"),
            step_joined_rows(model, KEPT, "cuda"),
        )
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert_equal(found[:2], expected[:2])
    assert found[2] == expected[2]
    assert found[2]


class Attention(nn.Module):
    """A module that calls attention."""

    is_causal = True


def heads(features: int = 16, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, num, 9, features).to(dtype) for num in (4, 2, 2))
    return {"query": q, "key": k, "value": v}


ROWS = JoinedRows(ends=torch.tensor([0, 5, 9], dtype=torch.int32), longest=5, window=None)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("given", "options"),
    [
        (heads(), {"dropout": 0.1}),
        (heads(), {"is_causal": False}),
        (heads(), {"softcap": 30.0}),
        (heads(), {"s_aux": torch.zeros(4)}),
        (heads(), {"position_bias": torch.zeros(4)}),
        (heads(12), {}),
        (heads(512), {}),
        (heads(dtype=torch.float32), {}),
        ({**heads(), "value": heads(8)["value"]}, {}),
    ],
)
def test_what_the_operator_does_not_compute_is_taken_row_by_row(
    given: dict[str, torch.Tensor], options: dict[str, Any], operator: VariableLength
) -> None:
    assert joined_attention(Attention(), **given, rows=ROWS, options=options) is None
    assert not operator.windows


@pytest.mark.usefixtures("one_thread")
def test_what_attention_does_not_read_does_not_matter(operator: VariableLength) -> None:
    options = {"dropout": 0.0, "scaling": 0.3, "sliding_window": 3, "position_ids": torch.arange(9)}
    found = joined_attention(Attention(), **heads(), rows=ROWS, options=options)
    assert found is not None
    expected = []
    for rows in (slice(0, 5), slice(5, 9)):
        q, k, v = (x[:, :, rows].float() for x in heads().values())
        output = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3, enable_gqa=True
        )
        expected.append(output.transpose(1, 2))
    torch.testing.assert_close(found.float(), torch.cat(expected, dim=1), rtol=1e-2, atol=1e-2)
    assert operator.windows == [(-1, 0)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("window", [None, 3])
def test_the_call_fits_the_operator_on_a_card(window: int | None) -> None:
    with FakeTensorMode(), torch.no_grad():
        given = (torch.empty(1, n, 9, 16, dtype=torch.bfloat16, device="cuda") for n in (4, 2, 2))
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        rows = JoinedRows(ends=ends, longest=5, window=window)
        output = call_operator(*given, rows=rows, scale=0.3)
    assert output.shape == (1, 9, 4, 16)
    assert (output.dtype, output.device.type) == (torch.bfloat16, "cuda")


def band(num_tokens: int, window: int) -> torch.Tensor:
    at = torch.arange(num_tokens)
    back = at[:, None] - at
    return ((back >= 0) & (back < window))[None, None]


SEEN = {
    "causal rows": ((None, None), None),
    "a window that both exceed": ((band(5, 3), band(4, 3)), 3),
    "a window that one exceeds": ((band(5, 4), None), 4),
    "masks that are causal": ((band(5, 5), band(4, 4)), None),
    "a row without its window": ((None, band(4, 3)), False),
    "two windows": ((band(5, 3), band(4, 2)), False),
    "a mask that is no window": ((band(5, 3) & (torch.arange(5) != 1), None), False),
    "a mask of floats": ((torch.zeros(1, 1, 5, 5), None), False),
    "a mask for each head": ((band(5, 3).expand(1, 2, 5, 5), None), False),
    "a token that sees none": ((torch.zeros(1, 1, 5, 5, dtype=torch.bool), None), False),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("masks", "window"), SEEN.values(), ids=SEEN)
def test_what_rows_see_is_read_off_their_masks(masks: Any, window: Any) -> None:
    rows = JoinedRows.of((5, 4), torch.device("cpu"))
    assert rows.ends.tolist() == [0, 5, 9]
    assert rows.ends.dtype == torch.int32
    seen = rows.seeing((5, 4), masks)
    assert seen is None if window is False else (seen is not None and seen.window == window)
