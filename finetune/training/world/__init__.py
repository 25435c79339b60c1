"""The processes of a launch: how they find each other, and how they notice that one is gone."""
