"""Runs the Dockerfile's commands in a folder, for a machine where no container can be built.

    python -m build && python -m tests.tools.container dist             and `sluice --help`
    python -m tests.tools.container dist finetune quickstart            and this command

COPY and RUN lines run in order, with /opt in a new folder; those that change the system itself
(apt-get, useradd) are shown and left out. So the base image, its packages and user are not tried.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from glob import glob
from json import loads
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"
OF_THE_SYSTEM = ("apt-get", "useradd")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile: its name and its text, on one line."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line:
            name, rest = line.split(maxsplit=1)
            yield name, rest


def run(text: str, context: Path, root: Path, arguments: Sequence[str]) -> list[str]:
    """Run a Dockerfile's commands, then its entry point; return the commands that ran.

    Args:
        text: The Dockerfile.
        context: The folder that has `dist`.
        root: What /opt is in.
        arguments: Of the entry point, in place of CMD; none for CMD itself.
    """
    ran, path, entry, default = [], os.defpath, [""], [""]
    for name, rest in instructions(text):
        here = rest.replace("/opt", f"{root}/opt")
        if name == "COPY":
            source, target = here.split()
            Path(target).mkdir(parents=True)
            for file in glob(str(context / source)):  # noqa: PTH207 - a pattern with a folder
                copy(file, target)
        elif name == "RUN" and rest.startswith(OF_THE_SYSTEM):
            sys.stdout.write(f"left out: {rest}\n")
        elif name == "RUN":
            sys.stdout.write(f"RUN {rest}\n")
            sys.stdout.flush()
            subprocess.run(["sh", "-ec", here], check=True, cwd=root)
            ran.append(rest)
        elif name == "ENV":
            path = here.removeprefix("PATH=")
        elif name == "ENTRYPOINT":
            entry = loads(rest)
        elif name == "CMD":
            default = loads(rest)
    command = [*entry, *(arguments or default)]
    sys.stdout.write(f"{shlex.join(command)}\n")
    sys.stdout.flush()
    subprocess.run(["env", f"PATH={path}", *command], check=True, cwd=root)
    return ran


def main() -> None:
    """Run the repository's Dockerfile."""
    with TemporaryDirectory(prefix="container-") as root:
        run(DOCKERFILE.read_text(), Path(sys.argv[1]).resolve().parent, Path(root), sys.argv[2:])


if __name__ == "__main__":
    main()
