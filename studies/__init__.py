"""Comparisons with other systems and published figures."""
