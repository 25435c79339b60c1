"""What torch has no public name for: one home, to be read against each new version of it.

`python -m tests.tools.private_uses` counts such uses in the whole tree, and knows in which version
each name was read.
"""

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "enable_python_dispatcher",
    "tree_leaves",
    "tree_map_only",
    "unset_fake_temporarily",
]

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


def memory_key(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from others while it lives, with memory or without."""
    return int(tensor.untyped_storage()._cdata)


def has_hooks(module: nn.Module) -> bool:
    """Return whether something listens to a module's calls."""
    return any(vars(module)[table] for table in HOOKS)
