"""Which values of a device's program are the same on all devices, and which loops communicate but need others.

A value is uniform if it is made of constants, uniform values and reductions over all axes of the mesh. A loop whose
condition is uniform has as many trips on every device, so no device waits for a collective that another one skips.
"""

from jax.extend.core import Literal, jaxprs_in_params

from sppo_jax.compat import scan_counts
from sppo_jax.pipeline.cpu_order import _communicates

REDUCTIONS = {"pmax", "psum", "psum2", "pmin", "psum_invariant", "pmax_p"}


def loops_that_may_part(closed, inputs, axes) -> list[str]:
    """Returns the loops and branches that hold collectives and whose condition may differ between devices.

    Args:
        closed: the jaxpr of one device.
        inputs: whether each input is uniform.
        axes: all axes of the mesh.
    """
    found: list[str] = []
    _walk(closed, list(inputs), set(axes), found)
    return found


def _walk(closed, inputs, axes, found) -> list[bool]:
    """Returns whether each output is uniform."""
    jaxpr = getattr(closed, "jaxpr", closed)
    known = dict.fromkeys(jaxpr.constvars, True) | dict(zip(jaxpr.invars, inputs, strict=True))

    def of(x):
        return True if isinstance(x, Literal) else known[x]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _outputs(eqn, [of(x) for x in eqn.invars], axes, found), strict=True))
    return [of(x) for x in jaxpr.outvars]


def _outputs(eqn, given, axes, found) -> list[bool]:
    name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
    if name in REDUCTIONS and axes <= set(params["axes"]) and params.get("axis_index_groups") is None:
        return [True] * count
    if name == "axis_index" or (_communicates(eqn) and not list(jaxprs_in_params(params))):
        return [False] * count
    if name == "while":
        return _while(eqn, given, axes, found)
    if name == "scan":
        consts, carried = scan_counts(params)
        fixed, carry, rows = given[:consts], given[consts : consts + carried], given[consts + carried :]
        while True:
            out = _walk(params["jaxpr"], fixed + carry + rows, axes, found)
            next_carry = [a and b for a, b in zip(carry, out[:carried], strict=True)]
            if next_carry == carry:
                return carry + out[carried:]
            carry = next_carry
    if name == "cond":
        outs = [_walk(branch, given[1:], axes, found) for branch in params["branches"]]
        if _communicates(eqn) and not given[0]:
            found.append(f"a branch: {eqn.source_info.name_stack}")
        return [given[0] and all(each) for each in zip(*outs, strict=True)]
    inner = [
        closed for closed in jaxprs_in_params(params) if len(getattr(closed, "jaxpr", closed).invars) == len(given)
    ]
    if inner and len(inner) == len(list(jaxprs_in_params(params))):
        return _walk(inner[0], given, axes, found)
    return [all(given)] * count


def _while(eqn, given, axes, found) -> list[bool]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body, carry = given[:first], given[first:second], given[second:]
    while True:
        out = _walk(params["body_jaxpr"], of_body + carry, axes, found)
        next_carry = [a and b for a, b in zip(carry, out, strict=True)]
        if next_carry == carry:
            break
        carry = next_carry
    same = all(_walk(params["cond_jaxpr"], of_condition + carry, axes, found))
    if _communicates(eqn) and not same:
        found.append(f"a loop: {eqn.source_info.name_stack}")
    return carry if same else [False] * len(carry)
