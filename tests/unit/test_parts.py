from itertools import chain
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

cases = pytest.mark.parametrize("case", range(24))

@cases
@pytest.mark.slow
def test_slow(case):
    pass

@cases
@pytest.mark.thorough
def test_thorough(case):
    pass

def test_default():
    pass
"""


def test_each_slow_test_is_in_one_part_and_each_thorough_one_in_a_third_of_them(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    thorough\n")
    pytester.makepyfile(TESTS)
    parts = list[list[str]]()
    for part in range(6):
        words = ("--part", f"{part + 1}/6", "--collect-only", "-q", "-p", "no:cacheprovider")
        lines = pytester.runpytest_inprocess(*words).outlines
        parts.append([line.partition("::")[2] for line in lines if "::" in line])
    assert all("test_default" in part for part in parts)
    slow, thorough = (
        [sorted(name for name in part if name.startswith(kind)) for part in parts]
        for kind in ("test_slow", "test_thorough")
    )
    assert all(slow)
    assert sorted(chain(*slow)) == sorted(f"test_slow[{case}]" for case in range(24))
    assert all(thorough)
    assert thorough[:3] == thorough[3:]
    assert sorted(chain(*thorough[:3])) == sorted(f"test_thorough[{case}]" for case in range(24))
