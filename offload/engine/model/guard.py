"""Calls of an attached model's own methods: which run on the engine, and which are refused.

While a model is attached, its `forward` and `generate` run on the engine if the result is bitwise
the model's own; any other option is refused by name. (Of models whose rotary frequencies depend on
the length, padded rows are each computed as alone; see `rotary`.) `to`, `double` and similar
methods, and `load_state_dict` of streamed weights, are refused before they have changed half of the
model. All this is done by attributes on a few instances: the model, and those of its modules that
contain the layers. Code that bypasses them meets the sealed parameters (see `seal`).
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from offload.engine.model.layers import COLLECTED, FRONT_INPUTS, LayeredModel
from offload.engine.model.seal import HINT, Seal, seal_of
from offload.errors import OffloadError

_PASSED_ON = ("labels", "logits_to_keep")


Answer = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""Runs the layers on what enters them; the rest goes to the model's own norm, head and loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Put:
    """A guarded method: its instance, its guard, and the instance's attribute before."""

    module: nn.Module
    name: str
    guarded: Callable[..., Any]
    before: Callable[..., Any] | None


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
        self._put_on: list[_Put] = []
        for module in _modules_around(model, layered.layers):
            self._put(module, "_apply", self._refuse_move)
            self._put(module, "load_state_dict", self._load)
        self._put(layered.model, "forward", self._forward)
        if hasattr(layered.model, "generate"):
            self._put(layered.model, "generate", self._generate)

    def lift(self) -> None:
        """Remove them."""
        for put in self._put_on:
            attributes = vars(put.module)
            if attributes.get(put.name) is not put.guarded:
                continue  # wrapped by something else since; it calls the method from now on
            if put.before is None:
                del attributes[put.name]
            else:
                attributes[put.name] = put.before
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

        before = vars(module).get(name)
        vars(module)[name] = guarded
        self._put_on.append(_Put(module=module, name=name, guarded=guarded, before=before))

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
