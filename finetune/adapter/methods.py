"""Adapters of other methods than LoRA on linear layers, as peft's settings."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig, get_peft_model
from peft.tuners.lycoris_utils import LycorisLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from finetune.errors import ConfigError
from finetune.model.empty import auto_class
from finetune.recipe.adapters import Adapter, AdapterSection
from finetune.run.adapter_folder import ROW_TASK, TOKEN_TASK
from offload.engine.internals import FakeTensorMode, TorchDispatchMode, memory_key, tree_leaves
from offload.engine.tracing.tracer import LiveBytes, Tracer, fake_copy
from offload.plan.facts.facts import Line, MethodCounts, PassCounts, PeftMethod
from offload.plan.facts.optimizer import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def method_config(
    adapter: AdapterSection,
    *,
    targets: Collection[str],
    excluded: Collection[str],
    modules_to_save: Collection[str],
    model_type: str,
    task: str | None,
) -> PeftConfig:
    """Return peft's settings of an adapter.

    IA3 scales what a linear layer reads where peft says for the type of model that it ends an
    MLP, and what it returns elsewhere.

    Args:
        adapter: An adapter whose method peft computes.
        targets: The last names of the linear layers.
        excluded: Full names of modules that have such a name and get no adapter.
        modules_to_save: Of modules trained whole.
        model_type: Of the model's config.
        task: See `task_type`.

    Raises:
        ConfigError: The method cannot leave modules out.
    """
    config: PeftConfig = adapter.peft_config(
        target_modules=sorted(targets),
        modules_to_save=list(modules_to_save) or None,
        task_type=task,
    )
    if hasattr(config, "feedforward_modules"):
        ends = TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(model_type, [])
        config.feedforward_modules = {*ends, "down_proj"} & set(targets)
    if excluded:
        if not hasattr(config, "exclude_modules"):
            raise ConfigError(
                f"adapter.method: {adapter.method}, and {min(excluded)} is in an image or audio"
                " tower",
                limit=f"{type(config).__name__} of peft cannot leave modules out by full names",
                hint="`adapter.method: lora`",
            )
        config.exclude_modules = set(excluded)
    return config


def task_type(model: "PreTrainedModel") -> str | None:
    """Return peft's name of what a model is for; None if peft has no name for its class.

    Without one, peft saves the class itself as `auto_mapping`, and `AutoPeftModel` loads that.
    """
    return _TASKS.get(auto_class(model))


def is_adapted(module: nn.Module, adapter: str) -> bool:
    """Return whether an adapter of peft's, of any method, is on a module."""
    return isinstance(module, BaseTunerLayer) and any(
        adapter in getattr(module, name) for name in module.adapter_layer_names
    )


def leave_out_draws(model: nn.Module) -> None:
    """Keep LoHa and LoKr in evaluation mode, which changes no value.

    In training mode each forward draws a number for a dropout of whole modules, which recipes do
    not have, and the code that runs depends on it.
    """
    for module in model.modules():
        if isinstance(module, LycorisLayer):
            vars(module)["train"] = partial(_evaluated, module)
            module.train()


def _evaluated(module: nn.Module, mode: bool = True) -> nn.Module:  # noqa: FBT001
    """Set evaluation mode, in place of `nn.Module.train`."""
    del mode
    return nn.Module.train(module, mode=False)


_TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSequenceClassification": ROW_TASK,
    "AutoModelForTokenClassification": TOKEN_TASK,
}
Size = tuple[str, int, int]
TOKENS = (256, 512)
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@cache
def counted(
    adapter: AdapterSection,
    linears: tuple[tuple[Size, int], ...],
    *,
    model_type: str,
    dtype_bytes: int,
) -> PeftMethod:
    """Return what an adapter adds to a model's linear layers.

    The forward and backward of each kind of layer run for two numbers of tokens. Counts grow with
    the tokens by the difference; those of the layer without an adapter are subtracted.

    Args:
        adapter: An adapter whose method peft computes.
        linears: The last name, d_in and d_out of each kind of adapted layer, and their number.
        model_type: Of the model's config.
        dtype_bytes: Of an element of the weights.
    """
    dtype = DTYPES[dtype_bytes]

    def adapted(size: Size) -> _Layer:
        config = method_config(
            adapter,
            targets=[size[0]],
            excluded=(),
            modules_to_save=(),
            model_type=model_type,
            task="CAUSAL_LM",
        )
        return _Layer.adapted(config, size, dtype)

    layers = {size: adapted(size) for size, _ in linears}
    frozen_bytes = sum(layers[size].frozen_bytes * number for size, number in linears)
    if adapter.stated.shares_frozen:
        sizes = layers.keys()
        largest = adapted(("largest", max(s[1] for s in sizes), max(s[2] for s in sizes)))
        frozen_bytes = largest.frozen_bytes
    return PeftMethod(
        name=adapter.method,
        linears=tuple(
            (size, _counts(layer, _Layer.plain(size, dtype))) for size, layer in layers.items()
        ),
        frozen_bytes=frozen_bytes,
    )


