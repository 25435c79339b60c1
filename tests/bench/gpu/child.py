"""One case, in a process of its own: `python -m tests.bench.gpu.child NAME SETTINGS`."""

import importlib
import sys
import traceback

from tests.bench.gpu.cases import named
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.settings import Settings


def main() -> int:
    """Run the case; return 1 if it failed."""
    name, text = sys.argv[1:]
    (case,) = named(name)
    settings = Settings.from_json(text)
    journal = Journal(settings, case.name)
    try:
        importlib.import_module(f"tests.bench.gpu.{case.module}").run(settings, journal)
    except Exception:  # noqa: BLE001  # told by the parent, whatever it is
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
