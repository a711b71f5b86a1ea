"""`make_mesh` under its old path; it is `sppo_jax.make_mesh`."""

from sppo_jax.pipeline.params.layout import make_mesh as make_mesh
