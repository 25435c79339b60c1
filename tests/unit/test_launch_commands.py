"""Command lines of launchers in the documentation, by the launchers' own parsers."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
PARSERS = {"accelerate launch": launch_command_parser, "torchrun": get_args_parser}
COMMAND = re.compile(r"(accelerate launch|torchrun)((?: (?!cli\.py)[^`' ]+)*)( cli\.py)?")
VARIABLE = re.compile(r"\$\w+")
# Of the manual of sbatch: those that the documentation names.
SBATCH = {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "signal"}
GUIDE = ROOT / "docs/guides/several-gpus.md"


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """Return each launcher with its words up to the program; continued lines are joined."""
    joined = " ".join(text.replace("\\\n", " ").split())
    found = [
        (name, shlex.split(VARIABLE.sub("1", rest + program)))
        for name, rest, program in COMMAND.findall(joined)
    ]
    return [(name, words) for name, words in found if words and words[0].startswith("--")]


def shown() -> list[tuple[str, list[str]]]:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [command for file in files for command in commands_of(file.read_text())]


def parse(name: str, words: list[str]) -> None:
    PARSERS[name]().parse_args(words if words[-1] == "cli.py" else [*words, "cli.py"])


def slurm_script() -> str:
    (script,) = re.findall(r"```text\n(#!/bin/bash\n.*?)```", GUIDE.read_text(), re.DOTALL)
    return str(script)


@pytest.mark.parametrize(("name", "words"), shown(), ids=lambda part: str(part)[:60])
def test_launchers_know_the_options_that_are_shown(name: str, words: list[str]) -> None:
    parse(name, words)


def test_the_guide_shows_each_launcher_on_one_machine_and_on_several() -> None:
    found = [(name, "cli.py" in words) for name, words in commands_of(GUIDE.read_text())]
    assert found.count(("torchrun", True)) >= 3  # two boxes, Slurm
    assert ("accelerate launch", True) in found


@pytest.mark.parametrize("name", PARSERS)
def test_an_option_that_a_launcher_does_not_have_is_found(name: str) -> None:
    with pytest.raises(SystemExit):
        parse(name, ["--number-of-boxes", "2", "cli.py"])


def test_directives_of_slurm_are_known_and_stand_before_the_first_command() -> None:
    script = slurm_script()
    lines = script.splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(directives)] == directives  # Slurm reads none after a command
    names = [name for line in directives for name, _ in re.findall(r" --([a-z-]+)=(\S+)", line)]
    assert names
    assert set(names) <= SBATCH
    for line in directives:
        assert re.fullmatch(r"#SBATCH( --[a-z-]+=\S+)+", line)
    (gpus,) = re.findall(r"--gpus-per-node=(\d+)", script)
    assert f"--nproc-per-node {gpus}" in script
    assert "--ntasks-per-node=1" in script  # a launcher on each node
    checked = subprocess.run(["bash", "-n"], input=script, text=True, check=False)
    assert checked.returncode == 0
