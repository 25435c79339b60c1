"""Files that a kill leaves whole and a reader checks: written at once, sealed, validated."""
