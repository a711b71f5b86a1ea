"""Where parameters lie, under the old path; it is `sppo_jax.stored_shapes` and `sppo_jax.param_shardings`."""

from sppo_jax.pipeline.params.storage import param_shardings as param_shardings
from sppo_jax.pipeline.params.storage import stored_shapes as stored_shapes
