"""The commands of `sppo`, one file each; none imports jax before it knows the devices."""
