"""Print the oldest versions that pyproject.toml allows, as pip's constraints.

    python tests/tools/oldest.py > oldest.txt && pip install -c oldest.txt -e ".[test]"

torch is left out: what it has no small wheel of would bring gigabytes of CUDA.
"""

import re
import sys
import tomllib
from pathlib import Path


def constraints(pyproject: str) -> list[str]:
    """Return a line for each dependency that has a lower bound."""
    dependencies = tomllib.loads(pyproject)["project"]["dependencies"]
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+).*", one) for one in dependencies)
    return [f"{one[1]}=={one[2]}" for one in found if one and one[1] != "torch"]


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.stdout.write("\n".join(constraints((root / "pyproject.toml").read_text())) + "\n")
