"""The update of a model that is cut among the ranks: each rank updates its own part.

Optimizers that treat each element by itself make of the parts what they make of the whole. A
checkpoint holds whole tensors, in the form of a run whose layers are streamed, so that either opens
it: they are gathered one by one, and only the main rank keeps them.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune.full.optimizer import LOW, joined, split_into
from finetune.recipe.sections import TrainSection
from finetune.run.checkpoint import Restored, Resumable, Saved
from finetune.training.optimizer import clip, make_optimizer, update
from finetune.training.ranks import Ranks
from offload.plan.facts.optimizer import OPTIMIZERS


@dataclass(frozen=True, slots=True)
class Whole:
    """An optimizer's states in one piece."""

    content: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return them with the settings."""
        return self.content

    def load_state_dict(self, content: dict[str, Any], /) -> None:
        """Take no others: they are in parts."""
        raise AssertionError("`ShardedUpdate.restore` takes a rank's part")


class ShardedUpdate:
    """The update of tensors of which each rank has a part: an adapter's."""

    @property
    def copies(self) -> Mapping[str, torch.Tensor]:
        """Nothing: each rank has a part of its own."""
        return {}

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        *,
        train: TrainSection,
        loraplus_ratio: float | None,
        ranks: Ranks,
    ) -> None:
        """Make a fresh optimizer.

        Args:
            trained: Name -> trainable tensor of the model, in fp32, each rank's part of it.
            train: Settings of training.
            loraplus_ratio: Learning rate of B matrices, as a multiple of the usual; None for 1.
            ranks: The processes that share the model.
        """
        self._trained, self._train, self._ranks = dict(trained), train, ranks
        self._loraplus_ratio = loraplus_ratio
        self._optimizer = self._make_optimizer()

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What trains, by name: each has the whole tensor's shape, and this rank's part of it."""
        return self._trained

    @property
    def optimizer(self) -> Resumable:
        """The optimizer, of this rank's parts."""
        return self._optimizer

    @property
    def reducer(self) -> None:
        """Gradients are added up by what gathers the layers."""
        return None

    def gather(self, loss: float, *, loss_scale: float) -> tuple[float, float]:
        """Add up the ranks' losses, and scale the gradients to the largest norm allowed."""
        assert loss_scale == 1, "a rule of recipes"
        loss = self._ranks.sum_losses(loss)
        with self._ranks.in_collectives(is_step=True):
            norm = clip_parts(list(self._trained.values()), self._train.max_grad_norm)
        return loss, norm

    def apply(self, *, lr: float) -> None:
        """Update this rank's part."""
        parameters = self._trained.values()
        update(self._optimizer, parameters, lr=lr, loraplus_ratio=self._loraplus_ratio)

    def without_gradient(self) -> tuple[str, ...]:
        """Nothing: it is for adapters, which may be on a weight that no product uses."""
        return ()

    def skip(self) -> str | None:
        """See `Update`."""
        raise AssertionError("a rule of recipes: no gradient is scaled")

    def publish(self) -> None:
        """Let the model compute with changed weights: the parts are its own."""

    def states(self) -> list[torch.Tensor]:
        """Return this rank's part of the optimizer's states."""
        return [
            own_part(value)
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]

    def saved(self) -> Saved:
        """Return whole tensors and states on the main rank, and none on others; all call it."""
        with self._ranks.in_collectives(is_step=False):
            content = self._optimizer.state_dict()
            whole = {name: self._whole(tensor) for name, tensor in self._trained.items()}
            states = {
                number: {key: self._whole(value) for key, value in state.items()}
                for number, state in content["state"].items()
            }
        optimizer = Whole({"state": states, "param_groups": content["param_groups"]})
        return Saved(weights=whole if self._ranks.is_main else {}, optimizer=optimizer)

    def restore(self, restored: Restored) -> None:
        """Take this rank's part of what a checkpoint holds."""
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(part_of(restored.tensors[name], like=parameter))
        numbered = _numbered(self._optimizer)
        states = {
            number: {
                key: part_of(value, like=numbered[number])
                if isinstance(value, torch.Tensor) and value.shape == numbered[number].shape
                else value
                for key, value in state.items()
            }
            for number, state in restored.optimizer["state"].items()
        }
        self._optimizer.load_state_dict({**restored.optimizer, "state": states})

    def rehearsal(self) -> Callable[[], None]:
        """Keep the parts; undoing makes a fresh optimizer."""
        before = [own_part(parameter).clone() for parameter in self._trained.values()]

        def undo() -> None:
            with torch.no_grad():
                for parameter, value in zip(self._trained.values(), before, strict=True):
                    own_part(parameter).copy_(value)
            self._optimizer = self._make_optimizer()

        return undo

    def _whole(self, value: Any) -> Any:
        return whole_of(value, is_main=self._ranks.is_main)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(
            self._trained,
            name=self._train.optimizer,
            lr=self._train.lr,
            weight_decay=self._train.weight_decay,
            loraplus_ratio=self._loraplus_ratio,
        )


