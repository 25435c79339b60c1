"""A streamed parameter between passes: it can be inspected, but not read.

Problem. The parameters of a layer are views of its slot, which holds that layer's weights during
its visits only. Between passes a slot holds the layer that was loaded last. Code that reads a
parameter then (a forward of the model, `state_dict`, a merge, `deepcopy`, a norm over
`parameters()`) would silently use another layer's weights; a write would be overwritten.

Idea. Between passes these parameters, the same objects that modules, optimizers and users hold,
have the class `Sealed`. Torch consults a tensor's class before any operation, so one function
sees every use: queries (shape, type, device) are answered, the rest raises an `OffloadError` that
names the parameter. `detach` is answered too, since `state_dict` uses it: with the true values if
they are in host memory and not encoded, else with a tensor that is sealed as well. So an adapter
can be saved, whatever its base.

Cost. Changing an object's class takes 0.2 us, once before and once after a pass. Visits see
ordinary parameters.

Rejected: parameters on the meta device (torch does not let `.data` change the device type),
storages without memory (reading one ends the process), NaN (a NaN loss does not name its cause),
and guards around the methods of modules alone (anything that bypasses them is silent).
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from offload.engine.host.slab import Field, Record
from offload.engine.model.layers import COLLECTED, FRONT_INPUTS, LayeredModel
from offload.errors import OffloadError

Show = Callable[[int, Field], torch.Tensor | None]
"""Returns the values of a layer's field on the host; None if encoded or not in memory."""

HINT = (
    "`engine.forward_backward(micro_batches)` or `engine.forward(batch)` to compute with it;"
    " `engine.detach()` for the model as it was"
)
_SECRET = "_streamed"


class Sealed(nn.Parameter):
    """A parameter whose memory does not hold its values; see the module's docstring."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer queries of shape, type and device, and `detach`; refuse the rest."""
        kwargs = kwargs or {}
        with torch.DisableTorchFunctionSubclass():
            sealed = next(_sealed_in((args, kwargs)))
            secret: _Secret = sealed.__dict__[_SECRET]
            if func == _GET_GRAD and secret.has_master:
                secret.refuse_gradient()
            if func in _LOOKS:
                return func(*args, **kwargs)
            if func is torch.Tensor.detach:
                return secret.detached(sealed)
            if func is torch.Tensor.__repr__:
                return f"<{secret.name}: {tuple(sealed.shape)}, {sealed.dtype}, streamed>"
            return secret.refuse(_name_of(func))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Secret:
    """A sealed parameter's name, field, the place of its gradient, and its seal."""

    name: str
    layer: int
    field: Field
    has_master: bool
    seal: "Seal"

    def detached(self, sealed: torch.Tensor) -> torch.Tensor:
        """Return the true values on the host, or a tensor that is sealed as well."""
        shown = self.seal.show(self.layer, self.field)
        if shown is not None:
            return shown
        hidden = nn.Parameter(
            torch.empty(sealed.shape, dtype=sealed.dtype, device="meta"), requires_grad=False
        )
        hidden.__dict__[_SECRET] = self
        hidden.__class__ = Sealed
        return hidden

    def refuse(self, use: str) -> NoReturn:
        """Raise the error for a use.

        Raises:
            OffloadError: Always.
        """
        raise OffloadError(
            f"`{use}` would read or change {self.name}, whose layer is streamed by"
            f" {self.seal.holder}",
            limit=self.seal.limit,
            hint=self.seal.hint,
        )

    def refuse_gradient(self) -> NoReturn:
        """Raise the error for a gradient that is looked for on the device.

        Raises:
            OffloadError: Always.
        """
        raise OffloadError(
            f"the gradient of {self.name} is looked for on the model",
            limit="weights of the layers that train on the host have it on their masters",
            hint="give `engine.trained_parameters` to the optimizer, and to what clips or zeroes",
        )


