"""Several rows in one sequence, none of which sees another."""
