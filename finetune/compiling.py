"""Layers compiled by torch: their norms, rotations and activations become a few kernels each.

torch compiles a kind of layer once, not each layer of it. Sizes stay open, random numbers stay
torch's own, which a recomputation replays, and no kernel is chosen by timing: so a resumed run
computes with the same kernels. Fused experts stay as they are, for they have kernels of their own.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from finetune.errors import ConfigError
from finetune.expert_lora import ParamWrapper
from offload.engine.experts.interface import goes_through_interface

FAILURES = (TorchDynamoException, FailOnRecompileLimitHit)
# Of one kind of code: by what layers attend to, for training or not, with a graph or not, and with
# one row or several.
MAX_FORMS = 32


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Have each layer compiled when it is first called.

    What torch would leave uncompiled after too many attempts is an error: see `refusal`.

    Args:
        layers: Of one model, with their adapters.
    """
    torch._dynamo.config.recompile_limit = MAX_FORMS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, ParamWrapper) or goes_through_interface(module):
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
