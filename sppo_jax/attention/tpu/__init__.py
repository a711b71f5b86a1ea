"""The attention kernel for TPUs."""
