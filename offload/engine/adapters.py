"""Adapters of an attached model that come and go.

Attaching settles what trains and what is streamed. What of it an adapter changes is little: a few
tensors on the device in modules that hold adapters already. So a model is attached with one adapter
on all linears that any may have, as the pattern. Others are then added to a part of these modules
and removed from them: no module of the model is ever replaced, and nothing of the base is copied.

What an adapter computes does not depend on which others there are. Its initial values are drawn
from a seed of its own, what a visit switches is its own modules, and what checks find out is kept
by its name and forgotten with it.

Slots. How many adapters there may be, and the largest rank, are declared at the start, so that a
plan can count their memory: of each parameter its value, its gradient, and what the optimizer
keeps.

Shapes: K features in, M features out, R rank.
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.engine.shared import SharedEngine
from offload.errors import OffloadError
from offload.plan.facts.facts import nearest

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_FP32_BYTES, _NUM_STATES = 4, 2  # of AdamW
_PATTERN = "the model is attached with one LoRA adapter on all linears that others may have"

Settle = Callable[[Any], object]
"""Lets adapters be computed as the model's were when it was attached, after some have changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSettings:
    """What of an adapter is its own."""

    rank: int  # R of its matrices
    alpha: float  # its branch has the factor alpha / rank
    targets: frozenset[str]  # last names of the linears that it is on, e.g. "q_proj"


