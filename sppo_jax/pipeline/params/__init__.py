"""Where parameters lie: between steps, in a step, and on the host."""
