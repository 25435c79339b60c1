"""The versions that were tested."""

TESTED = ("5.23", "5.24")  # minor versions of transformers; `make nightly` runs on both ends


def untested(version: str | None) -> str | None:
    """Return what to say of a version of transformers; nothing of one that was tested."""
    if version is None or ".".join(version.split(".")[:2]) in TESTED:
        return None
    return (
        f"transformers {version} was not tested, only {' and '.join(TESTED)}: each model is still"
        " compared before its first gradient, but may be slower;"
        f" `pip install 'transformers=={TESTED[-1]}.*'` for one that was"
    )
