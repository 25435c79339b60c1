"""Random numbers of a layer's visits: the recompute must draw the same as the forward.

Problem. Dropout draws from torch's default generator, which all threads of the process share. A
visit seeds it, but another thread of the caller that draws or seeds while the layer computes
advances the stream: the masks of the forward and of its recompute then differ, and the gradients
are silently wrong.

Idea. While a layer computes, a dispatch mode passes our own generator to each operation that draws.
Some kernels can only draw from the default generator (attention with dropout on CUDA). If a visit
ran one of these, the default generator must be in the same state after the recompute as after the
forward; otherwise the step is refused before the layer's gradients are taken.

Cost. The mode sees every operation of a layer, so layers that draw nothing run without it. A
layer's first visit shows whether it draws. Each later visit checks this by the default generator's
state, in about 10 us. If the state did change, the layer is computed again, under the mode.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from offload.engine.internals import TorchDispatchMode
from offload.errors import OffloadError

# ---------------------------------------------------------------------------------------------
# Dropout seeds: of a step, and derived from it, of each visit of a layer by a micro-batch.
#
# Problem. A recompute must draw the same as its forward, and a resumed run the same as an
# uninterrupted one, on any machine. So masks depend on four numbers alone: the recipe's seed, the
# step, the layer and the micro-batch. The function of these must not change while a run lasts.
#
# Idea. The numbers are hashed by BLAKE2b, which has a specification. Each is 8 bytes,
# little-endian, so different sequences of numbers are different bytes. This takes 1 us; numpy's
# SeedSequence, which has a specification too, takes 40 us for each visit.
#
# Source: RFC 7693.

_WORD = 0xFFFF_FFFF_FFFF_FFFF
_MAX_SEED = 0x7FFF_FFFF_FFFF_FFFF  # torch's generators take 63 bits without a sign


def seed_of(*numbers: int) -> int:
    """Return the seed that follows from some numbers, each taken modulo 2**64.

    The seed of a step is that of the recipe's seed and the step, counted from 0. The generators'
    seed for a visit is that of the step's seed, the layer (`FRONT_LAYER` of
    `offload.engine.randomness` before the layers) and the micro-batch's number in the whole step.
    """
    data = b"".join((number & _WORD).to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MAX_SEED


T = TypeVar("T")

FRONT_LAYER = -1  # the front's layer number in seeds

# Operation -> its variant with a generator argument, where torch names that differently.
_OVERLOADS = {"default": "generator", "low": "low_generator"}


class VisitRandomness:
    """Seeds visits, and isolates their random numbers from other threads."""

    def __init__(self, device: torch.device) -> None:
        """Make generators for the host and for the compute device."""
        self._default = {"cpu": torch.default_generator}
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._default["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
        self._own = {
            kind: torch.Generator(generator.device) for kind, generator in self._default.items()
        }
        self._is_drawing: dict[int, bool] = {}

    def visit(self, layer: int, seed: int, compute: Callable[[], T]) -> tuple[T, bytes | None]:
        """Compute a layer with random numbers from a seed.

        Args:
            layer: Which layer.
            seed: Seed of this layer and micro-batch.
            compute: The visit; it is called again if it draws for the first time.

        Returns:
            Its result, and the state of torch's default generators after it if it drew from
            these; None if no other thread can have affected its draws.
        """
        self._seed(seed)
        if not self._is_drawing.get(layer, True):
            before = self._state()
            result = compute()
            if self._state() == before:
                return result, None
            del result
            self._is_drawing[layer] = True
            self._seed(seed)
        with _OwnGenerators(self._own) as mode:
            result = compute()
        self._is_drawing.setdefault(layer, mode.has_drawn)
        return result, self._state() if mode.has_drawn_elsewhere else None

    def is_drawing(self, layer: int) -> bool:
        """Return whether a layer that was visited draws."""
        return self._is_drawing.get(layer, False)

    def draws_in(self, compute: Callable[[], object]) -> bool:
        """Return whether a computation draws; for a layer's backward, which would draw anew."""
        with _OwnGenerators(self._own) as mode:
            compute()
        return bool(mode.has_drawn)

    def seed(self, seed: int) -> None:
        """Seed torch's default generators, for computations that run once."""
        for generator in self._default.values():
            generator.manual_seed(seed)

    def _seed(self, seed: int) -> None:
        self.seed(seed)
        for generator in self._own.values():
            generator.manual_seed(seed)

    def _state(self) -> bytes:
        states = (generator.get_state() for generator in self._default.values())
        return b"".join(state.numpy().tobytes() for state in states)