class Seal:
    """Keeps a model's streamed parameters from being read outside of passes.

    Attributes:
        holder, limit, hint: Texts for error messages.
        release: Detaches the model; None once that is impossible.
    """

    def __init__(
        self,
        records: Sequence[Record],
        *,
        names: Mapping[int, str],
        show: Show,
        release: Callable[[], None],
    ) -> None:
        """Seal the parameters.

        Args:
            records: One per layer.
            names: id of a parameter -> its name in the model.
            show: Returns values that can be shown.
            release: Detaches the model.
        """
        self.holder = "an attached engine"
        self.limit = "its weights are on the device only while the engine runs"
        self.hint = HINT
        self.release: Callable[[], None] | None = release
        self._show: Show | None = show
        self._thread: int | None = None
        self._parameters: list[tuple[nn.Parameter, type[nn.Parameter], str]] = []
        for layer, record in enumerate(records):
            for field in record.fields:
                parameter, name = field.parameter, names[id(field.parameter)]
                secret = _Secret(
                    name=name,
                    layer=layer,
                    field=field,
                    has_master=parameter.requires_grad,
                    seal=self,
                )
                self._parameters.append((parameter, type(parameter), name))
                parameter.__dict__[_SECRET] = secret
                parameter.__class__ = Sealed

    @property
    def is_open_here(self) -> bool:
        """Whether this thread runs a pass."""
        return self._thread == threading.get_ident()

    def show(self, layer: int, field: Field) -> torch.Tensor | None:
        """Return a field's values on the host, if they can be shown."""
        return None if self._show is None else self._show(layer, field)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let the parameters be read and written inside a block, by one thread at a time.

        Raises:
            OffloadError: Another pass runs.
        """
        if self._thread is not None:
            raise OffloadError(
                "the engine is asked for a pass inside of another",
                limit="an engine runs one pass at a time, for one thread",
                hint="wait for the pass that runs, in this thread or the other",
            )
        self._thread = threading.get_ident()
        try:
            for parameter, kind, _ in self._parameters:
                parameter.__class__ = kind
            yield
        finally:
            for parameter, _, _ in self._parameters:
                parameter.__class__ = Sealed
            self._thread = None

    def require_whole(self) -> None:
        """Check that no parameter was exchanged with another tensor (`torch.utils.swap_tensors`).

        Raises:
            OffloadError: Which one.
        """
        for parameter, kind, name in self._parameters:
            if type(parameter) is not (Sealed if self._thread is None else kind):
                raise OffloadError(
                    f"{name} was exchanged with another tensor since the model was attached",
                    limit="a streamed parameter stays what it was",
                    hint="`engine.detach()`, change the model, and `offload.attach(model, ...)`"
                    " again",
                )

    def close(self) -> None:
        """Leave the parameters sealed: the engine has let go of their values."""
        self.holder = "an engine that was closed"
        self.limit = "`close` leaves the layers' frozen weights where they were, in no parameter"
        self.hint = "`engine.detach()` gives them back, or load the model again"
        self.release = self._show = None

    def lift(self) -> None:
        """Make the parameters ordinary for good."""
        for parameter, kind, _ in self._parameters:
            parameter.__class__ = kind
            parameter.__dict__.pop(_SECRET, None)
        self._parameters.clear()
        self.close()
        self.holder = "an engine that was detached since this was taken"
        self.limit = "its values were not in memory as they are"
        self.hint = "take it again: the model has its weights back"


def seal_of(parameters: Iterator[nn.Parameter]) -> Seal | None:
    """Return the seal of a model's parameters; None if they are not sealed."""
    return next(
        (p.__dict__[_SECRET].seal for p in parameters if type(p) is Sealed),
        None,
    )


def detach_model(model: nn.Module) -> None:
    """Detach a model from the engine it is attached to; see `offload.detach`."""
    seal = seal_of(model.parameters())
    if seal is None or seal.release is None:
        raise OffloadError(
            "the model is not attached" if seal is None else f"the model is held by {seal.holder}",
            limit="an attached model can be detached",
            hint="nothing is to be done" if seal is None else seal.hint,
        )
    seal.release()


def require_unattached(layered: LayeredModel) -> None:
    """Check that no engine holds the model: its sealed parameters are not its weights.

    Raises:
        OffloadError: One does, or did until it was closed.
    """
    seal = seal_of(layered.layers.parameters())
    if seal is not None:
        hint = "`engine.detach()` first, or `offload.detach(model)` where the engine is gone"
        raise OffloadError(
            f"{layered.name} is held by {seal.holder}",
            limit="a model is attached to one engine at a time",
            hint=seal.hint if seal.release is None else hint,
        )


