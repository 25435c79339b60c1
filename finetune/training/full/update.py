"""The update of a model whose own weights train: a layer at its next load, around it at once."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import nn

from finetune.full.host_optimizer import HostOptimizer, fresh_states, total_norm
from finetune.full.state_layout import StateLayout
from finetune.full.update_rules import States
from finetune.recipe.sections import TrainSection
from finetune.run.checkpoint import Restored, Saved
from finetune.training.full.owners import Owners
from finetune.training.full.sums import RowGradients, WeightSums
from finetune.training.ranks import Ranks
from finetune.training.world.gradient_sums import DTYPES
from offload.engine.engine import Engine
from offload.engine.host.embedding import RowSums
from offload.engine.passes.head_gradient import HeadGradient
from offload.plan.owners import owned_around
from offload.plan.schedule.reduced import Reduced

_WEIGHT = "weight"  # among the states of a weight around the layers, in memory of all ranks
CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class FullUpdate:
    """The update of the layers and of what is around them.

    Layers are updated in the next step, on the host before their load.
    Embeddings, norm and head are on the device for the whole run and needed first, so they are
    updated at once, on the host: their gradients, in fp32, come there, and new weights go back. Of
    an embedding on the host gradients have come there row by row, and of a head there at the end of
    a step's tails; nothing goes back.

    Of several ranks each updates its own layers for all of its machine, and its own weights around
    them, which the others wait for at once: see `finetune.training.full.owners`. An embedding on
    the host is in memory of all of them, and the sums of its gradients are with its owner.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        train: TrainSection,
        ranks: Ranks,
    ) -> None:
        """Make fresh states.

        Args:
            engine: Of the model, with trained weights on the host.
            train: Settings of training.
            ranks: The processes that share each step.

        Raises:
            FinetuneError: There are several ranks on this machine, which can share no memory.
        """
        self._engine, self._max_norm, self._ranks = engine, train.max_grad_norm, ranks
        trained = engine.trained_parameters
        self._layer_of = engine.updates.layer_of
        self._layers = {name: trained[name] for name in self._layer_of}
        assert engine.head_gradient is None or ranks.num == 1, "a rule of ranks"
        self._around = {  # in one order wherever they are: the norms are added up in it
            name: _around(parameter, engine)
            for name, parameter in trained.items()
            if name not in self._layer_of
        }
        self._layouts: list[StateLayout] = []
        self._owners: Owners | None = None
        self._own_around = dict.fromkeys(self._around, True)
        self._num_applied = 0  # with those of the rehearsal
        states: dict[str, States] = {}
        if ranks.num > 1:
            assert engine.updates.owned is not None, "as it was attached"
            cpu = f"{torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"
            ranks.require_same("torch's threads and CPU code, by which updates round,", lambda: cpu)
            self._layouts = self._laid_out(train)
            states |= self._share(train, engine.updates.owned)
        on_host = {name: master.detach() for name, master in self._layers.items()}
        on_host |= {name: one.on_host for name, one in self._around.items()}
        self._optimizer = HostOptimizer(
            on_host,
            name=train.optimizer,
            weight_decay=train.weight_decay,
            states=states,
        )
        self._scale = 1.0
        self._norms: dict[str, torch.Tensor] = {}
        self._sums = self._make_sums(DTYPES[train.reduce_dtype])

    def _make_sums(self, dtype: torch.dtype) -> WeightSums | None:
        if self._ranks.num == 1:
            return None
        numbers = [0] * len(self._engine.layer_bytes)
        for name, layer in self._layer_of.items():
            numbers[layer] += self._layers[name].numel()
        return WeightSums(
            self._engine.updates,
            lambda: [one.gradient for one in self._on_device],
            reduced=Reduced.of(
                tuple(numbers),
                sum(one.on_host.numel() for one in self._on_device),
                element_bytes=dtype.itemsize,
                num_ranks=self._ranks.num,
            ),
            dtype=dtype,
            ranks=self._ranks,
        )

    @property
    def _on_device(self) -> "list[_Around]":
        """The weights around the layers that compute on the device."""
        return [one for one in self._around.values() if isinstance(one, _Around)]

    def _share(self, train: TrainSection, owned: frozenset[int]) -> dict[str, States]:
        """Return states in memory of all ranks of this machine; weights around layers go there."""
        ranks, first, outer = self._ranks, len(self._layouts), list[StateLayout]()
        with torch.device("meta"):
            for name, one in self._around.items():
                kept = fresh_states(train.optimizer, one.on_host)
                if isinstance(one, _Around):
                    kept = {_WEIGHT: torch.empty_like(one.on_host, device="meta")} | kept
                outer.append(StateLayout.of({name: kept}))
        here = ranks.nodes.count(ranks.nodes[ranks.index])
        sizes = [one.on_host.numel() for one in self._around.values()]
        own = owned_around(ranks.local_index, sizes, num_ranks=here)
        self._own_around = {name: i in own for i, name in enumerate(self._around)}
        layouts = (*self._layouts, *outer)
        self._owners = Owners(
            owned | {first + number for number in own},
            state_bytes=[layout.num_bytes for layout in layouts],
            names=[*(f"layer {number}" for number in range(first)), *self._around],
            ranks=ranks,
        )
        self._engine.updates.share_with(self._owners)
        states: dict[str, States] = {}
        for layout, memory in zip(layouts, self._owners.states, strict=True):
            states |= layout.views(memory)
        for number, (name, one) in enumerate(self._around.items(), first):
            if isinstance(one, _InRows):
                one.share(
                    self._owners.of(number),
                    is_own=self._own_around[name],
                    dtype=DTYPES[train.reduce_dtype],
                    ranks=ranks,
                )
                continue
            assert isinstance(one, _Around), "a rule of ranks"
            of_states = dict(states[name])
            one.move(of_states.pop(_WEIGHT))
            states[name] = of_states
        ranks.exchange(None)  # all have filled it
        return states

    def _laid_out(self, train: TrainSection) -> list[StateLayout]:
        """Return where states of each layer's weights lie, in memory of all ranks."""
        layers: list[dict[str, States]] = [{} for _ in self._engine.layer_bytes]
        with torch.device("meta"):
            for name, layer in self._layer_of.items():
                layers[layer][name] = fresh_states(train.optimizer, self._layers[name])
        return [StateLayout.of(states) for states in layers]

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
        """On several machines the weights that this rank updates: each machine has a copy."""
        weights = self.weights
        if self._ranks.num_machines == 1:
            return {}
        own = [name for name, layer in self._layer_of.items() if self._is_owned(layer)]
        own += [name for name, is_own in self._own_around.items() if is_own]
        return {name: weights[name] for name in own}

    @property
    def reducer(self) -> WeightSums | None:
        """What adds up gradients before they leave for the owners of their layers."""
        return self._sums

    def gather(self, loss: float, *, loss_scale: float) -> tuple[float, float]:
        """Return the loss, and the norm of all gradients, by which they will be scaled."""
        loss = self._ranks.sum_losses(loss)
        self._norms = self._gathered_norms()
        norm = total_norm([*self._norms.values()]) / loss_scale
        self._scale = 1.0
        if self._max_norm is not None:
            limit = torch.tensor(self._max_norm) / (torch.tensor(norm) + CLIP_EPS)
            self._scale = float(limit.clamp(max=1.0))
        self._scale /= loss_scale
        return loss, norm

    def _gathered_norms(self) -> dict[str, torch.Tensor]:
        """Return the norm of each gradient by name: of a layer's, and of rows, from an owner's.

        All ranks get the same, those of the first that has them.
        """
        norms = {**self._engine.updates.norms}
        norms |= {name: one.norm() for name, one in self._around.items() if self._has(name)}
        if self._ranks.num == 1:
            return norms
        own = {name: float(norm) for name, norm in norms.items()}
        merged: dict[str, float] = {}
        for one in reversed(self._ranks.exchange(own, is_step=True)):
            merged |= one
        return {name: torch.tensor(merged[name]) for name in (*self._layer_of, *self._around)}

    def _has(self, name: str) -> bool:
        """Return whether this rank has the gradient by a weight around the layers."""
        return self._own_around[name] or isinstance(self._around[name], _Around)

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
        own = [name for name, is_own in self._own_around.items() if is_own]
        update({name: self._around[name].taken() for name in own})
        self._await_around()
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

    def _await_around(self) -> None:
        """Wait until the other ranks of this machine have updated their weights around layers."""
        self._num_applied += 1
        if self._owners is None:
            return
        numbered = list(enumerate(self._own_around.items(), len(self._layouts)))
        for number, (_, is_own) in numbered:
            if is_own:
                self._owners.note_updated(number, self._num_applied)
        for number, (name, is_own) in numbered:
            if not is_own:
                self._around[name].let_go()
                self._owners.await_updated(number, self._num_applied)

    def _let_go_of_layers(self) -> None:
        for name, master in self._layers.items():
            assert (master.grad is not None) == self._is_owned(self._layer_of[name])
            master.grad = None

    def publish(self) -> None:
        """Let the model compute with weights that were changed from outside: layers do anyway."""
        self._publish_around()

    def saved(self) -> Saved:
        """Return weights, low halves of masters and states, as of the newest step.

        Layers are in memory that all ranks of a machine have.
        """
        return Saved(weights=self.weights, optimizer=self._optimizer)

    @property
    def of_main_alone(self) -> Collection[str]:
        """All, if the main rank has this memory in common with all others."""
        return () if self._ranks.num_machines > 1 else frozenset(self._optimizer.tensors)

    @torch.no_grad()
    def restore(self, restored: Restored) -> None:
        """Take them, on the first rank of each machine for all of it."""
        is_first_here, alone = self._ranks.is_first_here, self.of_main_alone
        for name, target in self.weights.items():
            if is_first_here or name not in alone:
                value = restored.tensors[name]  # which all ranks ask for
                if is_first_here:
                    target.copy_(value)
        self._optimizer.load_state_dict(restored.optimizer)
        self._publish_around()

    def _is_owned(self, layer: int) -> bool:
        owned = self._engine.updates.owned
        return owned is None or layer in owned

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

    def move(self, memory: torch.Tensor) -> None:
        """Let the weight on the host be in other memory, of its shape and type."""
        self.on_host = memory.copy_(self.on_host)

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


