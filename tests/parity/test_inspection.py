"""What a model's own code does besides calling its layers is computed as it does, or refused.

The reference is the model's own loss and plain autograd on the whole model.
"""

from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.parity.custom_model import (
    NUM_LAYERS,
    WIDTH,
    CustomLayer,
    CustomModel,
)
from tests.parity.custom_steps import (
    SHARED,
    assert_equal,
    assert_refused,
    batches,
    built,
    of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------- reference


def test_a_model_of_custom_code_is_exact() -> None:
    assert_equal(built(CustomModel))


# ---------------------------------------------------------------------------- what layers return


class Pair(CustomLayer):
    """Returns a second value, as mixtures do."""

    def forward(self, hidden: torch.Tensor, second: Any = None, **arguments: Any) -> Any:
        values = self.v_proj(hidden) if second is None else self.v_proj(hidden) + second
        return hidden + torch.tanh(self.mlp(self.attend(hidden) + values)), values


class AddsToLoss(CustomModel):
    layer = Pair
    total: Any

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        output = layer(hidden)
        if isinstance(output, tuple):
            hidden, second = output
            self.total = (0.0 if index == 0 else self.total) + second.square().mean()
            return hidden
        return output

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return 0.1 * self.total


class HandsOn(CustomModel):
    layer = Pair
    second: Any

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        output = layer(hidden, second=None if index == 0 else self.second)
        if isinstance(output, tuple):
            hidden, self.second = output
            return hidden
        self.second = None
        return output


class Ignores(CustomModel):
    layer = Pair


def test_a_second_value_that_the_loss_reads_is_refused() -> None:
    assert_refused(built(AddsToLoss), "computes with what a layer returns besides the hidden state")


def test_a_second_value_that_the_next_layer_reads_is_refused() -> None:
    assert_refused(built(HandsOn), "hands more than a hidden state on to layer 1")


def test_a_second_value_that_nothing_reads_is_exact() -> None:
    assert_equal(built(Ignores))


# -------------------------------------------------------------------------- between the layers


class Scaled(CustomLayer):
    """Multiplies by what it is passed."""

    def forward(self, hidden: torch.Tensor, scale: Any = None, **arguments: Any) -> Any:
        scale = scale["by"] if isinstance(scale, dict) else scale
        return hidden + scale * torch.tanh(self.mlp(self.attend(hidden)))


class ChangesDict(CustomModel):
    layer = Scaled

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.context = {"by": 1.0}
        self.context["by"] = 1.0 + index / 4
        return layer(hidden, scale=self.context)


class ChangesDictAndBack(CustomModel):
    """One dict for all layers, with another value while one of them is called."""

    layer = Scaled

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.context = {"by": 1.0}
        self.context["by"] = 3.0 if index == 1 else 1.0
        output: torch.Tensor = layer(hidden, scale=self.context)
        self.context["by"] = 1.0
        return output


class RefillsDict(CustomModel):
    """One dict for all layers, refilled for two in the middle."""

    layer = Scaled

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.context: dict[str, float] = {}
        self.context.clear()
        self.context["by"] = 2.0 if index in (1, 2) else 1.0
        return layer(hidden, scale=self.context)


class ChangesTensor(CustomModel):
    layer = Scaled
    factor: torch.Tensor

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        self.factor = torch.ones(()) if index == 0 else self.factor.mul_(0.7)
        return layer(hidden, scale=self.factor)


class OneDictEach(CustomModel):
    layer = Scaled

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return layer(hidden, scale={"by": 1.0 + index / 4})


class Lists(CustomLayer):
    def forward(self, hidden: torch.Tensor, said: Any = None, **arguments: Any) -> Any:
        said.append(self.q_proj(hidden))
        return super().forward(hidden)


class ReadsList(CustomModel):
    layer = Lists

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        if index == 0:
            self.said: list[torch.Tensor] = []
        return layer(hidden, said=self.said)

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return sum(said.square().mean() for said in self.said)


class PassesLabels(CustomModel):
    """Passes its labels to its layers, which do not read them."""

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return layer(hidden, labels=self.labels)


class ReadsLabels(CustomLayer):
    def forward(self, hidden: torch.Tensor, labels: Any = None, **arguments: Any) -> Any:
        output = super().forward(hidden)
        return output if labels is None else output + 0.1 * (labels > 0).unsqueeze(-1)


class Drops(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return nn.functional.dropout(layer(hidden), 0.1)


class Detaches(CustomModel):
    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        return layer(hidden).detach() if index == 1 else layer(hidden)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [(ChangesDict, 0), (ChangesTensor, 0), (ChangesDictAndBack, 1), (RefillsDict, 1)],
)
def test_what_is_changed_in_place_between_layers_is_refused(
    kind: type[CustomModel], layer: int
) -> None:
    what = f"changes what it has passed to layer {layer} before it calls another"
    assert_refused(built(kind), what)


def test_another_container_for_each_layer_is_exact() -> None:
    assert_equal(built(OneDictEach))


def test_a_list_that_layers_append_to_is_refused() -> None:
    assert_refused(built(ReadsList), "has a layer 0 that changes its arguments")


def test_labels_that_layers_are_passed_and_do_not_read_are_exact() -> None:
    assert_equal(built(PassesLabels))


def test_labels_that_a_layer_reads_are_refused() -> None:
    kind = type("Mine", (PassesLabels,), {"layer": ReadsLabels})
    assert_refused(built(kind), "computes with its labels in a layer")


@pytest.mark.parametrize("kind", [Drops, Detaches])
def test_what_is_computed_between_layers_is_refused(kind: type[CustomModel]) -> None:
    assert_refused(built(kind), "computes with the hidden state between its layers")


# ------------------------------------------------------------------------- state of the layers


class Globally(CustomLayer):
    """Even layers leave their values, odd layers read those of the layer before."""

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        values = self.v_proj(hidden)
        if self.index % 2 == 0:
            SHARED["values"] = values
        return super().forward(hidden) + 0.1 * SHARED["values"]


class LeavesNumber(CustomLayer):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        scale = SHARED.get("mean", 1.0) if self.index else 1.0
        SHARED["mean"] = hidden.detach().square().mean().item()
        return super().forward(hidden) * scale


class Counts(CustomLayer):
    num_calls = 0

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        self.num_calls += 1
        return super().forward(hidden) * (1.0 if self.num_calls < 100 else 0.5)


class CountsInTraining(Counts):
    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(hidden) if self.training else CustomLayer.forward(self, hidden)


class Remembers(CustomLayer):
    state: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        old = torch.zeros(WIDTH) if self.state is None else self.state
        self.state = 0.9 * old + 0.1 * hidden.detach().mean((0, 1))
        return super().forward(hidden) + self.state


class Averages(CustomLayer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        self.mean.data.mul_(0.9).add_(0.1 * hidden.detach().mean((0, 1)))
        return super().forward(hidden) + self.mean


class ReadsOther(CustomLayer):
    """Reads weights of another layer, in a way that no list of modules shows."""

    others: tuple[CustomLayer, ...] = ()

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        other = self.others[(self.index + 2) % NUM_LAYERS]
        return super().forward(hidden) + 0.1 * other.mlp(hidden)


class Logs(CustomLayer):
    """Keeps what nothing reads, and a table that is computed once."""

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        if "table" not in SHARED:
            SHARED["table"] = torch.linspace(0.5, 1.5, WIDTH)
        self.last_attention = self.attend(hidden).detach()
        return super().forward(hidden) * SHARED["table"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Globally, "has a layer 1 that reads a tensor that layer 0 made"),
        (LeavesNumber, r"has a layer 0 that changes `SHARED \(in forward\)\['mean'\]`"),
        (Counts, "has a layer 0 that changes `num_calls` when it is called"),
        (CountsInTraining, "has a layer 0 that changes `num_calls` when it is called"),
        (Remembers, "has a layer 0 that reads a tensor that an earlier call of layer 0 made"),
        (Averages, "has a layer 0 that writes to a tensor that it did not make"),
    ],
)
def test_a_layer_with_state_is_refused(layer: type[CustomLayer], what: str) -> None:
    assert_refused(built(of(layer)), what)


