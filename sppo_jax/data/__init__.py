"""Documents, their packing into sequences, and the loader; imports no jax.

In the order of the folders: a source is files in `storage` of one of the `forms`. Its rows have `content`: text,
conversations (`chat`) or tokens. `sources` makes `tokens` of them once and keeps these in the `cache`. `rows` packs
documents into sequences. `open.py` does all of this for a config, and `loader.py` makes batches.
"""
