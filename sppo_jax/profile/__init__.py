"""Figures measured on the devices present: how they are measured, and how they are stored for the planner."""