def require_same_draws(layer: int, forward: bytes | None, recompute: bytes | None) -> None:
    """Check that a recompute left torch's default generators as the forward did.

    Raises:
        OffloadError: It did not, so dropout masks may differ. Gradients of layers after this one
            were written.
    """
    if forward == recompute:
        return
    raise OffloadError(
        f"layer {layer} drew other random numbers in its recompute than in its forward",
        limit="dropout inside attention kernels draws from torch's default generator, from which"
        " no other thread may draw meanwhile; gradients may be partial",
        hint="give the other thread a `torch.Generator` of its own, and zero the gradients",
    )


class _OwnGenerators(TorchDispatchMode):
    """Lets operations draw from generators of our own.

    Attributes:
        has_drawn: Whether any operation drew.
        has_drawn_elsewhere: Whether one drew that takes no generator.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: dict[str, torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._generators = generators
        self.has_drawn = self.has_drawn_elsewhere = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip the wrapper per operation that disables dynamo: it takes longer than the mode."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled layers compiled; draws by torch operations in their code are seen."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, with a generator if it draws."""
        kwargs = kwargs or {}
        kind = _KINDS.get(func)
        if kind is None:
            kind = _KINDS[func] = _kind_of(func)
        if kind == "silent" or (kind == "dropout_p" and not dropout_of(func, args, kwargs)):
            return func(*args, **kwargs)
        self.has_drawn = True
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        if kind != "generator":
            overload = _OVERLOADS.get(func._overloadname, "")
            if overload not in func.overloadpacket.overloads():
                self.has_drawn_elsewhere = True
                return func(*args, **kwargs)
            func = getattr(func.overloadpacket, overload)
        if kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator_for(args, kwargs)}
        return func(*args, **kwargs)

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None) -> Any:  # noqa: FBT001
        """Compute the same as CUDA's fused kernel: a boolean mask, and one rounding."""
        if train is False:
            return x, torch.ones_like(x, dtype=torch.bool)
        mask = torch.empty_like(x, dtype=torch.bool)
        mask.bernoulli_(1 - p, generator=self._generators[x.device.type])
        return (x * mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask

    def _generator_for(self, args: tuple[Any, ...], kwargs: Any) -> torch.Generator:
        """Return the generator of the device on which an operation draws."""
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        device = kwargs.get("device") or next((t.device for t in tensors), torch.device("cpu"))
        return self._generators[torch.device(device).type]


_KINDS: dict[Any, str] = {}


def _kind_of(func: Any) -> str:
    """Return how an operation draws: `silent`, `generator`, `default` or `dropout_p`."""
    schema = getattr(func, "_schema", None)
    if schema is not None and "backward" in schema.name:
        return "silent"  # its argument is the drawn mask
    names = () if schema is None else [argument.name for argument in schema.arguments]
    if "generator" in names:
        return "generator"
    if "dropout_p" in names:  # other packages' attention too, which may lack the tag
        return "dropout_p"
    is_seeded = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return "default" if is_seeded else "silent"


def dropout_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the dropout rate that is passed to an attention kernel."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    return float(given.get("dropout_p") or 0.0)


def same_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Leave the generators unchanged, so that a check does not change a dropout mask."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
