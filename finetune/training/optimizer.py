"""The update of a step: learning rate, optimizer, clipping."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from finetune.recipe.sections import TrainSection
from finetune.run.checkpoint import Restored, Resumable, Saved
from finetune.training.ranks import Ranks
from offload.engine.internals import bare
from offload.engine.passes.part import Reducer
from offload.plan.facts.optimizer import OPTIMIZERS
from offload.plan.schedule.schedule import Reduced

# ---------------------------------------------------------------------------------------------
# Weights of an adapter held in bf16, which are rounded at random after each update.
#
# Problem. A step at a usual learning rate is less than half of a bf16 weight's last digit, so
# rounding to nearest would undo it, step after step.
#
# Idea. The update is computed in fp32, on copies that exist only meanwhile. Each result is rounded
# to one of the two bf16 numbers around it, the nearer the likelier: its mean is the result itself,
# so small steps add up. Of an fp32 number bf16 keeps the upper 16 bits; a random number of 16 bits
# is added to the lower ones, and what it carries over is the rounding.
#
# Random numbers depend on the recipe's seed, the number of the update and the tensor's name alone.
# So all ranks round alike, and so does a resumed run, whose checkpoint has the seed and the number.
#
# Source: arXiv:2010.06192.

LOW_BITS = 16
_KEPT = -(1 << LOW_BITS)  # as a mask
_STATE = "rounding"


def round_at_random(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return fp32 numbers rounded up or down to bf16, each with a mean of itself.

    What bf16 has stays as it is, and so do infinities and NaN.
    """
    bits = torch.randint(
        1 << LOW_BITS, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    bits.add_(x.view(torch.int32)).bitwise_and_(_KEPT)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()


class RoundedWeights:
    """Tensors in bf16, and what an optimizer updates in their place.

    Attributes:
        held: The tensors, by name.
        copies: Their fp32 copies, which have gradients but no values outside of `updated`.
        num_updates: The number of updates so far.
        seed: What random numbers depend on, in addition to that and the tensors' names.
    """

    def __init__(self, held: Mapping[str, nn.Parameter], *, seed: int) -> None:
        """Take tensors in bf16, on the device that computes; none may be a view of another."""
        self.held = dict(held)
        self.copies: dict[str, nn.Parameter] = {}
        self.num_updates = 0
        self.seed = seed
        for name, tensor in held.items():
            self.copies[name] = nn.Parameter(torch.empty_like(tensor, dtype=torch.float32))
            _empty(self.copies[name])

    @contextmanager
    def updated(self) -> Iterator[None]:
        """Give the copies the tensors' values in a context, and round what they are after it."""
        for name, copy in self.copies.items():
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            bare(copy).copy_(self.held[name])
        yield
        for name, copy in self.copies.items():
            generator = torch.Generator(copy.device).manual_seed(self._seed_of(name))
            bare(self.held[name]).copy_(round_at_random(bare(copy), generator))
            _empty(copy)
        self.num_updates += 1

    def _seed_of(self, name: str) -> int:
        text = f"{self.seed} {self.num_updates} {name}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # torch's generators take 63 bits


class RoundedOptimizer:
    """An optimizer of such copies as a checkpoint has it: with what their rounding depends on."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: RoundedWeights) -> None:
        """Take both."""
        self._optimizer, self._weights = optimizer, weights

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's states and settings, and those of the rounding."""
        weights = {"seed": self._weights.seed, "num_updates": self._weights.num_updates}
        return {**self._optimizer.state_dict(), _STATE: weights}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Take what `state_dict` returned."""
        self._optimizer.load_state_dict({k: v for k, v in content.items() if k != _STATE})
        state = content[_STATE]
        self._weights.seed, self._weights.num_updates = state["seed"], state["num_updates"]


def _empty(tensor: torch.Tensor) -> None:
    """Free a tensor's memory; its shape stays."""
    tensor.untyped_storage().resize_(0)


_SENT = {"fp32": torch.float32, "bf16": torch.bfloat16}

CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def learning_rate(step: int, train: TrainSection, *, num_steps: int) -> float:
    """Return the learning rate of a step, counted from 0; pure, so a resume needs no state.

    It rises linearly from 0, is at its peak in the step after the warm-up, and would be 0 in the
    step after the last. Equal to the last bit to transformers' `get_scheduler`.
    """
    warmup_steps = train.num_warmup_steps(num_steps)
    if step < warmup_steps:
        return train.lr * (step / warmup_steps)
    if train.schedule == "constant":
        return train.lr
    num_falling = num_steps - warmup_steps
    if train.schedule == "linear":
        return train.lr * ((num_steps - step) / num_falling)
    progress = (step - warmup_steps) / num_falling
    if train.schedule == "cosine_with_restarts":
        assert train.num_cycles is not None, "a rule of recipes"
        progress = (train.num_cycles * progress) % 1.0
    return train.lr * (0.5 * (1 + math.cos(math.pi * progress)))


def rates_since(before: TrainSection, after: TrainSection, *, first_step: int) -> str:
    """Describe from which step on a run that was made longer has another learning rate.

    Args:
        before: The settings that the run was begun with, with `train.steps`.
        after: With more of them.
        first_step: The number of steps that are done.
    """
    old, new = before.steps, after.steps
    assert old is not None
    assert new is not None
    rates = (
        (learning_rate(step, before, num_steps=old), learning_rate(step, after, num_steps=new))
        for step in range(old)
    )
    differs = next((number for number, (a, b) in enumerate(rates, 1) if a != b), None)
    said = f"train.steps: {old} -> {new}"
    if differs is None:
        return f"{said}; the learning rate of the first {old} steps is the same"
    said += f"; with {new} steps the learning rate differs from step {differs} on"
    if differs <= first_step:
        said += f": steps {differs} to {first_step} were run at that of {old} steps"
    return said


class Update(Protocol):
    """How a step changes what trains: of an adapter, or of the model itself."""

    @property
    def copies(self) -> Mapping[str, torch.Tensor]:
        """What trains that ranks have a copy of each, as of the newest step: it could drift apart.

        All ranks ask for it.
        """

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What is updated, as of the newest step, by name: with `optimizer` a resume needs it."""

    @property
    def optimizer(self) -> Resumable:
        """The optimizer, or what else a resume needs."""

    @property
    def reducer(self) -> Reducer | None:
        """What adds up the gradients of several ranks while a step runs."""

    def gather(self, loss: float, *, loss_scale: float) -> tuple[float, float]:
        """Return the loss and the norm of the gradients, over all ranks, before clipping.

        Args:
            loss: The loss of this rank.
            loss_scale: Factor of its gradients, by which they are divided.
        """

    def apply(self, *, lr: float) -> None:
        """Clip the gradients, update the weights with them, and let go of them."""

    def without_gradient(self) -> tuple[str, ...]:
        """Return the names of an adapter's tensors that the step gave no gradient."""

    def skip(self) -> str | None:
        """Let go of the gradients; return the last tensor of which one is not finite, by name."""

    def publish(self) -> None:
        """Let the model compute with weights that were changed from outside."""

    def saved(self) -> Saved:
        """Return what a checkpoint is made of; all ranks call it, and the main one writes."""

    def restore(self, restored: Restored) -> None:
        """Take what a checkpoint holds; all ranks ask for its tensors in the same order."""

    def rehearsal(self) -> Callable[[], None]:
        """Return a function that undoes all steps, at a learning rate of 0, from here on."""


class GradientSums:
    """Adds up the gradients of what trains, in ops of the network lane."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        *,
        layers: Sequence[Collection[str]],
        train: TrainSection,
        ranks: Ranks,
    ) -> None:
        """Share out the weights among the ops.

        Args:
            weights: The tensors that the optimizer updates, by name.
            layers: The names of those that each layer has alone.
            train: The settings by which they are added up.
            ranks: The processes that share each step.
        """
        self._dtype, self._ranks = _SENT[train.reduce_dtype], ranks
        own = [set(names) for names in layers]
        self._layers = [[weights[name] for name in weights if name in names] for names in own]
        alone = {name for names in own for name in names}
        self._rest = [weight for name, weight in weights.items() if name not in alone]

    @property
    def reduced(self) -> Reduced:
        """What is sent of each layer, and of all else."""
        return Reduced.of(
            tuple(map(_num_elements, self._layers)),
            _num_elements(self._rest),
            element_bytes=self._dtype.itemsize,
            world_size=self._ranks.num,
        )

    def reduce(self, layer: int | None) -> None:
        """Replace gradients by their sums; waits for the other ranks."""
        weights = self._rest if layer is None else self._layers[layer]
        self._ranks.sum_gradients(weights, dtype=self._dtype)


def _num_elements(weights: Sequence[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights)


class AdapterUpdate:
    """The update of tensors that are on the device that computes: an adapter's."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        *,
        train: TrainSection,
        loraplus_ratio: float | None,
        ranks: Ranks,
        are_cards_alike: bool = True,
        layers: Sequence[Collection[str]] = (),
        rounded: Collection[str] = (),
    ) -> None:
        """Make a fresh optimizer.

        Args:
            trained: Name -> trainable tensor of the model.
            train: Settings of training.
            loraplus_ratio: Learning rate of B matrices, as a multiple of the usual; None for 1.
            ranks: The processes that share each step.
            are_cards_alike: Whether all of them compute the same bits; otherwise all take the
                main rank's update.
            layers: The names of the tensors that each layer has alone.
            rounded: The names of those in bf16 that have no master, but are rounded at random.
        """
        kept = {name: tensor for name, tensor in trained.items() if name in rounded}
        self._rounded = RoundedWeights(kept, seed=train.seed)
        self._masters = MasterWeights(trained, copies=self._rounded.copies)
        self._parameters = list(self._masters.weights.values())
        self._train, self._loraplus_ratio, self._ranks = train, loraplus_ratio, ranks
        self._are_cards_alike = are_cards_alike
        self._optimizer = self._make_optimizer()
        self._sums = GradientSums(self._masters.weights, layers=layers, train=train, ranks=ranks)

    @property
    def copies(self) -> Mapping[str, torch.Tensor]:
        """All of it."""
        return self.weights

    @property
    def reducer(self) -> Reducer | None:
        """What adds up the masters' gradients."""
        return self._sums if self._ranks.num > 1 else None

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The masters, by name, and the tensors without one."""
        return self._masters.weights | self._rounded.held

    @property
    def optimizer(self) -> Resumable:
        """The optimizer."""
        if not self._rounded.held:
            return self._optimizer
        return RoundedOptimizer(self._optimizer, self._rounded)

    def gather(self, loss: float, *, loss_scale: float) -> tuple[float, float]:
        """Add up the ranks' losses, and scale the gradients to the largest norm allowed."""
        loss = self._ranks.sum_losses(loss)
        limit = self._train.max_grad_norm
        norm = float(clip(self._parameters, limit, loss_scale=loss_scale))
        return loss, norm if self._are_cards_alike else self._ranks.exchange(norm)[0]

    def apply(self, *, lr: float) -> None:
        """Update the masters, and round them into what computes."""
        with self._rounded.updated():
            update(self._optimizer, self._parameters, lr=lr, loraplus_ratio=self._loraplus_ratio)
            if not self._are_cards_alike:
                self._ranks.send_from_main([bare(weight) for weight in self._parameters])
        self.publish()

    def without_gradient(self) -> tuple[str, ...]:
        """Return the names of tensors that the step gave no gradient, not even one of zeros."""
        return tuple(name for name, weight in self._masters.weights.items() if weight.grad is None)

    def skip(self) -> str | None:
        """See `Update`; the last one is the first that the backward came to."""
        found = None
        for name, parameter in self._masters.weights.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                found = name
            parameter.grad = None
        return found

    def publish(self) -> None:
        """Round the masters into what computes."""
        self._masters.publish()

    def saved(self) -> Saved:
        """Return the masters and their states."""
        return Saved(weights=self.weights, optimizer=self.optimizer)

    def restore(self, restored: Restored) -> None:
        """Take masters and states, and round the masters into what computes."""
        restored.put_into(self.weights, self.optimizer)
        self.publish()

    def rehearsal(self) -> Callable[[], None]:
        """Keep the masters; undoing makes a fresh optimizer."""
        before = {name: weight.detach().cpu().clone() for name, weight in self.weights.items()}

        def undo() -> None:
            with torch.no_grad():
                for name, weight in self.weights.items():
                    weight.copy_(before[name])
            self.publish()
            self._rounded.num_updates = 0
            self._optimizer = self._make_optimizer()

        return undo

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(
            self._masters.weights,
            name=self._train.optimizer,
            lr=self._train.lr,
            weight_decay=self._train.weight_decay,
            loraplus_ratio=self._loraplus_ratio,
        )


