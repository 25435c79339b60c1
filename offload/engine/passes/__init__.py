"""The parts of a pass over the layers: its ops, its copies, and what comes after the last layer."""
