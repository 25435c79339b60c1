"""What codecs of published codes in 4 bits refuse alike."""

import pytest
import torch

from offload.engine.codec import form_named
from offload.errors import CodecError
from tests.encoded import encoded

NUMBERS = {"nvfp4": "numbers of NVFP4", "int4": "integers of 4 bits"}


@pytest.mark.parametrize("name", NUMBERS)
def test_weights_that_were_not_published_so_are_refused(name: str) -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with pytest.raises(CodecError, match=f"of 4096 weights are no {NUMBERS[name]}"):
        encoded(form_named(name), values)


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [
        *(("nvfp4", 16, shape) for shape in ((64, 40), (8,), ())),
        *(("int4", 32, shape) for shape in ((64, 48), (16,), ())),
    ],
)
def test_weights_without_groups_of_a_row_are_refused(
    name: str, size: int, shape: tuple[int, ...]
) -> None:
    with pytest.raises(CodecError, match=f"are not in groups of {size} of a row"):
        encoded(form_named(name), torch.zeros(shape, dtype=torch.bfloat16))
