"""Sluice within other tools."""