def _name_of(func: Any) -> str:
    """Return the name of a function of torch, or of the property that it gets or sets."""
    name = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__) if name in ("__get__", "__set__") else str(name)


def _sealed_in(value: object) -> Iterator[Any]:
    if type(value) is Sealed:
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _sealed_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _sealed_in(part)


_TENSOR: Any = torch.Tensor  # its properties as such, which type checkers take for their values
_GET_GRAD = _TENSOR.grad.__get__
_LOOKS = {
    *(
        getattr(_TENSOR, name).__get__
        for name in (
            "_version",
            "device",
            "dtype",
            "grad",
            "grad_fn",
            "is_cpu",
            "is_cuda",
            "is_leaf",
            "is_meta",
            "is_nested",
            "is_quantized",
            "is_sparse",
            "itemsize",
            "layout",
            "nbytes",
            "ndim",
            "requires_grad",
            "retains_grad",
            "shape",
        )
    ),
    _TENSOR.requires_grad.__set__,  # a change is noticed by the next step; see `Attached`
    *(
        getattr(_TENSOR, name)
        for name in (
            "__len__",
            "dim",
            "element_size",
            "get_device",
            "is_complex",
            "is_contiguous",
            "is_floating_point",
            "is_inference",
            "is_signed",
            "ndimension",
            "nelement",
            "numel",
            "requires_grad_",
            "size",
            "stride",
        )
    ),
    torch.is_complex,
    torch.is_floating_point,
    torch.is_inference,
    torch.numel,
}


# ---------------------------------------------------------------------------------------------
# Calls of an attached model's own methods: which run on the engine, and which are refused.
#
# While a model is attached, its `forward` and `generate` run on the engine if the result is bitwise
# the model's own; any other option is refused by name. (Of models whose rotary frequencies depend
# on the length, padded rows are each computed as alone; see `rotary`.) `to`, `double` and similar
# methods, and `load_state_dict` of streamed weights, are refused before they have changed half of
# the model. All this is done by attributes on a few instances: the model, and those of its modules
# that contain the layers. Code that bypasses them meets the sealed parameters (see `seal`).

_PASSED_ON = ("labels", "logits_to_keep")


Answer = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""Runs the layers on what enters them; the rest goes to the model's own norm, head and loss."""


