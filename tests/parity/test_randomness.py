"""What a layer draws at random is its own: no other thread changes it, or the step is refused."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import offload
from offload.engine.model.layers import LayeredModel
from offload.engine.randomness import _OwnGenerators
from tests.parity.steps import NUM_LAYERS, micro_batches, tiny
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")

Found = tuple[float, dict[str, torch.Tensor]]
INSPECTED = 3  # calls of each layer before the first step


class Noise(nn.Module):
    """Adds noise by an operation that takes no generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, out=torch.empty(x.shape))


def gpt2(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    )
    config._attn_implementation = attention
    assert config.attn_pdrop > 0
    model = GPT2LMHeadModel(config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln_" in name)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout of adapters": lambda: tiny("qwen3", dropout=0.5),
    "dropout in attention, eager": lambda: gpt2("eager"),
    "dropout in attention, sdpa": lambda: gpt2("sdpa"),
}


def draw_elsewhere() -> None:
    """Draw from torch's default generator on another thread, and wait for it."""
    thread = threading.Thread(target=lambda: torch.rand(3))
    thread.start()
    thread.join()


def disturb(model: nn.Module, calls: Sequence[int]) -> list[int]:
    """Let another thread draw at these visits of each layer, before its first module computes.

    Returns:
        How many visits each layer had; more as it has more.
    """
    counts = []
    for number, layer in enumerate(LayeredModel(model).layers):
        counts.append(-INSPECTED)

        def before(_module: nn.Module, _inputs: object, number: int = number) -> None:
            counts[number] += 1
            if counts[number] in calls:
                draw_elsewhere()

        next(layer.children()).register_forward_pre_hook(before)
    return counts


def step(model: nn.Module, *, kept_graphs: int = 0) -> Found:
    engine = offload.attach(model, num_slots=2, device="cpu", kept_graphs=kept_graphs)
    try:
        loss = engine.forward_backward(micro_batches()[:1], dropout_seed=0).loss
        return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    finally:
        engine.detach()


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in found[1])


@pytest.mark.thorough
@pytest.mark.parametrize("model", mostly_slow(MODELS, "dropout in attention, sdpa"))
@pytest.mark.parametrize("calls", [(1,), (2,)], ids=["forward", "recompute"])
def test_move_dropout_is_the_same_while_another_thread_draws(
    model: Callable[[], nn.Module], calls: Sequence[int]
) -> None:
    expected = step(model())
    disturbed = model()
    counts = disturb(disturbed, calls)
    assert_same(step(disturbed), expected)
    assert set(counts) == {2}, "visits must pass the point at which the thread draws"


@pytest.mark.thorough
def test_move_the_recompute_repeats_the_dropout_of_a_kept_graph() -> None:
    again = step(tiny("qwen3", dropout=0.5))
    assert_same(step(tiny("qwen3", dropout=0.5), kept_graphs=NUM_LAYERS), again)


@pytest.fixture
def noisy() -> nn.Module:
    model: Any = tiny("qwen3")
    layers: Any = LayeredModel(model).layers
    for layer in layers:
        layer.mlp = nn.Sequential(Noise(), layer.mlp)
    return model


@pytest.mark.thorough
def test_noise_from_the_default_generator_is_repeated(noisy: nn.Module) -> None:
    plain = copy.deepcopy(noisy)
    assert_same(step(noisy), step(plain, kept_graphs=NUM_LAYERS))


@pytest.mark.thorough
@pytest.mark.parametrize("call", [1, 2], ids=["forward", "recompute"])
def test_noise_that_another_thread_changes_is_refused(noisy: nn.Module, call: int) -> None:
    disturb(noisy, (call,))
    layers = LayeredModel(noisy).layers
    with pytest.raises(
        offload.OffloadError,
        match=rf"layer {len(layers) - 1} drew other random numbers in its recompute"
        r" than in its forward;[\s\S]*hint: give the other thread a `torch.Generator` of its own",
    ):
        step(noisy)
    assert all(p.grad is None for p in layers.parameters())


@pytest.mark.thorough
def test_move_layers_that_draw_nothing_do_not_mind_threads_that_draw() -> None:
    expected = step(tiny("qwen3"))
    model = tiny("qwen3")
    counts = disturb(model, range(1, 100))
    assert_same(step(model), expected)
    assert set(counts) == {3}, "computed again once, then kept apart from the default generator"
    model.zero_grad()
    assert_same(step(model), expected)


def test_layers_that_draw_nothing_are_seen_by_no_mode_after_their_first_visit() -> None:
    modes = []
    model = tiny("qwen3")
    first = LayeredModel(model).layers[0]

    def note(*_: object) -> None:
        modes.append(torch._C._len_torch_dispatch_stack())

    first.register_forward_pre_hook(note)
    step(model)
    assert modes[INSPECTED:] == [1, 0]


@pytest.fixture
def generators() -> Iterator[dict[str, torch.Generator]]:
    before = torch.default_generator.get_state()
    yield {"cpu": torch.Generator().manual_seed(0)}
    assert torch.equal(before, torch.default_generator.get_state()), "the default one has moved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_cudas_fused_dropout_is_masked_scaled_and_differentiated(
    p: float, dtype: torch.dtype, generators: dict[str, torch.Generator]
) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with _OwnGenerators(generators) as mode:
        out, mask = torch.native_dropout(x, p, True)
    out.sum().backward()
    scale = 1 / (1 - p) if p < 1 else 0.0
    assert mode.has_drawn
    assert not mode.has_drawn_elsewhere
    assert mask.dtype is torch.bool
    assert float(mask.float().mean()) == pytest.approx(1 - p, abs=0.03)
    assert torch.equal(out, (x.float() * mask * scale).to(dtype))
    assert x.grad is not None
    assert torch.equal(x.grad, (mask * scale).to(dtype))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(3),
        lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(x),
        lambda x: torch.randint(5, (3,)),
        lambda x: torch.randint(2, 5, (3,)),
        lambda x: torch.randperm(4),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.empty(3).uniform_(),
        lambda x: torch.empty(3).random_(),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.multinomial(x[0].sigmoid(), 2),
        lambda x: nn.functional.dropout(x),
        lambda x: nn.functional.alpha_dropout(x, training=True),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ],
)
def test_what_torch_draws_comes_from_a_generator_of_our_own(
    draw: Callable[[torch.Tensor], torch.Tensor], generators: dict[str, torch.Generator]
) -> None:
    x = torch.zeros(1, 4, 4)
    with _OwnGenerators(generators) as mode:
        draw(x)
    assert mode.has_drawn
    assert not mode.has_drawn_elsewhere


@torch.library.custom_op("sluice_tests::attend", mutates_args=())
def attend(x: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    """Stand for the attention of another package, whose operation has no tag."""
    return x.clone()


def test_other_packages_attention_draws_where_it_has_dropout() -> None:
    for dropout_p in (0.0, 0.5):
        with _OwnGenerators({"cpu": torch.Generator()}) as mode:
            attend(torch.zeros(1), dropout_p=dropout_p)
        assert mode.has_drawn == mode.has_drawn_elsewhere == (dropout_p > 0)


def test_attention_without_dropout_draws_nothing(generators: dict[str, torch.Generator]) -> None:
    x = torch.zeros(1, 2, 4, 4)
    with _OwnGenerators(generators) as mode:
        nn.functional.scaled_dot_product_attention(x, x, x)
    assert not mode.has_drawn
