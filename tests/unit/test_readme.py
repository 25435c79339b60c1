import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_library_example_runs_and_prints_what_is_said(capsys) -> None:
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "13 layers loaded for 248 tokens",
        "10 layers loaded for 248 tokens",
    ]
    assert "`13 layers loaded for 248 tokens`, then `10`" in README


def test_the_example_recipe_is_valid(tmp_path: Path) -> None:
    from finetune.recipe_file import load_recipe

    (example,) = blocks("yaml")
    file = tmp_path / "example.yaml"
    file.write_text(example)
    assert load_recipe(str(file), [], check_files=False).train.num_micro_batches == 16


def test_the_example_plan_runs(capsys) -> None:
    from finetune import app

    (command,) = [b for b in blocks("bash") if b.startswith("sluice plan")]
    with pytest.raises(SystemExit) as exit_info:
        app.main(command.split()[1:])
    assert exit_info.value.code == 0
    assert "98,304 tokens" in capsys.readouterr().out


def test_every_command_is_documented() -> None:
    import typer

    from finetune import app

    group = typer.main.get_group(app.app)
    for name in group.commands:
        assert f"`sluice {name}" in README, name


def test_every_setting_of_the_adapter_is_documented() -> None:
    from finetune.recipe_sections import AdapterSection

    for name in AdapterSection.model_fields:
        assert re.search(rf"(`| ){name}[:`]", README), name


def test_every_schedule_and_what_it_reads_is_documented() -> None:
    from typing import get_args

    from finetune.recipe_sections import Schedule, TrainSection

    for name in get_args(Schedule):
        assert f"`{name}`" in README, name
    rates = ("schedule", "num_cycles", "neftune_alpha", "warmup", "early_stopping")
    for name in TrainSection.model_fields:
        assert not name.startswith(rates) or f"`train.{name}" in README, name
    assert "`output.best_checkpoint: keep`" in README


def test_every_way_to_multiply_experts_is_documented() -> None:
    from typing import get_args

    from offload.plan.machine import ExpertsImplementation

    assert "`model.experts_implementation`" in README
    for way in ("auto", *get_args(ExpertsImplementation)):
        assert f"\n| `{way}` | " in README, way


def test_every_file_that_the_tree_names_exists() -> None:
    (tree,) = blocks("text")
    root, folder = Path(__file__).parents[2], Path()
    for line in tree.splitlines():
        names = re.match(r"( *)((?:[\w/.]+, )*[\w/.]+)  ", line)
        assert names is not None, line
        for name in names[2].split(", "):
            path = (folder if names[1] else Path()) / name
            assert (root / path).exists(), path
            if name.endswith("/"):
                folder = path


def test_what_is_said_of_speed_is_made_from_the_results_that_are_kept() -> None:
    from tests.bench.gpu.record import section, with_section

    assert with_section(README, section()) == README
