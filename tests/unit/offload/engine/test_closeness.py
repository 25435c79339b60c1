"""Which differences are rounding."""

import numpy as np
import pytest
import torch

from offload.engine.closeness import are_close

VOCABULARY = 151_936


def terms() -> torch.Tensor:
    """Return what a head's backward adds up: for 40 features, a term of each token."""
    generator = torch.Generator().manual_seed(0)
    weight, cotangent = (torch.randn(40, VOCABULARY, generator=generator) for _ in range(2))
    return 0.02 * weight * cotangent


def one_after_the_other(terms: torch.Tensor) -> torch.Tensor:
    """Return sums in float32 without blocks, the least precise order."""
    return torch.from_numpy(np.cumsum(terms.numpy(), axis=-1, dtype=np.float32)[:, -1].copy())


def test_rounding_of_a_sum_over_a_vocabulary_is_within_the_bound_of_its_terms() -> None:
    true = terms().double().sum(-1).float()
    found, backwards = one_after_the_other(terms()), one_after_the_other(terms().flip(-1))
    for one, other in ((found, true), (found, backwards)):
        assert are_close(one, other, steps=1, num_terms=VOCABULARY)
    assert not are_close(found, backwards, steps=64)  # so the bound has to grow with the terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_that_is_off_by_more_than_rounding_is_seen(dtype: torch.dtype) -> None:
    true = terms().double().sum(-1).to(dtype)
    assert not are_close(true, true * 2, steps=64, num_terms=VOCABULARY)
    if dtype is torch.float32:
        assert not are_close(true, true * 1.0001, steps=64, num_terms=VOCABULARY)


def test_the_bound_of_16_bits_grows_by_no_more_than_that_of_float32() -> None:
    """Sums are made in float32, whatever they are rounded to."""
    one = torch.ones(4, dtype=torch.bfloat16)
    other = one + 2 * torch.finfo(torch.bfloat16).eps
    assert not are_close(one, other, steps=1, num_terms=VOCABULARY)
    assert are_close(one, other, steps=2, num_terms=1)
