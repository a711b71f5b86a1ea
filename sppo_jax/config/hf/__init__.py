"""The config.json of a Hugging Face model as settings, family by family; no jax."""
