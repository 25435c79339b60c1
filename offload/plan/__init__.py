"""Pure planning: sizes, costs, schedule and simulation. No torch, no clock, no environment."""
