"""The parts of `bench/gpu.py`: each module lists its cases, runs one, and lowers its programs for the compiler."""
