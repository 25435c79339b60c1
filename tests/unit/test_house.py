"""Rules of the house that no linter knows."""

import ast
import importlib
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.tools import private_uses

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "finetune", ROOT / "offload")
SOURCES = [ROOT / "cli.py", *(file for package in PACKAGES for file in package.rglob("*.py"))]
TESTS = list((ROOT / "tests").rglob("*.py"))
FOLDERS = sorted({file.parent for file in SOURCES[1:]})


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def test_private_names_of_other_libraries_are_few_and_each_has_the_version_it_was_read_in() -> None:
    found = private_uses.uses()
    read = {name for names in private_uses.READ_IN.values() for name in names.split()}
    assert {name for names in found.values() for name in names} == read
    assert sum(names.total() for names in found.values()) <= private_uses.MAX_USES
    assert len(found) <= private_uses.MAX_FILES


@pytest.mark.slow
@pytest.mark.parametrize("library", [one for one in private_uses.READ_IN if "Python" not in one])
def test_each_private_name_is_still_in_its_library(library: str) -> None:
    (folder,) = importlib.import_module(library.split()[0]).__path__
    left = {name.removeprefix("torch.") for name in private_uses.READ_IN[library].split()}
    left = {name.replace(".", "/") for name in left}
    for path in chain(Path(folder).rglob("*.py*"), Path(folder).rglob("*.h")):
        if path.suffix != ".pyc":
            text = path.read_text(errors="ignore")
            left -= {name for name in left if name in text or name in str(path)}
    assert not left


def test_source_is_ascii() -> None:
    assert [named(path) for path in SOURCES if not path.read_text().isascii()] == []


def test_every_folder_says_in_a_sentence_what_belongs_there() -> None:
    said = {named(folder): ast.get_docstring(_parsed(folder / "__init__.py")) for folder in FOLDERS}
    sentences = {name: (text or "").partition("\n\n")[0] for name, text in said.items()}
    assert [name for name, sentence in sentences.items() if not sentence.endswith(".")] == []


def test_no_test_module_is_imported_by_another() -> None:
    imported = {
        (named(file), node.module)
        for file in TESTS
        for node in ast.walk(_parsed(file))
        if isinstance(node, ast.ImportFrom) and node.module
        if any(part.startswith("test_") for part in node.module.split("."))
        or (node.module.startswith("tests") and any(a.name.startswith("test_") for a in node.names))
    }
    assert imported == set()


# -------------------------------------------------------------------------------------------- parts


CONFTEST = Path(__file__).parents[1] / "conftest.py"
PARTS_TESTS = """
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


def test_each_slow_test_is_in_one_part_and_each_thorough_one_in_a_quarter_of_them(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    thorough\n")
    pytester.makepyfile(PARTS_TESTS)
    parts = list[list[str]]()
    for part in range(8):
        words = ("--part", f"{part + 1}/8", "--collect-only", "-q", "-p", "no:cacheprovider")
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
    assert thorough[:4] == thorough[4:]
    assert sorted(chain(*thorough[:4])) == sorted(f"test_thorough[{case}]" for case in range(24))


# ------------------------------------------------------------------------------------------- public


PUBLIC = {
    "offload": {
        "CodecError",
        "DoesNotFitError",
        "MachineError",
        "OffloadError",
        "SluiceError",
        "StoreError",
        "TransferError",
        "UnsupportedModelError",
        "attach",
        "detach",
    },
    "offload.plan": {
        "AdapterSpec",
        "Choice",
        "Machine",
        "ModelFacts",
        "Plan",
        "PlanRequest",
        "Rate",
        "Timeline",
        "Workload",
        "described_machine",
        "named_machine",
        "plan",
        "search",
    },
    "finetune": {
        "CheckpointError",
        "ConfigError",
        "DataError",
        "FinetuneError",
        "MergeError",
        "Merged",
        "ModelError",
        "RankError",
        "Recipe",
        "load_recipe",
        "merge",
        "model_facts",
    },
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_what_it_declares_and_each_name_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    for name in PUBLIC[package]:
        assert getattr(module, name).__doc__, name


def test_a_name_that_a_package_lacks_is_an_attribute_error() -> None:
    import finetune

    with pytest.raises(AttributeError, match="module 'finetune' has no attribute 'lora'"):
        _ = finetune.lora


def test_plan_is_the_function_in_the_package_and_the_module_by_its_full_name() -> None:
    code = (
        "import offload.plan.facts.codec\n"
        "from offload.plan.plan import Plan, plan as by_module\n"
        "from offload.plan import plan\n"
        "assert plan is by_module and callable(plan)\n"
        "import sys; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", PUBLIC)
def test_importing_a_package_loads_no_torch(package: str) -> None:
    code = f"import sys, {package}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --------------------------------------------------------------------------------------- gpu marker


GPU_MARKER_TESTS = """
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
    pytester.makepyfile(GPU_MARKER_TESTS)
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
