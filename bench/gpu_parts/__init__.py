"""The parts of `bench/gpu.py`, some of `bench/tpu.py` too: each lists its cases, runs one, and lowers its programs."""
