"""Runs that share an engine: what they are planned as, and how their steps are computed."""
