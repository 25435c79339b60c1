"""What is released: extras, the index, the container's commands, the release job."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.tools import container, index

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_docs_say_what_each_extra_brings() -> None:
    page = (ROOT / "docs" / "guides" / "install.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == set(EXTRAS)


def test_hints_name_extras_that_exist() -> None:
    files = [*ROOT.glob("finetune/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "Dockerfile"]
    pattern = r"(?:sluice-finetune|\.whl\))\[([\w,{}]+)\]"
    named = {name for file in files for name in re.findall(pattern, file.read_text())}
    assert {"images", "studio", "trl", "lm_eval"} <= named
    literal = {extra for name in named - {"{place}"} for extra in name.split(",")}
    assert literal <= set(EXTRAS)


@pytest.mark.parametrize(("module", "extra"), [("sft", "trl"), ("lm_eval", "lm_eval")])
def test_an_integration_names_the_extra_that_is_missing(module: str, extra: str) -> None:
    program = f"import sys; sys.modules[{extra!r}] = None; import finetune.integrations.{module}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert f"{extra} is not installed: `pip install 'sluice-finetune[{extra}]'`" in (
        " ".join(done.stderr.split()).replace(f"{extra}.api", extra)
    )


def test_pip_finds_a_package_in_the_folder(tmp_path: Path) -> None:
    packages = tmp_path / "dist"
    packages.mkdir()
    (packages / "some_name-1.0-py3-none-any.whl").write_bytes(b"a wheel")
    (packages / "some_name-1.0.tar.gz").write_bytes(b"an sdist")
    (page,) = index.lay_out(packages, tmp_path / "index")
    asked = f"file://{tmp_path}/index/simple"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--isolated", "-v", "download", "--no-deps"),
            *("--dest", str(tmp_path), "--index-url", asked, "some-name==1.0"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert page == tmp_path / "index" / "simple" / "some-name" / "index.html"
    assert "some_name-1.0-py3-none-any.whl" in done.stdout


def test_an_empty_folder_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no wheel and no sdist: `python -m build`"):
        index.lay_out(tmp_path, tmp_path / "index")


def test_the_commands_of_a_container_run_in_a_folder(tmp_path: Path) -> None:
    context, root = tmp_path / "context", tmp_path / "root"
    (context / "dist").mkdir(parents=True)
    (context / "dist" / "a.whl").write_text("a wheel")
    root.mkdir()
    text = (
        "# a comment\nFROM base\nRUN apt-get update \\\n    && false\nCOPY dist/*.whl /opt/dist/\n"
        "RUN cat /opt/dist/*.whl > /opt/read\nENV PATH=/opt/bin:/usr/bin:/bin\n"
        'ENTRYPOINT ["cp", "opt/read"]\nCMD ["by-default"]\n'
    )
    assert container.run(text, context, root, ()) == ["cat /opt/dist/*.whl > /opt/read"]
    assert (root / "by-default").read_text() == "a wheel"


def test_the_container_runs_sluice_as_a_user_who_is_not_root() -> None:
    steps = list(container.instructions((ROOT / "Dockerfile").read_text()))
    last = dict(steps)
    assert last["USER"] != "root"
    assert f"useradd --create-home --uid 10001 {last['USER']}" in [text for _, text in steps]
    assert json.loads(last["ENTRYPOINT"]) == ["sluice"]


def test_only_the_upload_may_ask_for_the_right_to_upload_and_only_what_was_tried() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, upload = job["jobs"]["build"], job["jobs"]["upload"]
    assert (job["permissions"], "permissions" in build) == ({"contents": "read"}, False)
    assert (upload["needs"], upload["permissions"]) == ("build", {"id-token": "write"})
    assert any(".ci/wheel" in step.get("run", "") for step in build["steps"])
    assert not any("run" in step or "checkout" in step["uses"] for step in upload["steps"])