class ShardedFullUpdate(ShardedUpdate):
    """The update of a model's own weights: fp32 masters, of which each rank has a part.

    A checkpoint is that of `finetune.full`: a weight that computes in bf16, and the low half of its
    master; of AdamW two moments.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        *,
        train: TrainSection,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        """Make a fresh optimizer.

        Args:
            trained: Name -> weight of the model that trains, in fp32, each rank's part of it.
            train: Settings of training.
            dtype: The type that the weights compute in.
            ranks: The processes that share the model.
        """
        super().__init__(trained, train=train, loraplus_ratio=None, ranks=ranks)
        self._dtype = dtype
        self._rule = OPTIMIZERS[train.optimizer]
        self._moments = self._rule.moments or {}
        self._num_updates = 0

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The form of what a checkpoint holds, by name: tensors without values."""
        with torch.device("meta"):
            empty = {name: torch.empty(p.shape) for name, p in self._trained.items()}
            return self._named(empty, lambda name, state: torch.empty(empty[name].shape))

    @property
    def optimizer(self) -> Whole:
        """The number of updates and the settings, as of a model that is streamed."""
        return Whole(
            {
                "state": {0: {"step": torch.tensor(float(self._num_updates))}},
                "param_groups": [
                    {
                        "params": [0],
                        **self._rule.settings,
                        "weight_decay": self._train.weight_decay,
                    }
                ],
            }
        )

    def gather(self, loss: float, *, loss_scale: float) -> tuple[float, float]:
        """Add up the losses and clip; a weight that nothing has used has a gradient of zero."""
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().gather(loss, loss_scale=loss_scale)

    def apply(self, *, lr: float) -> None:
        """Update this rank's part."""
        super().apply(lr=lr)
        self._num_updates += 1

    def saved(self) -> Saved:
        """Return weights, low halves of masters and states in one piece, on the main rank."""
        with self._ranks.in_collectives(is_step=False):
            masters = {name: self._whole(p) for name, p in self._trained.items()}
            states = {
                (name, key): self._whole(self._optimizer.state[p][of_torch])
                for name, p in self._trained.items()
                for key, of_torch in self._moments.items()
            }
        if not self._ranks.is_main:
            return Saved(weights={}, optimizer=self.optimizer)
        tensors = self._named(masters, lambda name, key: states[name, key])
        return Saved(weights=tensors, optimizer=self.optimizer)

    def restore(self, restored: Restored) -> None:
        """Take this rank's part of masters and states."""
        tensors = restored.tensors
        self._num_updates = int(restored.optimizer["state"][0]["step"])
        with torch.no_grad():
            for name, parameter in self._trained.items():
                whole = tensors[name]
                if self._dtype is torch.bfloat16:
                    whole = joined(whole, tensors[f"{name}:{LOW}"])
                parameter.copy_(part_of(whole, like=parameter))
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(self._num_updates)),
                    **{
                        of_torch: part_of(tensors[f"{name}:{key}"], like=parameter)
                        for key, of_torch in self._moments.items()
                    },
                }

    def rehearsal(self) -> Callable[[], None]:
        """Undoing forgets the number of updates too."""
        undo = super().rehearsal()

        def undo_all() -> None:
            undo()
            self._num_updates = 0

        return undo_all

    def _named(
        self,
        masters: Mapping[str, torch.Tensor],
        state_of: Callable[[str, str], torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Return a checkpoint's tensors by their names: weights, low halves, states."""
        weights, lows = dict(masters), dict[str, torch.Tensor]()
        if self._dtype is torch.bfloat16:
            for name, master in masters.items():
                weights[name] = torch.empty_like(master, dtype=torch.bfloat16)
                lows[f"{name}:{LOW}"] = torch.empty_like(master, dtype=torch.int16)
                split_into(master, weights[name], lows[f"{name}:{LOW}"])
        states = {f"{name}:{key}": state_of(name, key) for name in masters for key in self._moments}
        return {**weights, **lows, **states}


def clip_parts(parameters: list[nn.Parameter], max_norm: float | None) -> float:
    """Scale all gradients to a joint norm of at most `max_norm`; return the norm before."""
    norm = clip(parameters, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def whole_of(value: Any, *, is_main: bool) -> Any:
    """Return a tensor in one piece, on the host of the main rank; other values as they are."""
    if not isinstance(value, DTensor):
        return copy.copy(value)
    whole = value.full_tensor()
    return whole.detach().cpu() if is_main else None


def part_of(whole: torch.Tensor, *, like: torch.Tensor) -> DTensor:
    """Return this rank's part of a tensor that all ranks have, without a message."""
    assert isinstance(like, DTensor)
    on_device = whole.to(device=like.device, dtype=like.dtype)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part that this rank has, as a plain tensor that shares its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _numbered(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Return parameters by the numbers that a state_dict gives them."""
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
