"""Codecs: how weights are encoded while off the device, and decoded for a visit."""
