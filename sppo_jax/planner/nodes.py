"""What a search sets out from: every choice of a request with a rough bound of its step, dK and dV in any dtype."""

from dataclasses import dataclass

from sppo_jax.planner.floors import Floors
from sppo_jax.planner.frames import Frame, frames
from sppo_jax.planner.request import Request
from sppo_jax.planner.stash import Places, place_options


@dataclass(frozen=True, kw_only=True)
class Node:
    """A choice on its way: a frame of layout, schedule and chunk count, with places and a rule for alpha."""

    frame: Frame
    places: Places
    alpha: str | float | tuple[float, ...]

    @property
    def key(self) -> tuple:
        """What makes a plan another one to a reader."""
        layout = self.frame.layout
        return layout.mesh, layout.interleave, self.frame.num_chunks, self.places


@dataclass(frozen=True, kw_only=True)
class Start:
    """All nodes of a request.

    Args:
        nodes: the nodes; those of a frame follow each other, and so do the frames of a layout.
        bounds: of each node, about the least seconds of its step.
        errors: why some frames have none.
    """

    nodes: tuple[Node, ...]
    bounds: tuple[float, ...]
    errors: tuple[ValueError, ...]


def start_of(request: Request) -> Start:
    """Returns all nodes of a request.

    Raises:
        ValueError: the config, the model and the devices allow none.
    """
    asked = request.config.stash
    alpha = "hidden" if asked.alpha == "auto" else asked.alpha
    # Seconds do not depend on the dtype of dK and dV.
    floors = Floors(request, "float32")
    nodes, bounds, errors = [], [], []
    for frame in frames(request):
        try:
            options = place_options(asked, frame.layout.layers)
        except ValueError as error:
            errors.append(error)
            continue
        nodes += [Node(frame=frame, places=places, alpha=alpha) for places in options]
        bounds += floors.rough_step_s(frame, options)
    return Start(nodes=tuple(nodes), bounds=tuple(bounds), errors=tuple(errors))
