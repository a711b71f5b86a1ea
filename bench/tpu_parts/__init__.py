"""The parts of `bench/tpu.py` that are not those of GPUs too."""
