from pathlib import Path

import pytest
import torch

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.gpu
def test_on_a_card():
    assert True

@pytest.mark.gpu
def test_that_skips_itself():
    pytest.skip("too small a card")

def test_on_a_cpu():
    assert True
"""


def outcomes(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_gpu: bool,
    is_required: bool,
    is_ci: bool = False,
) -> dict[str, int]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("CI", "true" if is_ci else "false")
    monkeypatch.setenv("REQUIRE_GPU", "1" if is_required else "0")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers = gpu: needs a CUDA device")
    pytester.makepyfile(TESTS)
    plugins = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    return pytester.runpytest_inprocess(*plugins).parseoutcomes()


@pytest.mark.thorough
def test_without_a_card_gpu_tests_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(pytester, monkeypatch, has_gpu=False, is_required=False)
    assert found == {"passed": 1, "skipped": 2}


def test_without_a_card_gpu_tests_fail_where_one_is_required(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(pytester, monkeypatch, has_gpu=False, is_required=True)
    assert found == {"passed": 1, "errors": 2}


def test_with_a_card_gpu_tests_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(pytester, monkeypatch, has_gpu=True, is_required=False)
    assert found == {"passed": 2, "skipped": 1}


def test_a_gpu_test_that_skips_itself_fails_where_a_card_is_required(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(pytester, monkeypatch, has_gpu=True, is_required=True)
    assert found == {"passed": 2, "failed": 1}


@pytest.mark.thorough
def test_in_ci_only_a_skip_that_is_expected_is_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcomes(pytester, monkeypatch, has_gpu=True, is_required=False, is_ci=True)
    assert found == {"passed": 2, "failed": 1}
    found = outcomes(pytester, monkeypatch, has_gpu=False, is_required=False, is_ci=True)
    assert found == {"passed": 1, "skipped": 2}
