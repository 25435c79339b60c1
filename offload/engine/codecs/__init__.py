"""Codecs: how weights are written down while they wait, and read back for a visit."""
