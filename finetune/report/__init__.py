"""Plans and runs as rows, and drawings; it computes nothing that a run depends on."""