def test_state_in_training_only_does_not_forbid_an_evaluation_before() -> None:
    model = built(of(CountsInTraining)).eval()
    batch = batches()[1]
    with torch.no_grad():
        expected = model(**batch).loss.item()
    engine = offload.attach(model, num_slots=2, device="cpu")
    found = engine.forward(batch)
    model.train()
    with pytest.raises(offload.UnsupportedModelError, match="changes `num_calls`"):
        engine.forward_backward(batches())
    engine.detach()
    assert found.loss_sum / found.num_label_tokens == pytest.approx(expected, rel=1e-5)


def test_a_layer_that_counts_in_a_closure_is_refused() -> None:
    model = built(CustomModel)
    num_calls = 0

    def count(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return output if num_calls < 100 else output * 0.5

    model.get_base_model().model.layers[2].register_forward_hook(count)
    assert_refused(model, r"has a layer 2 that changes `num_calls \(in a hook\)`")


def test_a_hook_that_only_records_is_exact() -> None:
    model = built(CustomModel)
    seen: list[torch.Tensor] = []

    def record(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if len(seen) < 100:
            seen.append(output.detach())

    model.get_base_model().model.layers[2].register_forward_hook(record)
    assert_equal(model)
    assert seen


def test_a_layer_that_reads_weights_of_another_is_refused() -> None:
    model = built(of(ReadsOther))
    layers = tuple(model.get_base_model().model.layers)
    for layer in layers:
        vars(layer)["others"] = layers
    assert_refused(model, "has a layer 0 that reads weights of layer 2")


def test_what_layers_only_log_and_tables_that_they_share_are_exact() -> None:
    assert_equal(built(of(Logs)))


def test_a_hook_that_changes_what_a_layer_returns_is_exact() -> None:
    model = built(CustomModel)
    model.get_base_model().model.layers[1].register_forward_hook(lambda _m, _i, out: out * 1.5)
    assert_equal(model)


def test_weights_that_layers_share_are_exact() -> None:
    model = built(CustomModel)
    layers = model.get_base_model().model.layers
    layers[2].mlp = layers[0].mlp
    layers[3].mlp.weight = layers[1].mlp.weight
    assert_equal(model)


# ------------------------------------------------------------------ modules with several places


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["norm", "embed_tokens"])
def test_a_module_of_a_layer_and_of_the_model_is_not_streamed(name: str) -> None:
    model = built(CustomModel)
    body = model.get_base_model().model
    for layer in body.layers:
        layer.borrowed = getattr(body, name)
    assert_equal(model)


def test_a_module_of_a_layer_that_the_tail_reads_in_secret_is_refused() -> None:
    class Secret(CustomModel):
        def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            return vars(self)["secret"](hidden) if "secret" in vars(self) else hidden

    model = built(Secret)
    base = model.get_base_model()
    vars(base)["secret"] = base.model.layers[1].mlp
    assert_refused(model, "reads weights of layer 1")