class Guard:
    """The guards of one attached model, until `lift`."""

    def __init__(
        self, model: nn.Module, layered: LayeredModel, *, seal: Seal, answer: Answer
    ) -> None:
        """Install them.

        Args:
            model: The model as attached.
            layered: The model inside it.
            seal: Of its parameters.
            answer: Computes the result of a forward.
        """
        self._layered = layered
        self._seal = seal
        self._answer: Answer | None = answer
        self._put_on: list[tuple[nn.Module, str, Callable[..., Any], Any]] = []
        for module in _modules_around(model, layered.layers):
            self._put(module, "_apply", self._refuse_move)
            self._put(module, "load_state_dict", self._load)
        self._put(layered.model, "forward", self._forward)
        if hasattr(layered.model, "generate"):
            self._put(layered.model, "generate", self._generate)

    def lift(self) -> None:
        """Remove them."""
        for module, name, guarded, before in self._put_on:
            attributes = vars(module)
            if attributes.get(name) is not guarded:
                continue  # wrapped by something else since; it calls the method from now on
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before
        self._put_on.clear()
        self._answer = None  # otherwise the model would keep the engine alive

    def _put(self, module: nn.Module, name: str, guard: Callable[..., Any]) -> None:
        """Install `guard` in place of a method; it is called with the module and the method."""
        method = getattr(module, name)

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._seal.is_open_here or not self._put_on:  # the engine's call, or lifted
                return method(*args, **kwargs)
            return guard(module, method, *args, **kwargs)

        self._put_on.append((module, name, guarded, vars(module).get(name)))
        vars(module)[name] = guarded

    # -------------------------------------------------------------------------------------- methods

    def _forward(
        self, _module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Answer a forward of the model as the model would, through the engine."""
        given = _by_name(method, args, kwargs)
        self._require_exact(given)
        is_dict = given.pop("return_dict", self._layered.model.config.return_dict)
        inputs = {name: value for name, value in given.items() if name in FRONT_INPUTS}
        rest = {name: value for name, value in given.items() if name in _PASSED_ON}
        assert self._answer is not None
        output = self._answer(inputs, rest)
        return output if is_dict else output.to_tuple()

    def _require_exact(self, given: Mapping[str, Any]) -> None:
        """Check that the engine's result is the model's own.

        Raises:
            OffloadError: It is not, for one of these arguments.
        """
        model = self._layered.model
        if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
            _refuse(
                "an attached model is called where gradients are recorded",
                "its layers' weights are on the device only while the engine runs",
                "`engine.forward_backward(micro_batches)` to train, `with torch.no_grad():` to"
                " evaluate, or `engine.detach()` for the model as it was",
            )
        if model.training:
            _refuse(
                "an attached model is called in training mode",
                "without gradients the engine answers for `eval`, where nothing is drawn",
                "`model.eval()`, or `engine.forward(batch)`",
            )
        configs = (model.config, model.config.get_text_config())
        asked = [name for name in COLLECTED if any(getattr(c, name, False) for c in configs)]
        allowed = {*FRONT_INPUTS, *_PASSED_ON, "return_dict"}
        asked += [
            name for name, value in given.items() if name not in allowed and value is not False
        ]
        if asked:
            _refuse(
                f"an attached model is asked for `{asked[0]}`",
                f"the engine answers for {', '.join((*FRONT_INPUTS, *_PASSED_ON))}",
                f"leave `{asked[0]}` away, or `engine.detach()` for the model as it was",
            )
        if not isinstance(given.get("input_ids"), torch.Tensor):
            _refuse(
                "an attached model is called without `input_ids`",
                "the engine starts at the tokens",
                "`model(input_ids=...)`, or `engine.detach()` for the model as it was",
            )

    def _generate(
        self, _module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Generate without a key-value cache: each token is a pass of the engine."""
        if kwargs.get("use_cache"):
            _refuse(
                "an attached model is asked to generate with `use_cache=True`",
                "each token is a pass over all layers, which keep nothing in between",
                "leave `use_cache` away, or `engine.detach()` for the model as it was",
            )
        return method(*args, **kwargs | {"use_cache": False})

    def _load(
        self, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Load weights that are not streamed, such as an adapter."""
        values = args[0] if args else kwargs["state_dict"]
        named = module.named_parameters(remove_duplicate=False)
        for name in (name for name, p in named if name in values and seal_of(iter([p]))):
            _refuse(
                f"`load_state_dict` is given {name}, which is streamed",
                "an attached model's streamed weights cannot be written",
                "`engine.detach()`, load, and `offload.attach(model, ...)` again; or load only"
                " what trains",
            )
        return method(*args, **kwargs)

    def _refuse_move(self, _module: nn.Module, _method: Any, *_args: Any, **_kwargs: Any) -> None:
        _refuse(
            "an attached model is asked to move or change its type (`to`, `cuda`, `half`, ...)",
            "the engine has settled where each weight is, and of which type",
            "`engine.detach()`, move it, and `offload.attach(model, device=..., ...)` again",
        )


def _refuse(what: str, limit: str, hint: str = HINT) -> NoReturn:
    raise OffloadError(what, limit=limit, hint=hint)


def _by_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name, without those that are None."""
    signature = inspect.signature(method)
    bound = signature.bind(*args, **kwargs).arguments
    rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    for name in rest:
        bound |= bound.pop(name, {})
    return {name: value for name, value in bound.items() if value is not None}


def _modules_around(model: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    """Return the modules that contain the layers, from the model down to their list."""
    name = next(name for name, module in model.named_modules() if module is layers)
    parts = name.split(".")
    return [model, *(model.get_submodule(".".join(parts[:i])) for i in range(1, len(parts) + 1))]