class Adapters:
    """The adapters of an attached model, in slots that were declared."""

    def __init__(
        self,
        engine: SharedEngine,
        *,
        pattern: str,
        max_adapters: int,
        max_rank: int,
        settle: Settle,
    ) -> None:
        """Find the linears that adapters may be on.

        Args:
            engine: Attached to a peft model in evaluation mode.
            pattern: Name of its adapter that is on all of them; no other is active.
            max_adapters: The most adapters at a time, the pattern left out.
            max_rank: The largest rank.
            settle: Called with the model after each change.

        Raises:
            OffloadError: The pattern is something else than LoRA on linears.
        """
        self._engine, self._pattern = engine, pattern
        self._model = engine.model
        self.max_adapters, self.max_rank = max_adapters, max_rank
        self._settle = settle
        self._known: dict[str, AdapterSettings] = {}
        config: Any = self._model.peft_config[pattern]
        base: Any = self._model.get_base_model()
        self._linears: dict[str, Any] = {
            name: module.get_base_layer()
            for name, module in base.named_modules()
            if pattern in getattr(module, "lora_A", ())
        }
        odd = [name for name, one in self._linears.items() if not isinstance(one, nn.Linear)]
        others = [
            name
            for name in ("modules_to_save", "target_parameters", "use_dora", "lora_bias")
            if getattr(config, name, None)
        ]
        if odd or others or not self._linears or list(self._model.active_adapters) != [pattern]:
            found = f"`{others[0]}`" if others else odd[0] if odd else "other active adapters"
            raise OffloadError(
                f"the adapter {pattern!r} has {found}",
                limit=_PATTERN,
                hint="`LoraConfig(r=1, target_modules=[...])` with the last names of linears",
            )
        engine.require_adapters_alone()

    @property
    def targets(self) -> frozenset[str]:
        """Last names of the linears that adapters may be on."""
        return frozenset(name.rpartition(".")[2] for name in self._linears)

    # -------------------------------------------------------------------------------------- memory

    @property
    def slot_bytes(self) -> int:
        """What the largest adapter takes that trains: values, gradients, and AdamW's states."""
        num: int = sum(one.in_features + one.out_features for one in self._linears.values())
        return num * self.max_rank * _FP32_BYTES * (2 + _NUM_STATES)

    @property
    def reserved_bytes(self) -> int:
        """What all slots take at most."""
        return self.max_adapters * self.slot_bytes

    def num_bytes(self, name: str) -> int:
        """Return what an adapter's values take."""
        return sum(parameter.nbytes for parameter in self.parameters(name).values())

    # ---------------------------------------------------------------------------------------- what

    @property
    def names(self) -> tuple[str, ...]:
        """Those that were added, the oldest first."""
        return tuple(self._known)

    def settings(self, name: str) -> AdapterSettings:
        """Return the settings of one that was added.

        Raises:
            OffloadError: There is none of this name.
        """
        if name not in self._known:
            raise OffloadError(
                f"there is no adapter {name!r}",
                limit=f"there are {', '.join(self._known) or 'none'}",
                hint="add it, with `Adapters.add`",
            )
        return self._known[name]

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return an adapter's parameters, by names that do not say whose they are."""
        return {
            ".".join(part for part in path.split(".") if part != name): parameter
            for path, parameter in self._model.named_parameters()
            if name in path.split(".")
        }

    def values(self, name: str) -> dict[str, torch.Tensor]:
        """Return a copy of an adapter's values on the host; this waits for the device."""
        self.settings(name)
        self._engine.wait()
        return {
            path: parameter.detach().to("cpu", copy=True)
            for path, parameter in self.parameters(name).items()
        }

    # -------------------------------------------------------------------------------------- change

    def add(self, name: str, settings: AdapterSettings, *, seed: int) -> None:
        """Add an adapter that trains, which computes nothing yet: A is drawn, and B is zero.

        A has the distribution that peft gives it, from a generator of its own.

        Args:
            name: One that no other has.
            settings: Rank, scale and linears of the adapter.
            seed: The seed of its initial values, which depend on nothing else.

        Raises:
            OffloadError: A name or setting does not fit, or all slots are taken.
        """
        generator = torch.Generator().manual_seed(seed)
        self._add(name, settings, is_trained=True)
        with torch.no_grad():
            for path, parameter in self.parameters(name).items():
                values = torch.zeros(parameter.shape)
                if "lora_A" in path:
                    bound = values.shape[1] ** -0.5  # Kaiming's, as of torch's own linears
                    values.uniform_(-bound, bound, generator=generator)
                parameter.copy_(values)

    def copy(self, source: str, name: str) -> None:
        """Add a frozen adapter with the settings and the values of another, as it is now.

        What is known of the other's computations holds for it too.

        Args:
            source: The other.
            name: One that no other has.

        Raises:
            OffloadError: The name does not fit, or all slots are taken.
        """
        self._add(name, self.settings(source), is_trained=False)
        own = self.parameters(name)
        with torch.no_grad():
            for path, parameter in self.parameters(source).items():
                own[path].copy_(parameter)
        self._engine.know_alike(name, like=source)

    def put(self, name: str, settings: AdapterSettings, values: Mapping[str, torch.Tensor]) -> None:
        """Add a frozen adapter with some values.

        What is known of the computations of one with the same settings holds for it too.

        Args:
            name: One that no other has.
            settings: Rank, scale and linears of the adapter.
            values: Values in the form of `Adapters.values`.

        Raises:
            OffloadError: A name, setting or value does not fit, or all slots are taken.
        """
        like = next((one for one, known in self._known.items() if known == settings), None)
        self._add(name, settings, is_trained=False)
        try:
            self.load(name, values)
        except OffloadError:
            self.remove(name)
            raise
        if like is not None:
            self._engine.know_alike(name, like=like)

    def load(self, name: str, values: Mapping[str, torch.Tensor]) -> None:
        """Give an adapter other values; generations with it end.

        Args:
            name: Its name.
            values: Values in the form of `Adapters.values`, of an adapter with the same settings.

        Raises:
            OffloadError: They are of other settings; nothing was changed.
        """
        self.settings(name)
        own = self.parameters(name)
        odd = sorted(own.keys() ^ values.keys())
        odd += [
            path for path in own.keys() & values.keys() if own[path].shape != values[path].shape
        ]
        if odd:
            raise OffloadError(
                f"values for {name!r} differ from it in {len(odd)} tensors, such as {odd[0]}",
                limit="an adapter has the same tensors before and after",
                hint="add one with the rank and targets of these values",
            )
        with torch.no_grad():
            for path, parameter in own.items():
                parameter.copy_(values[path])

    def remove(self, name: str) -> None:
        """Remove an adapter and let its memory go; generations with it end.

        Args:
            name: Its name.

        Raises:
            OffloadError: There is none of this name, or a pass runs.
        """
        self.settings(name)
        with self._engine.changing(self._settle):
            for parameter in self.parameters(name).values():
                parameter.detach().zero_()  # counted as a write, which ends generations
                parameter.grad = None
            self._model.delete_adapter(name)
        del self._known[name]
        self._engine.forget(name)

    def _add(self, name: str, settings: AdapterSettings, *, is_trained: bool) -> None:
        self._require_room(name, settings)
        config: Any = copy.deepcopy(self._model.peft_config[self._pattern])
        config.r, config.lora_alpha = settings.rank, settings.alpha
        config.rank_pattern, config.alpha_pattern = {}, {}
        config.init_lora_weights, config.lora_dropout = True, 0.0
        config.target_modules = set(self._of(settings.targets))
        with self._engine.changing(self._settle):
            self._model.add_adapter(name, config)
            for parameter in self.parameters(name).values():
                parameter.requires_grad_(is_trained)
        self._known[name] = settings

    def _of(self, targets: Collection[str]) -> list[str]:
        """Return the whole names of linears, by their last names."""
        return [name for name in self._linears if name.rpartition(".")[2] in targets]

    def _require_room(self, name: str, settings: AdapterSettings) -> None:
        last_names = sorted(self.targets)
        parts = {part for path, _ in self._model.named_parameters() for part in path.split(".")}
        unknown = sorted(settings.targets - set(last_names))
        if name in self._model.peft_config:
            raise OffloadError(
                f"there is an adapter {name!r} already",
                limit="each adapter has a name of its own",
                hint=f"remove it first, or name this one {name + '2'!r}",
            )
        if not _NAME.fullmatch(name) or name in parts:
            raise OffloadError(
                f"an adapter is to be named {name!r}",
                limit="a name is a letter and up to 63 of letters, digits, `_` and `-`, and no"
                " module's",
                hint="name it e.g. 'client_1'",
            )
        if not 1 <= settings.rank <= self.max_rank:
            raise OffloadError(
                f"the rank of {name!r} is {settings.rank}",
                limit=f"slots were declared for ranks of 1 to {self.max_rank}",
                hint=f"`rank={min(max(1, settings.rank), self.max_rank)}`",
            )
        if unknown or not settings.targets:
            named = unknown[0] if unknown else "none"
            raise OffloadError(
                f"{name!r} is to be on {named}",
                limit=f"slots were declared for adapters on {', '.join(last_names)}",
                hint=f"`targets={{{nearest(named, last_names)!r}}}`",
            )
        if len(self._known) == self.max_adapters:
            raise OffloadError(
                f"all {self.max_adapters} slots of adapters are taken",
                limit=f"a slot takes up to {self.slot_bytes / 2**30:.2f} GiB of device memory",
                hint=f"remove one of {', '.join(self._known)}",
            )
