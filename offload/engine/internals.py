"""What torch has no public name for: one home, to be read against each new version of it.

`python -m tests.tools.private_uses` counts such uses in the whole tree, and knows in which version
each name was read.
"""

from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

without_modes = _disable_current_modes

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold what listens to its calls; those of calls come first."""


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values with a history and a count of writes of their own."""
    return tensor.data


def refer(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let a tensor refer to other memory, whoever holds it, without a trace in its history."""
    tensor.data = values


def num_writes(tensor: torch.Tensor) -> int:
    """Return a count that grows when a tensor, or a view of it, is written to."""
    return tensor._version


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return what tells a storage from others while it lives, with memory or without."""
    return int(storage._cdata)


def memory_key(tensor: torch.Tensor) -> int:
    """Return `storage_key` of the memory that a tensor refers to."""
    return storage_key(tensor.untyped_storage())


def has_hooks(module: nn.Module) -> bool:
    """Return whether something listens to a module's calls."""
    return any(vars(module)[table] for table in HOOKS)


def gradient_hooks(parameter: torch.Tensor) -> Any:
    """Return the hooks of `register_hook`, by number; None or empty if there are none."""
    return parameter._backward_hooks


def arrival_hooks(parameter: torch.Tensor) -> Any:
    """Return the hooks of `register_post_accumulate_grad_hook`, likewise."""
    return parameter._post_accumulate_grad_hooks


def schema_of(operation: Any) -> Any:
    """Return what an operation takes and writes to."""
    return operation._schema
