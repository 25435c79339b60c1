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
        is_of_card: Whether its figures are those of card and host, whatever the code: they are
            not measured again where they are kept for this card.
    """

    name: str
    module: str
    limit_s: float = 115.0
    rehearsal_s: float = 120.0
    what: str
    setting: str = ""
    is_of_card: bool = False


CASES = (
    Case(
        name="tiles",
        module="precompile",
        limit_s=60.0,
        what="Triton's kernels compiled on all cores, before anything is timed",
    ),
    Case(name="lane", module="lane", limit_s=230.0, what="a layer's visit by each lever"),
    Case(
        name="exact",
        module="exact",
        what="streamed equals resident to the bit, by the defaults",
        setting="CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ),
    Case(name="moe30b", module="moe30b", what="Qwen3-30B-A3B through a smaller card"),
    Case(name="dense", module="dense", what="Qwen3-8B and Qwen3-32B likewise"),
    Case(name="launches", module="launches", limit_s=180.0, what="visits as graphs, and compiled"),
    Case(
        name="products",
        module="products",
        limit_s=40.0,
        what="products of the models' shapes; the probe's timer on an idle and on a busy stream",
        is_of_card=True,
    ),
    Case(
        name="flagship",
        module="flagship",
        limit_s=180.0,
        what="recipes/qwen30b_lora_5090.yaml, whole, by its command",
    ),
    Case(
        name="peers",
        module="peers.case",
        limit_s=530.0,
        rehearsal_s=180.0,
        what="side by side with other programs",
    ),
    Case(
        name="probe",
        module="rates",
        limit_s=60.0,
        what="rates of the card, link and host",
        is_of_card=True,
    ),
    Case(name="profile", module="kernels", limit_s=75.0, what="where a warm step's time goes"),
    Case(name="tests", module="suite", limit_s=180.0, what="the tests that need a card"),
    Case(name="packed", module="packed", what="packed rows by one call of attention, and by rows"),
    Case(name="ablate", module="ablate", what="what each part of the engine is worth"),
    Case(name="pointwise", module="pointwise", what="fused operators against Liger's"),
    Case(name="sweep", module="sweep", what="tiles of the experts' kernels, by kernel"),
    Case(name="grouped", module="existing", what="experts by each way"),
    Case(name="codecs", module="existing", limit_s=60.0, what="forms of weights"),
    Case(
        name="predict",
        module="existing",
        limit_s=300.0,
        what="sealed predictions of drawn runs",
    ),
)
OF_CARD = frozenset(case.name for case in CASES if case.is_of_card)

WINDOW_S = 570.0
"""What a window's command may take, all of it: machines are lent by the quarter of an hour."""
START_S = 15.0
"""Of these, what the command itself takes to start and to write the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A case's turn in a window.

    Attributes:
        case: Its name.
        limit_s: What it may take there, its start included.
        parts: The only ones that it measures; None leaves them to it.
        decides: What its figures settle.
    """

    case: str
    limit_s: float
    decides: str
    parts: tuple[str, ...] | None = None


WINDOWS = {
    "A": (
        Turn(
            case="tiles",
            limit_s=45.0,
            decides="nothing: what comes next finds kernels compiled",
            parts=("experts", "pointwise"),
        ),
        Turn(
            case="lane",
            limit_s=165.0,
            decides="tiles and stages, triton or grouped_mm, graphs, which passes are left",
        ),
        Turn(case="exact", limit_s=70.0, decides="whether the defaults are exact on a card"),
        Turn(
            case="moe30b",
            limit_s=95.0,
            decides="mixture >= 55 % of the best product; R3 with the defaults; launches",
            parts=("qwen3-30b-a3b-plain-24GiB-8192-2", "qwen3-30b-a3b-plain-24GiB-2048-0.5"),
        ),
        Turn(
            case="dense",
            limit_s=65.0,
            decides="dense >= 75 % of the best product",
            parts=("qwen3-8b-plain-12GiB-8192-2",),
        ),
        Turn(
            case="launches",
            limit_s=40.0,
            decides="whether visits are to be captured",
            parts=("qwen3-0.6b-512", "llama-3.1-8b-512", "llama-3.1-8b-2048"),
        ),
        Turn(case="products", limit_s=25.0, decides="the ceiling; how the probe is to time"),
        Turn(case="probe", limit_s=35.0, decides="rates of a card that has none kept"),
    ),
    "B": (
        Turn(
            case="tiles",
            limit_s=35.0,
            decides="nothing: what comes next finds kernels compiled",
            parts=("experts", "pointwise"),
        ),
        Turn(
            case="flagship",
            limit_s=150.0,
            decides="the plan within 10 % blind and 5 % calibrated; its peaks",
        ),
        Turn(
            case="peers",
            limit_s=190.0,
            decides="as fast as the fastest peer where all fits",
            parts=(
                *(f"8b-resident {peer}" for peer in ("sluice", "sdpa", "liger", "compiled", "all")),
                *(f"8b-nemo {peer}" for peer in ("sluice", "liger", "compiled", "sdpa", "all")),
            ),
        ),
        Turn(
            case="tiles",
            limit_s=45.0,
            decides="nothing: the sweep finds kernels compiled",
            parts=("sweep",),
        ),
        Turn(case="sweep", limit_s=45.0, decides="the table of tiles, by kernel"),
        Turn(case="pointwise", limit_s=35.0, decides="ours or Liger's operators"),
        Turn(
            case="tests",
            limit_s=45.0,
            decides="which of the tests for a card that failed still fail, by name",
            parts=(  # of 11 failures these files hold what the causes in LOG_ARCHIVE.md point to
                "tests/unit/offload/engine/experts/test_experts.py",
                "tests/parity/test_fused_experts.py",
                "tests/e2e/test_finetune.py",
                "tests/parity/test_packed.py",
                "tests/unit/offload/engine/test_codecs.py",
                "tests/parity/test_cuda.py",
            ),
        ),
    ),
}


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
