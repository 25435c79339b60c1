"""README, CONTRIBUTING and docs/: what they show runs, parses, exists, and is current."""

import ast
import importlib
import json
import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

import offload
from finetune import app
from finetune.data.rows import Compared, RowForm
from finetune.images.front import EXACT_TYPES
from finetune.planning.request import full_request
from finetune.recipe.load import is_recipe, load_recipe, load_shape
from finetune.recipe.recipe import Recipe, sections, settings, shipped_recipes
from finetune.sweep.variants import variants_of
from offload.plan import named_machine, plan
from tests.bench.gpu.record import PAGE, brief, section, with_section
from tests.builders import model_facts
from tests.conversations import read_conversations
from tests.parity.architectures import seeing_types
from tests.tools.reference import PARTS, current, with_part

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
README = TEXTS["README.md"]
SHELL = ("bash", "console")
MORE_TOKENS = "train.tokens_per_step=98304"
# A minute of plans, and one of visits, which `reference --check` makes in CI.
SLOW_PAGES = ("README.md", "docs/development/launches.md")
AROUND: dict[str, dict[str, Any]] = {
    "model": {"path": "Qwen/Qwen3-8B"},
    "data": {"path": "rows.jsonl", "eval_frac": 0.1},
    "train": {"tokens_per_step": 65536, "steps": 1000},
    "output": {"name": "a-run", "eval_every": 10},
}
INSTEAD = (
    ("data", "mix", "path"),
    ("data", "eval_path", "eval_frac"),
    ("train", "grad_accum_steps", "tokens_per_step"),
    ("train", "epochs", "steps"),
)


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks of all pages in these languages."""
    return [
        Block(page, *found)
        for page, text in TEXTS.items()
        for found in re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        if found[0] in languages
    ]


def command_lines() -> list[tuple[str, str]]:
    """Return page and command of each line that a reader would type."""
    found = []
    for block in blocks(*SHELL):
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            found += [(block.page, part.strip()) for part in line.split("#")[0].split("&&")]
    return [(page, line) for page, line in found if line]


def inline(page: str) -> list[str]:
    """Return what a page has between backquotes, outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose)]