class MasterWeights:
    """What the optimizer updates: the trained tensors, with an fp32 master copy of 16-bit ones.

    An update at a small learning rate is less than half of a 16-bit weight's last digit, and so is
    a single gradient next to the sum of many: both would be rounded away. So a 16-bit tensor is
    used only for computing. Each new gradient is added to that of its master as soon as it exists;
    after an update the master is rounded into the tensor.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        *,
        copies: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """Make the copies; trained tensors must already be on the device that computes.

        Args:
            trained: Name -> tensor, of the model.
            copies: Of some of them, what is updated in their place and rounded elsewhere.
        """
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.weights: dict[str, nn.Parameter] = {}
        for name, parameter in trained.items():
            self.weights[name] = parameter
            if name in copies:
                self.weights[name] = copies[name]
                parameter.register_post_accumulate_grad_hook(_HandOver(copies[name]))
            elif parameter.dtype in (torch.bfloat16, torch.float16):
                master = nn.Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(_HandOver(master))
                self._copies.append((parameter, master))
                self.weights[name] = master

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the tensors used for computing."""
        for parameter, master in self._copies:
            parameter.copy_(master)


class _HandOver:
    """Adds each gradient to the master's, and clears it on the tensor used for computing."""

    takes_partial_gradients = True

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if self._master.grad is None:
            self._master.grad = parameter.grad.float()
        else:
            self._master.grad += parameter.grad
        parameter.grad = None


