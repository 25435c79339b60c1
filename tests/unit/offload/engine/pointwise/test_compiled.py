"""The fused kernels of a layer for cards that are not there: what they take, and how they read."""

import importlib.util
from typing import Any

import pytest
import torch

from offload.engine.experts.launcher import MAX_SHARED_BYTES
from offload.engine.pointwise.recognise import MAX_FEATURES
from tests.compiled import compile_for
from tests.pointwise_launches import MODULE, launches

if importlib.util.find_spec("triton") is None:  # not imported: others may want it interpreted
    pytest.skip("Triton is not installed", allow_module_level=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = ("stride_", "row *", "own + first")
LOADED_BYTES = 16  # by one instruction of a thread, where rows are whole lines of memory


def check(capability: int, dtype: torch.dtype, **sizes: Any) -> None:
    """Check that nothing spills, that all fits, and that 16-bit rows are read in wide words."""
    found = compile_for(capability, launches(dtype, **sizes), module=MODULE)
    names = {each.launch.kernel for each in found}
    assert names == {
        *("norm", "norm_backward", "rotate", "norm_rotate_backward"),
        *("gate_up", "gate_up_backward", "cross_entropy"),
    }
    for each in found:
        assert each.spilled_bytes == 0, each
        assert each.shared_bytes <= each.max_shared_bytes, each
        rows = [x for x in each.accesses if any(one in x.source for one in ROWS)]
        assert rows or "rotate" in each.launch.kernel
        if dtype.itemsize == 2:
            assert all(access.num_bytes == LOADED_BYTES for access in rows), each


def test_kernels_for_a_card_that_is_not_there_take_no_more_than_it_has() -> None:
    check(89, torch.bfloat16, hidden=4096, head=128, width=12288)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", MAX_SHARED_BYTES)
def test_kernels_launch_on_all_cards(capability: int, dtype: torch.dtype) -> None:
    check(capability, dtype, hidden=4096, head=128, width=12288)
    check(capability, dtype, hidden=2880, head=64, width=2880)
    check(capability, dtype, hidden=MAX_FEATURES, head=256, width=28672)
