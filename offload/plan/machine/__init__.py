"""The rates and capacities of a machine, and the cards that are known by name."""
