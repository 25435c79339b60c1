"""Pages to look at: one HTML file each, which loads nothing from elsewhere."""