def arguments(words: list[str]) -> list[str] | None:
    """Return the arguments of our own command; None if another program is called."""
    if words[0] == "sluice":
        return words[1:]
    for launched in ("cli.py", "./cli.py"):
        if launched in words:
            return words[words.index(launched) + 1 :]
    return None


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse a command line as typer does, and run nothing."""
    command: Any = typer.main.get_group(app.app)
    name = ""
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"no such command: {name}"
        command = command.commands[name]
    return name, command.make_context(name, words).params


# --------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_every_command_parses_with_its_options_and_settings(page: str, line: str) -> None:
    words = [w for w in shlex.split(line.split(">")[0]) if not re.fullmatch(r"[A-Z_]+=\S*", w)]
    ours = arguments(words)
    if ours is not None:
        name, params = parsed(ours)
        if name in ("finetune", "plan", "validate"):
            recipe = params.get("recipe") or params.get("model")
            overrides = [word for word in params["overrides"] or [] if not is_recipe(word)]
            load_recipe(
                recipe if recipe in shipped_recipes() else "quickstart",
                [word for word in overrides if not word.startswith("train.steps")],
                check_files=False,
            )
        if name == "sweep" and params["settings"]:
            is_zipped = params["is_zipped"]
            variants_of(params["source"], params["settings"], is_zipped=is_zipped, max_runs=64)
    elif words[:2] in (["python", "-m"], ["python3", "-m"]):
        is_cookbook = words[2].startswith("tinker_cookbook.recipes.")  # in its own environment
        is_tool = words[2] in ("pip", "venv", "build")
        assert is_cookbook or is_tool or find_spec(words[2]) is not None, line
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
    else:
        assert words[0] in ("source", ".", "git", "cd", "docker", "export"), (
            f"{page} has a command that nothing checks: {line}"
        )


def runnable() -> list[str]:
    """Return the commands of ours that answer for a card by name, and need no file or GPU."""
    found = set()
    for _, line in command_lines():
        words = arguments(shlex.split(line.split(">")[0])) or [""]
        has_files = any(word.endswith((".yaml", ".json")) or word.isupper() for word in words)
        is_named = words[0] in ("fit", "recipes") or bool({"--machine", "--machines"} & {*words})
        if words[0] in ("fit", "plan", "recipes") and is_named and not has_files:
            found.add(shlex.join(words))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("line", runnable())
def test_every_plan_that_is_shown_runs(line: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        app.main(shlex.split(line))
    refused = re.search(
        rf"^\$ sluice {re.escape(line)}\n(error: .*?)^```", "".join(TEXTS.values()), re.M | re.S
    )
    said = capsys.readouterr()
    assert (exit_info.value.code == 0) == (refused is None), said.err
    assert said.err.split() == refused[1].split() if refused else said.out


def test_a_command_that_does_not_parse_is_found() -> None:
    for line in ("plan quickstart --machin rtx3060", "pland quickstart", "merge runs/a"):
        with pytest.raises(Exception, match=r"(?i)no such|missing"):
            parsed(line.split())


def test_the_example_plan_runs(capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        app.main(["plan", "qwen30b_lora_5090", "--machine", "rtx5090", MORE_TOKENS])
    assert exit_info.value.code == 0
    assert "98,304 tokens" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("page", TEXTS)
def test_commands_and_flags_in_prose_exist(page: str) -> None:
    group: Any = typer.main.get_group(app.app)
    for words in (text.split() for text in inline(page) if text.startswith("sluice ")):
        command = group
        for word in words[1:]:
            if not hasattr(command, "commands") or word.startswith("--"):
                break
            assert word in command.commands, f"{page}: {' '.join(words)}"
            command = command.commands[word]
        flags = {flag for p in command.params for flag in p.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= flags, f"{page}: {words}"


@pytest.mark.parametrize("page", TEXTS)
def test_modules_in_prose_exist(page: str) -> None:
    for words in (text.split() for text in inline(page) if text.startswith("python -m ")):
        assert find_spec(words[2]) is not None, f"{page}: {' '.join(words)}"


# ---------------------------------------------------------------------------------- recipes


def test_every_setting_that_is_named_exists() -> None:
    known = {name: settings(name) for name in sections()}
    for page in TEXTS:
        for text in inline(page):
            name = re.match(r"([a-z]+)\.([a-z_0-9]+)(?=[:=]|$)", text)
            if name is None or name[1] not in known or name[2] in ("json", "html"):
                continue
            is_ours = name[2] in known[name[1]] or (name[1] == "offload" and is_python(text))
            assert is_ours, f"{page} names {text}"


def is_python(name: str) -> bool:
    module, _, attribute = name.partition("(")[0].rpartition(".")
    return hasattr(importlib.import_module(module), attribute) or find_spec(name) is not None


def test_every_value_of_a_setting_in_prose_is_valid() -> None:
    fixes = "docs/reference/compatibility.md"  # followed by tests/property/test_capabilities.py
    for page in (page for page in TEXTS if page != fixes):
        for text in inline(page):
            found = re.fullmatch(r"(data|train|offload|output|report)\.(\w+): (.+)", text)
            if found:
                value = yaml.safe_load(found[3])
                load_values({found[1]: {found[2]: value}}, page)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_recipe_that_is_shown_is_valid(block: Block) -> None:
    load_values(yaml.safe_load(block.text), block.page)


def load_values(shown: dict[str, Any], page: str) -> None:
    """Check settings, in a recipe around them that is valid."""
    values = {name: rest | shown.get(name, {}) for name, rest in AROUND.items()} | {
        name: found for name, found in shown.items() if name not in AROUND
    }
    if shown.get("train") == {"what": "head"}:
        values |= {"objective": {"method": "classify"}}
        values["model"] = values["model"] | {"num_classes": 2}
        values["data"] = values["data"] | {"too_long": "drop"}
    for name, asked, given in INSTEAD:
        if asked in shown.get(name, {}):
            values[name].pop(given, None)
    assert Recipe.model_validate(values), page


@pytest.mark.parametrize("block", blocks("jsonl"))
def test_every_row_that_is_shown_is_read(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(block.text)
    first = json.loads(block.text.splitlines()[0])
    if {"chosen", "completions", "label", "kto_tag"} & {*first}:
        form = RowForm(
            path=str(file),
            data_format="auto",
            columns={},
            system=None,
            ignored=(),
            loss_on="assistant",
            formats=("sampled",) if "rewards" in first else ("preference", "ranking", "labelled"),
        )
        row = form.detected([("rows.jsonl:1", first)]).read("rows.jsonl:1", first)
        assert isinstance(row, Compared)
        assert len({*row.values}) == len(row.conversations)
        return
    rows = read_conversations(
        path=str(file),
        data_format="auto",
        system=None,
    )
    roles = [message.role for message in rows[0].messages]
    assert roles == ["user", "assistant", *(["tool", "assistant"] if rows[0].tools else [])]


@pytest.mark.parametrize("block", blocks("json"))
def test_every_json_that_is_shown_parses(block: Block) -> None:
    json.loads(block.text)


# ----------------------------------------------------------------------------------- Python


@pytest.mark.parametrize("block", blocks("python"))
def test_every_name_that_is_imported_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), f"{block.page}: {name.name}"


PRINTED = {
    "README.md": ["13 layers loaded for 248 tokens"],
    "docs/guides/library.md": [
        "13 layers loaded for 248 tokens",
        "10 layers loaded for 248 tokens",
        "11 slots, 46.1 s per step, 9.8 GiB",
        "3 micro-batches per step",
    ],
}


def executed(page: str) -> dict[str, Any]:
    """Run the Python of a page, block after block, and return its names."""
    names: dict[str, Any] = {}
    for block in blocks("python"):
        if block.page == page:
            exec(compile(block.text, page, "exec"), names)
    return names


@pytest.mark.thorough
@pytest.mark.parametrize("page", PRINTED)
def test_the_python_examples_run_and_print_what_is_said(page: str, capsys) -> None:
    executed(page)
    assert capsys.readouterr().out.splitlines() == PRINTED[page]


@pytest.mark.thorough
def test_the_loss_and_the_runs_of_the_guide_train() -> None:
    names = executed("docs/guides/library.md")
    model, micro_batches = names["model"], names["micro_batches"]
    model.add_adapter("small", model.peft_config["default"])
    model.add_adapter("large", model.peft_config["default"])
    for name, weight in model.named_parameters():
        weight.requires_grad_(".small." in name or ".large." in name)
    engine = offload.attach(model, num_slots=3, device="cpu")
    results = names["step"](engine, micro_batches, micro_batches)
    assert [one.num_label_tokens for one in results] == [248, 248]
    with engine.using("small"):
        result = engine.forward_backward(micro_batches, objective=names["Dpo"]())
    assert result.loss == pytest.approx(math.log(2))  # the adapter is as it was made
    assert result.metrics == {"accuracy": 0}
    assert all(weight.grad is not None for weight in engine.trained_parameters.values())


# ------------------------------------------------------------------------------- references


def test_every_public_name_is_in_the_reference() -> None:
    for package in ("offload", "offload.plan", "finetune"):
        for name in importlib.import_module(package).__all__:
            page = "errors" if name.endswith("Error") else "api"
            text = TEXTS[f"docs/reference/{page}.md"]
            assert re.search(rf"[`.]{name}(`|$)", text, re.MULTILINE), name


def test_every_error_that_a_user_meets_has_a_way_out() -> None:
    guide = TEXTS["docs/guides/troubleshooting.md"]
    bases = {"SluiceError", "OffloadError", "FinetuneError"}
    for package in ("offload", "finetune"):
        names = {n for n in importlib.import_module(package).__all__ if n.endswith("Error")}
        for name in names - bases:
            assert re.search(rf"^## .*\(`{name}`\)$", guide, re.MULTILINE), name


@pytest.mark.parametrize(
    "settings", [["offload.codec=native"], ["offload.stash=host", "train.router_loss_coef=0.1"]]
)
def test_every_term_of_memory_is_explained(settings: list[str]) -> None:
    recipe = load_recipe("qwen30b_qlora_4060ti", settings, check_files=False)
    facts = model_facts(load_shape("qwen3-30b-a3b"))
    machine = named_machine("rtx5090", ram_bytes=96 * 2**30)
    made = plan(facts, machine, full_request(recipe, facts, num_ranks=1))
    explained = TEXTS["docs/concepts/memory.md"]
    for term in (*made.device_memory, *made.host_memory):
        name = re.sub(r".*: ", "", term.name)
        assert name in explained, term.name


def test_a_part_that_is_not_current_is_replaced_and_nothing_else() -> None:
    page = "a\n<!-- generated: x -->\n\nold\n\n<!-- end of x -->\nb\n"
    assert with_part(page, "x", "new\n") == page.replace("old", "new")
    with pytest.raises(AssertionError, match="a page has 0 parts called y"):
        with_part(page, "y", "new\n")


def stale(page: str) -> bool:
    return current(page) != TEXTS[page]


@pytest.mark.parametrize("page", [page for page in PARTS if page not in SLOW_PAGES])
def test_generated_parts_are_current(page: str) -> None:
    assert not stale(page), "`make generate` writes it"


def test_what_is_said_of_speed_is_made_from_the_results_that_are_kept() -> None:
    assert with_section(README, brief()) == README
    page = PAGE.read_text()
    assert with_section(page, section()) == page


def test_types_that_learn_from_images_are_listed() -> None:
    assert seeing_types() in TEXTS["docs/architectures.md"]
    assert f"on text and {len(EXACT_TYPES)} learn from" in TEXTS["README.md"]


def test_counts_of_architectures_are_those_of_the_table() -> None:
    table = TEXTS["docs/architectures.md"]
    written = re.search(
        r"with transformers (\d+\.\d+).*?Of (\d+) .*? (\d+) are exact and (\d+)", table, re.DOTALL
    )
    assert written is not None
    version, num, exact, refused = written.groups()
    for page in ("README.md", "docs/concepts/exactness.md"):
        text = " ".join(TEXTS[page].split())
        assert f"transformers {version}" in text
        found = re.search(
            r"(?i)of (\d+) (?:causal|types) .*?(\d+) are (?:proven )?exact and (\d+)", text
        )
        assert found is not None
        assert found.groups() == (num, exact, refused), page


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


def test_every_file_that_is_linked_from_the_root_exists() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", TEXTS[page]):
            assert (ROOT / target).exists(), f"{page} links {target}"


def test_llms_txt_links_pages_and_every_guide() -> None:
    text = (ROOT / "docs" / "llms.txt").read_text()
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)}
    assert all((ROOT / "docs" / target).exists() for target in linked)
    guides = {f"guides/{file.name}" for file in (ROOT / "docs" / "guides").glob("*.md")}
    assert guides - linked == {"guides/studio.md"}  # for eyes


def paths() -> Iterator[tuple[str, str]]:
    tops = "finetune|offload|tests|docs|recipes"
    for page in TEXTS:
        for text in inline(page):
            if re.fullmatch(rf"(?:{tops})/[\w./-]*", text):
                yield page, text


def test_every_path_that_is_named_exists() -> None:
    absent = [(page, path) for page, path in paths() if not (ROOT / path).exists()]
    assert [one for one in absent if one[1] != "tests/bench/results/"] == []


def test_every_folder_of_readmes_tree_exists() -> None:
    (tree,) = [b.text for b in blocks("text") if b.page == "README.md" and "cli.py" in b.text]
    for line in tree.splitlines():
        assert (ROOT / line.split()[0]).exists(), line


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r"([\w/.-]+\.md)$", navigation, re.MULTILINE))
    assert named == {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}


# ----------------------------------------------------------------------- for contributors


def recipe_of(target: str) -> list[str]:
    """Return the commands of a target of the Makefile."""
    found = re.search(
        rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1].replace("\t", "").splitlines()


def test_ci_runs_what_make_check_runs() -> None:
    ci = re.sub(r"(?m)^in_background \w+ ", "", (ROOT / ".ci/run").read_text()).splitlines()
    assert [line for line in recipe_of("check") if line not in ci] == []


def test_hooks_download_nothing_and_are_checks_of_make() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    checks = recipe_of("check")
    for hook in hooks:
        assert any(check.startswith(hook["entry"]) for check in checks), hook["id"]


def test_a_bug_report_asks_for_the_machine_and_the_report() -> None:
    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["name"]
    assert "`sluice doctor`" in text
    assert "report.json" in text


# ---------------------------------------------------------------------------------- launch commands


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
