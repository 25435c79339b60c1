"""Extensions by name: which of other packages are refused where they are listed or asked for."""

from pathlib import Path

import pytest

from offload.errors import OffloadError
from offload.plan.facts.codec import Codec
from offload.registry import Registry

# Packages with the entry points of each; what is wrong with them, and what to do.
CASES = (
    (
        {"acme": "nf4 = acme.codec:EXTENSION"},
        "acme.codec:EXTENSION of the package acme is named nf4, and so is one of Sluice itself;"
        " each of sluice.codecs has a name of its own",
        "rename the entry point of acme, or `pip uninstall acme`",
    ),
    (
        {"acme": "small = acme.codec:EXTENSION", "zeta": "small = zeta:SMALL"},
        "zeta:SMALL of the package zeta is named small, and so is acme.codec:EXTENSION of the"
        " package acme; each of sluice.codecs has a name of its own",
        "rename the entry point of zeta, or `pip uninstall zeta`",
    ),
    (
        {"acme": "small = pathlib:Path"},
        "pathlib:Path of the package acme is a type; an entry point of sluice.codecs is a Codec",
        "correct small there, or `pip uninstall acme`",
    ),
)


@pytest.mark.parametrize(("packages", "said", "hint"), CASES)
@pytest.mark.parametrize("ask", [lambda found: dict(found), lambda found: found["small"]])
def test_an_extension_that_cannot_be_is_refused(
    packages: dict[str, str], said: str, hint: str, ask, tmp_path: Path, monkeypatch
) -> None:
    for name, points in reversed(packages.items()):
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[sluice.codecs]\n{points}\n")
        monkeypatch.syspath_prepend(tmp_path / name)
    with pytest.raises(OffloadError) as error:
        ask(Registry("codecs", "offload.codecs", Codec))
    assert str(error.value) == f"{said}\n\nhint: {hint}"
