"""Measures this machine into a `Machine`: rates, links, memory."""