def _around(parameter: nn.Parameter, engine: Engine) -> "_Around | _InRows | _InHead":
    """Return a weight around the layers as it is updated."""
    gradient = engine.head_gradient
    if gradient is not None and parameter is gradient.weight:
        return _InHead(gradient)
    sums = engine.row_sums if parameter is engine.row_weight else None
    if sums is None:
        return _Around(parameter)
    return _InRows(parameter, sums, is_cpu=engine.computes_on.type == "cpu")


class _InRows:
    """The input embedding on the host: gradients by its rows were added up there, in fp32."""

    def __init__(self, parameter: nn.Parameter, sums: RowSums, *, is_cpu: bool) -> None:
        sums.keep_in_fp32()
        self._parameter, self._sums, self._is_cpu = parameter, sums, is_cpu
        self.on_host = parameter.detach()

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the newest step, with zeros where no token was."""
        return self._sums.total

    def share(
        self, owners: Collection[int], *, is_own: bool, dtype: torch.dtype, ranks: Ranks
    ) -> None:
        """Add up with other ranks from here on, where one of the owners updates the weight."""
        others = RowGradients(self.on_host.shape[1], to=owners, dtype=dtype, ranks=ranks)
        self._sums.share_with(others, is_own=is_own)

    def norm(self) -> torch.Tensor:
        """Return the gradient's norm, as exact as that of the device on which the model computes.

        On a CPU torch adds up all squares in fp32, one after the other, and the norm of 150 million
        numbers is off by 2 %; a GPU adds them up in a tree. So a CPU that updates for a GPU takes
        the norm of each row, and of all of these in fp64.
        """
        norm: torch.Tensor
        if self._is_cpu:  # to the bit as with the embedding on the device
            norm = torch.linalg.vector_norm(self.gradient)
        else:
            rows_V = torch.linalg.vector_norm(self.gradient, dim=1)
            norm = torch.linalg.vector_norm(rows_V.double()).float()
        return norm

    def taken(self) -> torch.Tensor:
        """Return the gradient, which stays until the next step."""
        self.let_go()
        return self.gradient

    def let_go(self) -> None:
        """Let the next step add up anew."""
        self._parameter.grad = None

    def publish(self) -> None:
        """Nothing is to be copied: it is looked up where it is updated."""


class _InHead:
    """The output head on the host: its gradient was added up on the device, and has come there."""

    def __init__(self, gradient: HeadGradient) -> None:
        assert gradient.total.dtype is torch.float32, "as it was attached"
        self._gradient, self.on_host = gradient, gradient.weight.detach()

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the newest step."""
        return self._gradient.total

    def norm(self) -> torch.Tensor:
        """Return the gradient's norm, which was computed before it left the device."""
        assert self._gradient.norm is not None
        return self._gradient.norm

    def taken(self) -> torch.Tensor:
        """Return the gradient, which stays until the next step."""
        self.let_go()
        return self.gradient

    def let_go(self) -> None:
        """Let the next step add up anew."""
        self._gradient.weight.grad = None

    def publish(self) -> None:
        """Nothing is to be copied: a step copies it from where it is updated."""


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