def make_optimizer(
    weights: Mapping[str, nn.Parameter],
    *,
    name: str,
    lr: float,
    weight_decay: float,
    loraplus_ratio: float | None,
) -> torch.optim.Optimizer:
    """Return the optimizer of what trains; with LoRA+ the B matrices are a group of their own.

    Tensors of one dimension do not decay: norms and biases as in transformers' Trainer, and DoRA's
    magnitudes, for which 0 is no neutral value either.

    Source: arXiv:2402.12354 section 4: B learns faster than A, all else at the rate of A. (peft
    0.21's `create_loraplus_optimizer` takes tensors of one dimension with B. Here these are norms
    and DoRA's magnitudes, of which the paper says nothing, so they keep the rate that was set.)
    """
    b_matrices = {n for n in weights if is_b_matrix(n)} if loraplus_ratio is not None else set()
    undecayed = {n for n, weight in weights.items() if weight.dim() < 2 and weight_decay > 0}
    others = weights.keys() - b_matrices - undecayed
    groups: list[dict[str, Any]] = [  # see `update`: B is the second, if there is a ratio
        {"params": [weight for n, weight in weights.items() if n in names]}
        for names in (others, b_matrices, undecayed)
    ]
    groups[-1]["weight_decay"] = 0.0
    groups = [group for group in groups if group["params"]]
    found = OPTIMIZERS[name]
    assert found.made_by is not None, "a rule of recipes"
    kind: type[torch.optim.Optimizer] = resolve_name(found.made_by)
    return kind(groups, lr=lr, weight_decay=weight_decay, **found.options)  # type: ignore[call-arg]


def is_b_matrix(name: str) -> bool:
    """Return whether a tensor is LoRA's B, which starts at zero, by its name."""
    return ".lora_B." in name or ".lora_embedding_B." in name


def clip(
    parameters: Sequence[nn.Parameter], max_norm: float | None, *, loss_scale: float = 1.0
) -> torch.Tensor:
    """Scale all gradients to a joint norm of at most `max_norm`; return the norm before.

    Gradients of a loss that was scaled are divided by that in the same pass; the norm returned is
    that of the loss itself. Where it is not finite they stay as they are.
    """
    max_norm = math.inf if max_norm is None else max_norm
    if loss_scale == 1:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients) / loss_scale
    if bool(torch.isfinite(norm)):
        factor = (max_norm / (norm + CLIP_EPS)).clamp(max=1.0) / loss_scale
        torch._foreach_mul_(gradients, factor)
    return norm


def update(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    loraplus_ratio: float | None,
) -> None:
    """Update the parameters at this learning rate, B at its multiple, and clear their gradients."""
    ratios = (1.0, 1.0 if loraplus_ratio is None else loraplus_ratio, 1.0)
    for group, ratio in zip(optimizer.param_groups, ratios, strict=False):
        group["lr"] = lr * ratio
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
