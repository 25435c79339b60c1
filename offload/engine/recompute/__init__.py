"""What a recompute need not do: products that nothing reads, attention, whole graphs; in tiles."""
