"""Layers compiled by torch: their norms, rotations and activations become a few kernels each.

torch compiles each kind of layer once, not each layer. Shapes are dynamic. Random numbers stay
torch's own, so recomputation replays them. No kernel is chosen by timing, so a resumed run computes
with the same kernels. Fused experts and adapted linears are not compiled: they have kernels and
sums of their own.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from finetune.adapter.linear_lora import Linear, ParamWrapper
from finetune.errors import ConfigError
from offload.engine.experts.products import goes_through_interface

FAILURES = (TorchDynamoException, FailOnRecompileLimitHit)
# Compiled variants of one kind of layer: by attention type, training or not, with a graph or not,
# and with one row or several.
MAX_FORMS = 32


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Have each layer compiled when it is first called.

    If torch would give up after too many recompilations, that is an error: see `refusal`.

    Args:
        layers: Of one model, with their adapters.
    """
    torch._dynamo.config.recompile_limit = MAX_FORMS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        for module in layer.modules():
            is_own = isinstance(module, (ParamWrapper, Linear))
            if is_own or goes_through_interface(module):
                vars(module)["forward"] = torch.compiler.disable(module.forward)
        layer.compile(dynamic=True, options={"fallback_random": True, "deterministic": True})


def refusal(error: Exception) -> ConfigError:
    """Return the error for layers that torch could not compile."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return ConfigError(
        f"torch could not compile the layers: {type(error).__name__}: {first_line}",
        limit="each kind of layer must compile; on a CPU that takes a C++ compiler, on CUDA Triton",
        hint="`train.compile: false`",
    )