def _counts(layer: "_Layer", base: "_Layer") -> MethodCounts:
    few, many = map(layer.run, TOKENS)
    base_few, base_many = map(base.run, TOKENS)
    return MethodCounts(
        shapes=layer.shapes,
        forward=_pass(few.forward, many.forward, base_few.forward, base_many.forward),
        backward=_pass(few.backward, many.backward, base_few.backward, base_many.backward),
        saved=_line(few.saved_bytes, many.saved_bytes),
        saves_input=few.saves_input,
        live=_line(few.live_bytes - base_few.live_bytes, many.live_bytes - base_many.live_bytes),
    )


class _Tally(TorchDispatchMode):
    """Counts arithmetic of products, by dtype, and bytes and kernels of all other operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.fp32_flops = self.half_flops = self.num_bytes = 0.0
        self.num_ops = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        written = _tensors(result)
        if func.is_view or not written:
            return result
        self.num_ops += 1
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
            if written[0].dtype == torch.float32:
                self.fp32_flops += flops
            else:
                self.half_flops += flops
        else:
            self.num_bytes += sum(one.nbytes for one in (*_tensors((args, kwargs)), *written))
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The counts of one forward and backward."""

    forward: _Tally
    backward: _Tally
    saved_bytes: int  # what is saved for the backward, but for parameters and the input
    saves_input: bool
    # What is live at once at most, but for these, the output and its gradient, and the input's.
    live_bytes: int


class _Layer:
    """A linear layer on tensors without values."""

    def __init__(self, model: nn.Module, *, d_in: int, dtype: torch.dtype) -> None:
        self._mode = FakeTensorMode()
        self._model = fake_copy(model, self._mode)
        self._d_in, self._dtype = d_in, dtype

    @classmethod
    def plain(cls, size: Size, dtype: torch.dtype) -> "_Layer":
        """Return it without an adapter."""
        return cls(
            _Holder(size, dtype).requires_grad_(requires_grad=False), d_in=size[1], dtype=dtype
        )

    @classmethod
    def adapted(cls, config: PeftConfig, size: Size, dtype: torch.dtype) -> "_Layer":
        """Return it with an adapter by peft."""
        config.task_type = None
        with torch.random.fork_rng(devices=[]):
            model = get_peft_model(_Holder(size, dtype), config)
        leave_out_draws(model)
        return cls(model, d_in=size[1], dtype=dtype)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of what trains."""
        return tuple(tuple(p.shape) for p in self._model.parameters() if p.requires_grad)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the adapter's own tensors that do not train."""
        return sum(buffer.nbytes for buffer in self._model.buffers())

    def run(self, num_tokens: int) -> _Run:
        """Run it forward and backward."""
        own = {memory_key(one) for one in self._held()}
        memory, saved = LiveBytes(), dict[int, int]()
        with self._mode:
            x = torch.empty(num_tokens, self._d_in, dtype=self._dtype, requires_grad=True)
        reads = memory_key(x)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[memory_key(tensor)] = storage.nbytes()
            return tensor

        tracer = Tracer(memory)
        tracer.ignore([*self._held(), x])
        with self._mode, tracer:
            with _Tally() as forward, saved_tensors_hooks(pack, lambda tensor: tensor):
                y = self._model(x)
            gradient = torch.empty_like(y)
            with _Tally() as backward:
                y.backward(gradient)
        kept = sum(size for key, size in saved.items() if key not in own | {reads})
        outside = 2 * y.nbytes + x.nbytes
        return _Run(
            forward=forward,
            backward=backward,
            saved_bytes=kept,
            saves_input=reads in saved,
            live_bytes=max(0, memory.peak_bytes - kept - outside),
        )

    def _held(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


class _Holder(nn.Module):
    """A model that is one linear layer, which peft finds by its name."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self._name, d_in, d_out = size
        self.add_module(self._name, nn.Linear(d_in, d_out, bias=False, device="meta", dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, self._name)(x)
        return y


def _pass(few: _Tally, many: _Tally, base_few: _Tally, base_many: _Tally) -> PassCounts:
    def grown(count: str) -> Line:
        return _line(
            getattr(few, count) - getattr(base_few, count),
            getattr(many, count) - getattr(base_many, count),
        )

    return PassCounts(
        fp32_flops=grown("fp32_flops"),
        half_flops=grown("half_flops"),
        num_bytes=grown("num_bytes"),
        num_ops=few.num_ops - base_few.num_ops,
    )


def _line(few: float, many: float) -> Line:
    """Return the line through the counts for both numbers of tokens."""
    per_token = (many - few) / (TOKENS[1] - TOKENS[0])
    return Line(fixed=few - per_token * TOKENS[0], per_token=per_token)


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def refuse_virtual(adapter: Adapter) -> None:
    """Refuse virtual tokens where rows have none.

    Raises:
        ConfigError: It is a method of these.
    """
    if adapter.is_virtual:
        raise ConfigError(
            f"an adapter of the type {adapter.peft_type}, and rows without virtual tokens",
            limit="only a run that trains puts them in front, and `chat` and `generate` a prefix",
            hint="load the adapter with plain peft",
        )
