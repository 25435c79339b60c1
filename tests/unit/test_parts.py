from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("case", range(12))
def test_slow(case):
    pass

@pytest.mark.thorough
def test_thorough():
    pass
"""


def test_each_slow_test_is_in_one_part_and_every_thorough_one_in_all(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    thorough\n")
    pytester.makepyfile(TESTS)
    slow = list[str]()
    for part in (1, 2, 3):
        words = ("--part", f"{part}/3", "--collect-only", "-q", "-p", "no:cacheprovider")
        lines = pytester.runpytest_inprocess(*words).outlines
        found = [line.partition("::")[2] for line in lines if "::" in line]
        assert "test_thorough" in found
        assert 1 < len(found) < 12
        slow += found
    assert sorted(slow) == sorted(
        [f"test_slow[{case}]" for case in range(12)] + ["test_thorough"] * 3
    )
