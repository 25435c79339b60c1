"""The update of a model whose own weights train: a layer at its next load, around it at once."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from finetune.full.optimizer import HostOptimizer, total_norm
from finetune.recipe.sections import TrainSection
from finetune.run.checkpoint import Restored, Saved
from finetune.training.optimizer import CLIP_EPS
from offload.engine.engine import Engine


class FullUpdate:
    """The update of the layers and of what is around them.

    Layers are updated in the next step, on the host before their load.
    Embeddings, norm and head are on the device for the whole run and needed first, so they are
    updated at once, on the host: their gradients, in fp32, come there, and new weights go back.

    One process makes it; weights that several train are sharded, see `finetune.training.sharded`.
    """

    def __init__(self, engine: Engine, *, train: TrainSection) -> None:
        """Make fresh states.

        Args:
            engine: The engine of the model, with trained weights on the host.
            train: Settings of training.
        """
        self._engine, self._max_norm = engine, train.max_grad_norm
        trained = engine.trained_parameters
        self._layer_of = engine.updates.layer_of
        self._layers = {name: trained[name] for name in self._layer_of}
        self._around = {  # in one order wherever they are: the norms are added up in it
            name: _Around(parameter)
            for name, parameter in trained.items()
            if name not in self._layer_of
        }
        on_host = {name: master.detach() for name, master in self._layers.items()}
        on_host |= {name: one.on_host for name, one in self._around.items()}
        self._optimizer = HostOptimizer(
            on_host,
            name=train.optimizer,
            weight_decay=train.weight_decay,
        )
        self._scale = 1.0
        self._norms: dict[str, torch.Tensor] = {}

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Weights, low halves of masters and states as of the newest step, by name."""
        self._engine.updates.flush()
        return self._optimizer.tensors

    @property
    def optimizer(self) -> HostOptimizer:
        """The settings and the number of updates; its states are among the weights."""
        return self._optimizer

    @property
    def copies(self) -> Mapping[str, torch.Tensor]:
        """Nothing: one process has the weights."""
        return {}

    @property
    def reducer(self) -> None:
        """Nothing: one process has the gradients."""
        return

    def gather(self, loss: float, *, loss_scale: float) -> tuple[float, float]:
        """Return the loss, and the norm of all gradients, by which they will be scaled."""
        self._norms = {**self._engine.updates.norms}
        self._norms |= {name: one.norm() for name, one in self._around.items()}
        norm = total_norm([*self._norms.values()]) / loss_scale
        self._scale = 1.0
        if self._max_norm is not None:
            limit = torch.tensor(self._max_norm) / (torch.tensor(norm) + CLIP_EPS)
            self._scale = float(limit.clamp(max=1.0))
        self._scale /= loss_scale
        return loss, norm

    def apply(self, *, lr: float) -> None:
        """Update what is around the layers; the layers follow in the next step."""
        self._engine.updates.flush()
        self._optimizer.num_updates += 1
        update = partial(
            self._optimizer.update,
            num_updates=self._optimizer.num_updates,
            lr=lr,
            scale=self._scale,
        )
        self._let_go_of_layers()
        update({name: one.taken() for name, one in self._around.items()})
        self._publish_around()
        self._engine.updates.defer(lambda one: update(one.gradients))

    def without_gradient(self) -> tuple[str, ...]:
        """Nothing: it is for adapters, which may be on a weight that no product uses."""
        return ()

    def skip(self) -> str | None:
        """See `Update`; the layers' updates of the step before were made in this one."""
        in_order = (*self._around, *reversed(self._layer_of))  # the last layer's are found first
        found = [name for name in in_order if not bool(self._norms[name].isfinite())]
        self._let_go_of_layers()
        for one in self._around.values():
            one.let_go()
        return found[0] if found else None

    def _let_go_of_layers(self) -> None:
        for master in self._layers.values():
            assert master.grad is not None
            master.grad = None

    def publish(self) -> None:
        """Let the model compute with weights that were changed from outside: layers do anyway."""
        self._publish_around()

    def saved(self) -> Saved:
        """Return weights, low halves of masters and states, as of the newest step."""
        return Saved(weights=self.weights, optimizer=self._optimizer)

    @torch.no_grad()
    def restore(self, restored: Restored) -> None:
        """Take them."""
        for name, target in self.weights.items():
            target.copy_(restored.tensors[name])
        self._optimizer.load_state_dict(restored.optimizer)
        self._publish_around()

    def rehearsal(self) -> Callable[[], None]:
        """Undoing forgets the states: an update at a learning rate of 0 changes no weight."""

        def undo() -> None:
            self._engine.updates.flush()
            self._optimizer.forget()

        return undo

    def _publish_around(self) -> None:
        for one in self._around.values():
            one.publish()


class _Around:
    """A weight around the layers: it computes on the device, and is updated on the host.

    Gradients in 16 bits are added up in fp32, as each exists: a single one is small next to the sum
    of many, and would be rounded away.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self.sum: torch.Tensor | None = None
        values = parameter.detach()
        self.on_host = values if values.device.type == "cpu" else values.cpu()
        if parameter.dtype is not torch.float32:
            parameter.register_post_accumulate_grad_hook(_Adder(self))

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the newest step, on the device, in fp32."""
        if self._parameter.dtype is torch.float32:
            self.sum = self._parameter.grad
        assert self.sum is not None
        return self.sum

    def norm(self) -> torch.Tensor:
        """Return the gradient's norm."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.gradient)
        return norm

    def taken(self) -> torch.Tensor:
        """Return the gradient on the host, and let go of it on the device."""
        gradient = self.gradient.cpu()
        self.let_go()
        return gradient

    def let_go(self) -> None:
        """Let go of the gradient."""
        self._parameter.grad = self.sum = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the weight to the device, unless it is there."""
        if self.on_host.data_ptr() != self._parameter.data_ptr():
            self._parameter.copy_(self.on_host)


class _Adder:
    """Adds each gradient to the sum, and clears it."""

    takes_partial_gradients = True

    def __init__(self, around: _Around) -> None:
        self._around = around

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if self._around.sum is None:
            self._around.sum = parameter.grad.float()
        else:
            self._around.sum += parameter.grad
        parameter.grad = None
