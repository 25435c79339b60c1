"""Lays packages out in a folder as an index that pip reads.

python -m tests.tools.index dist index
pip install --index-url file://$PWD/index/simple sluice-finetune
"""

import argparse
import hashlib
import shutil
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename


def lay_out(packages: Path, index: Path) -> list[Path]:
    """Copy each wheel and sdist of a folder into `simple/NAME/`, with a page of checksums.

    Returns:
        The pages.
    """
    pages: dict[Path, list[str]] = {}
    for file in sorted([*packages.glob("*.whl"), *packages.glob("*.tar.gz")]):
        name = (parse_wheel_filename if file.suffix == ".whl" else parse_sdist_filename)(file.name)
        folder = index / "simple" / name[0]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        link = f'<a href="{file.name}#sha256={digest}">{file.name}</a><br>\n'
        pages.setdefault(folder / "index.html", []).append(link)
    if not pages:
        raise FileNotFoundError(f"{packages} has no wheel and no sdist: `python -m build`")
    for page, links in pages.items():
        page.write_text("<!DOCTYPE html>\n" + "".join(links))
    return [*pages]


def main() -> None:
    """Lay out the packages of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("packages", type=Path)
    parser.add_argument("index", type=Path)
    options = parser.parse_args()
    lay_out(options.packages, options.index)


if __name__ == "__main__":
    main()
