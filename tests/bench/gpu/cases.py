"""The cases, those first that tell most, and how long each may take."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case.

    Attributes:
        name: What it is called.
        module: Of this package; has `run(settings, journal)`.
        limit_s: After this it is ended, on a card.
        rehearsal_s: Likewise in a rehearsal, where it should take 10 to 30 s.
        what: What it shows.
        setting: Of its environment, NAME=VALUE, where it needs one.
    """

    name: str
    module: str
    limit_s: float = 115.0
    rehearsal_s: float = 120.0
    what: str
    setting: str = ""


CASES = (
    Case(name="probe", module="rates", limit_s=60.0, what="rates of the card, link and host"),
    Case(
        name="exact",
        module="exact",
        what="streamed equals resident to the bit",
        setting="CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ),
    Case(name="moe30b", module="moe30b", what="Qwen3-30B-A3B through a smaller card"),
    Case(name="profile", module="kernels", limit_s=75.0, what="where a warm step's time goes"),
    Case(name="dense", module="dense", what="Qwen3-8B and Qwen3-32B likewise"),
    Case(name="tests", module="suite", limit_s=180.0, what="the tests that need a card"),
    Case(
        name="launches",
        module="launches",
        limit_s=180.0,
        what="visits as CUDA graphs, and compiled",
    ),
    Case(name="packed", module="packed", what="packed rows by one call of attention, and by rows"),
    Case(name="ablate", module="ablate", what="what each part of the engine is worth"),
    Case(name="grouped", module="existing", what="experts by each way, and by tile"),
    Case(name="codecs", module="existing", limit_s=60.0, what="forms of weights"),
    Case(
        name="predict",
        module="existing",
        limit_s=300.0,
        what="sealed predictions of drawn runs",
    ),
    Case(
        name="peers",
        module="peers.case",
        limit_s=530.0,
        rehearsal_s=180.0,
        what="side by side with other programs",
    ),
)


def named(names: str | None) -> tuple[Case, ...]:
    """Return the cases of a list with commas, or all.

    Raises:
        SystemExit: There is none of that name.
    """
    if names is None:
        return CASES
    known = {case.name: case for case in CASES}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"no case {unknown[0]}; there are {', '.join(known)}")
    return tuple(known[name] for name in names.split(","))
