"""Tokens that were made once, and what was left out."""
