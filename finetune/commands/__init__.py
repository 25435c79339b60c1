"""Commands that do not train, a file each."""
