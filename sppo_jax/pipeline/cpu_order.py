"""One order of a program's collectives on every device, where the runtime keeps none.

XLA:CPU runs on a pool of threads whatever has its inputs. The collectives of one computation it starts in one order,
but a loop counts as started before the collectives inside it are: one that comes after the loop, and needs nothing of
it, may overtake them, on some devices and not on others. Devices then wait for each other without end, or exchange with
the wrong collective, since all of `shard_map`'s have one channel (seen with jaxlib 0.10.2, with twice as many threads
as devices); since jaxlib 0.12 even neighbours change places. GPUs and TPUs keep the order of the compiler's schedule.

So here every collective is made to need something of the last loop before it (with newer runtimes of its neighbour
too). Most do anyway; the others get an input that waits. Every loop carries a token: a number that counts steps. The
token's first value needs all collectives and loops before the loop, and what comes later waits for the last value.

What a value needs is a set of bits, one for each event (see `_Run`). Two bits say what else the value is made of:
`_DATA`, which the compiler does not know, and `_TABLE`, which it knows and which is not one number throughout.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import reduce
from itertools import groupby
from operator import and_, or_

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, jaxprs_in_params

from sppo_jax.compat import is_on_host, neighbours_keep_order, scan_counts

_DATA, _TABLE, _FIRST = 1, 2, 4  # and the first event


def in_order(f: Callable) -> Callable:
    """Returns `f` with the collectives in one order, for the body of a `shard_map` on CPUs.

    Args:
        f: of trees of arrays, to a tree of arrays; collectives may be in scans, not in branches.

    Returns:
        A function of the same results. Collectives that the compiler adds for its inputs come before its own, those
        that it adds for its outputs after them.

    Raises:
        NotImplementedError: the function: there are collectives in something else than scans.
    """

    def ordered(*args):
        leaves, tree = jax.tree.flatten(args)
        closed, shape = jax.make_jaxpr(lambda *xs: f(*jax.tree.unflatten(tree, xs)), return_shape=True)(*leaves)
        run = _Run([leaves])
        if not neighbours_keep_order():
            # What it knows, the compiler folds, and with it what a collective was made to need.
            closed = closed.replace(consts=[_wait(jnp.asarray(x), leaves) for x in closed.consts])
        run.evaluate(closed, leaves, [_DATA] * len(leaves))
        return jax.tree.unflatten(jax.tree.structure(shape), run.results(closed.jaxpr.outvars))

    return ordered


class _Run:
    """An evaluation of a jaxpr in which every collective gets its place.

    Collectives, and scans that hold some, are events. An event's number is its bit in a set; `needs` has for each
    variable the set of events whose results it is made of.

    Args:
        events: for each event before all others, values that are there once it is over.
    """

    def __init__(self, events: Sequence[Sequence[jax.Array]] = ()):
        self.events = [(), (), *events]  # the first two bits are of no event
        self.last_loop = 0  # a set of at most one event; all older ones are before it
        self.values: dict = {}
        self.needs: dict = {}

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[jax.Array], needs: Sequence[int]) -> None:
        """Evaluates all equations; `needs` has what the inputs are made of."""
        jaxpr = closed.jaxpr
        self._set(jaxpr.constvars, closed.consts, map(_of_constant, closed.consts))
        self._set(jaxpr.invars, inputs, needs)
        self._evaluate(jaxpr)

    def _evaluate(self, jaxpr: Jaxpr) -> None:
        for communicates, eqns in groupby(jaxpr.eqns, _communicates):
            if communicates:
                self._communicate(jaxpr, eqns)
            else:
                self._compute(jaxpr, list(eqns))

    def _communicate(self, jaxpr: Jaxpr, eqns: Iterable[JaxprEqn]) -> None:
        for eqn in eqns:
            if _is_one_step(eqn):
                self._once(eqn)
            elif eqn.primitive.name == "scan":
                self._scan(eqn)
            elif eqn.primitive.name == "while":
                self._while(eqn)
            else:
                self._collective(jaxpr, eqn)

    def results(self, variables: Sequence) -> list[jax.Array]:
        """Returns the values of a whole program's results, of which one waits for the last loop's token.

        The compiler takes a token that nothing reads out of its loop, and with it what the loop waits for.
        """
        values = [self.after_loops(x) for x in variables]
        if self.last_loop and all(self._needed([x]) & self.last_loop for x in variables):
            here = [i for i, value in enumerate(values) if not is_on_host(value)]
            least = min(here, key=lambda i: values[i].size)
            values[least] = _wait(values[least], [self.token()])
        return values

    def after_loops(self, x) -> jax.Array:
        """Returns a variable's value, which waits for the last loop and, where needed, for a neighbour."""
        neighbour = 0 if neighbours_keep_order() else (1 << len(self.events)) >> 1
        witnesses = self._witnesses((self.last_loop | neighbour) & ~self._needed([x]))
        return _wait(self.value(x), witnesses) if witnesses else self.value(x)

    def token(self) -> jax.Array:
        """Returns a number that is there once the last loop is over, and all that communicates after the loop."""
        return _never(self._witnesses(((1 << len(self.events)) - 1) & ~max(self.last_loop - 1, 0))).astype(jnp.float32)

    def value(self, x) -> jax.Array:
        """Returns a variable's value."""
        return x.val if isinstance(x, Literal) else self.values[x]

    def _set(self, variables: Sequence, values: Sequence[jax.Array], needs: Iterable[int]) -> None:
        for variable, value, bits in zip(variables, values, needs, strict=True):
            self.values[variable], self.needs[variable] = value, bits

    def _needed(self, variables: Sequence) -> int:
        return _any(_of(self.needs, variables))

    def _witnesses(self, events: int) -> list[jax.Array]:
        return [x for i, values in enumerate(self.events) if events >> i & 1 for x in values]

    def _compute(self, jaxpr: Jaxpr, eqns: Sequence[JaxprEqn]) -> None:
        """Evaluates equations that do not communicate, all at once: Python spends long on each call."""
        results = [x for eqn in eqns for x in eqn.outvars]
        made = set(results)
        given = {x: self.values[x] for eqn in eqns for x in eqn.invars if not isinstance(x, Literal) and x not in made}
        self.values |= zip(results, _bind(jaxpr, eqns, given, results), strict=True)
        for eqn in eqns:
            self.needs |= zip(eqn.outvars, _made_of(eqn, _of(self.needs, eqn.invars)), strict=True)

    def _collective(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> None:
        if not _is_collective(eqn):
            raise NotImplementedError(f"collectives in {eqn.primitive.name} have no order on CPUs; move them out of it")
        given = {x: self.after_loops(x) for x in eqn.invars if not isinstance(x, Literal)}
        results = _bind(jaxpr, [eqn], given, eqn.outvars)
        self._happened(eqn, results, results, self.last_loop)

    def _scan(self, eqn: JaxprEqn) -> None:
        num_constants, num_carried = scan_counts(eqn.params)
        constants, carried, sliced = _split([self.value(x) for x in eqn.invars], num_constants, num_carried)
        needs = _of(self.needs, eqn.invars)
        kept = _kept(eqn, needs, (num_constants, num_carried))
        changed = set(range(num_constants, len(needs))) - {num_constants + i for i in kept}
        body = _with_order_inside(eqn.params["jaxpr"], _inside(needs, (num_constants, num_carried), changed))

        def step(carry, row):
            token, *results = body(carry[0], *constants, *carry[1:], *row)
            return (token, *results[:num_carried]), results[num_carried:]

        with _named(eqn):
            (token, *carried), stacked = lax.scan(
                step,
                (self.token(), *carried),
                sliced,
                length=eqn.params["length"],
                reverse=eqn.params["reverse"],
                unroll=eqn.params["unroll"],
            )
        self._loop(eqn, token, [*carried, *stacked], kept)

    def _while(self, eqn: JaxprEqn) -> None:
        if any(map(_communicates, eqn.params["cond_jaxpr"].eqns)):
            raise NotImplementedError(
                "collectives in the condition of a while have no order on CPUs; move them out of it"
            )
        num_of_condition, num_constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        inputs = [self.value(x) for x in eqn.invars]
        of_condition, constants, carried = _split(inputs, num_of_condition, num_constants)
        condition = jaxpr_as_fun(eqn.params["cond_jaxpr"])
        needs = _of(self.needs, eqn.invars)[num_of_condition:]
        kept = _kept(eqn, needs, (num_constants, len(carried)))
        inside = _inside(needs, (num_constants, len(carried)), changed=())  # so everything in it waits
        body = _with_order_inside(eqn.params["body_jaxpr"], inside)
        with _named(eqn):
            token, *carried = lax.while_loop(
                lambda carry: condition(*of_condition, *carry[1:])[0],
                lambda carry: tuple(body(carry[0], *constants, *carry[1:])),
                (self.token(), *carried),
            )
        self._loop(eqn, token, carried, kept)

    def _loop(self, eqn: JaxprEqn, token: jax.Array, results: list, kept: dict[int, int]) -> None:
        self._happened(eqn, results, [token], (1 << len(self.events)) - 1)
        self.needs |= {eqn.outvars[i]: bits for i, bits in kept.items()}
        self.last_loop = 1 << (len(self.events) - 1)

    def _once(self, eqn: JaxprEqn) -> None:
        """Evaluates the only step of a scan in the place of the scan, as the compiler does."""
        body = eqn.params["jaxpr"]
        num_constants, num_carried = scan_counts(eqn.params)
        values = [self.value(x) for x in eqn.invars]
        whole = num_constants + num_carried
        self.evaluate(body, [*values[:whole], *(x[0] for x in values[whole:])], _of(self.needs, eqn.invars))
        values, needs = [self.value(x) for x in body.jaxpr.outvars], _of(self.needs, body.jaxpr.outvars)
        self._set(eqn.outvars, [*values[:num_carried], *(x[None] for x in values[num_carried:])], needs)

    def _happened(self, eqn: JaxprEqn, results: Sequence, witnesses: Sequence, before: int) -> None:
        self.events.append(tuple(witnesses))
        happened = 1 << (len(self.events) - 1)
        self._set(eqn.outvars, results, [self._needed(eqn.invars) | before | happened | _DATA] * len(results))


def _is_collective(eqn: JaxprEqn) -> bool:
    axes = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
    named = any(isinstance(axis, str) for axis in (axes if isinstance(axes, tuple) else (axes,)))
    return named and eqn.primitive.name != "axis_index"


def _is_one_step(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and eqn.params["length"] == 1


def _communicates(eqn: JaxprEqn) -> bool:
    inner = [e for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns]
    return _is_collective(eqn) or any(_communicates(e) for e in inner)


def _bind(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], given: dict, results: Sequence) -> Sequence[jax.Array]:
    """Applies some equations of a jaxpr to the given values of variables, under their own names in profiles."""
    effects = set().union(*(eqn.effects for eqn in eqns))
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=results, eqns=eqns, effects=effects)
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())


def _inside(needs: Sequence[int], counts: tuple[int, int], changed: Collection[int]) -> list[int]:
    """Returns what a loop's inputs are made of for its body: those of the given numbers change from step to step."""
    constants, carried, sliced = _split(needs, *counts)
    inside = [*(bits & (_DATA | _TABLE) for bits in constants), *(_DATA for _ in carried), *map(_slice_of, sliced)]
    return [bits | _FIRST if bits and i in changed else bits for i, bits in enumerate(inside)]


def _with_order_inside(body: ClosedJaxpr, needs: Sequence[int]) -> Callable:
    """Returns a loop's body in order, of a token and the inputs, to a later token and the results.

    The compiler takes a collective that is the same in every iteration out of the loop. So a collective waits for the
    token unless it needs one of the inputs that change, which are made of the first event.
    """
    holds_loops = any(_communicates(inner) and not _is_collective(inner) for inner in body.eqns)
    waits = _repeats(body.jaxpr, needs)
    if neighbours_keep_order() and not holds_loops and not waits:
        return lambda token, *inputs: [token + 1, *jaxpr_as_fun(body)(*inputs)]

    def ordered(token, *inputs):
        run = _Run([[token]] if waits else ())
        run.last_loop = _FIRST if waits else 0
        run.evaluate(body, inputs, needs if waits else [bits & ~_FIRST for bits in needs])
        return [token + 1 + run.token(), *map(run.value, body.jaxpr.outvars)]

    return ordered


def _repeats(body: Jaxpr, needs: Sequence[int]) -> bool:
    """Returns whether a collective, or a loop that holds some, needs none of a body's inputs that change."""
    made_of = _followed(body, needs)
    for eqn in filter(_communicates, body.eqns):
        needed = _of(made_of, eqn.invars)
        varying = [bits & _FIRST for bits in needed]
        if _is_collective(eqn):
            repeats = not all(varying)
        else:
            repeats = _repeats(_body(eqn), needed) if _is_one_step(eqn) else not any(varying)
        if repeats:
            return True
    return False


def _split(values: Sequence, first: int, second: int) -> tuple[list, list, list]:
    return list(values[:first]), list(values[first : first + second]), list(values[first + second :])


def _named(eqn: JaxprEqn):
    """Returns a context in which equations have another one's name in profiles."""
    name = str(eqn.source_info.name_stack)
    return jax.named_scope(name) if name else nullcontext()


def _body(eqn: JaxprEqn) -> Jaxpr:
    return eqn.params["jaxpr" if eqn.primitive.name == "scan" else "body_jaxpr"].jaxpr


def _kept(eqn: JaxprEqn, needs: Sequence[int], counts: tuple[int, int]) -> dict[int, int]:
    """Returns what the values that a loop carries, and may not change, are made of; the compiler takes them out.

    A value may be unchanged if a step makes it of nothing else.
    """
    constants, carried, sliced = _split(needs, *counts)
    others = [bits and bits & (_DATA | _TABLE) | _FIRST for bits in constants]
    own = [_FIRST << 1 + i for i in range(len(carried))]
    changing = [_slice_of(bits) | _FIRST for bits in sliced]
    results = _results(_body(eqn), [*others, *(_DATA | bit for bit in own), *changing])
    found = {i: results[i] & ~(_DATA | _TABLE) for i in range(len(carried))}
    return {i: carried[i] if bits else 0 for i, bits in found.items() if bits in (0, own[i])}


def _made_of(eqn: JaxprEqn, needs: Sequence[int]) -> list[int]:
    """Returns for each result of an equation what the compiler makes the result of; `needs` has it for each input.

    The compiler drops barriers. It also drops the parts of loops and calls that a result does not need, the index of a
    slice that is the whole array or of one number throughout, and all but one of several where it knows the choice.
    """
    results = _sources(eqn, needs)
    return [bits & ~_TABLE if x.aval.size == 1 else bits for x, bits in zip(eqn.outvars, results, strict=True)]


def _sources(eqn: JaxprEqn, needs: Sequence[int]) -> Sequence[int]:
    match eqn.primitive.name:
        case "optimization_barrier":
            return needs
        case "iota":
            return [_TABLE]
        case "axis_index":
            return [_DATA if lax.axis_size(eqn.params["axis_name"]) > 1 else 0]
        case "and" | "or":
            return [_any(needs) if all(bits & _DATA for bits in needs) else _all(needs)]
        case "select_n":
            return [_chosen(needs[0], needs[1:])]
        case "cond":
            branches = (_results(branch.jaxpr, needs[1:]) for branch in eqn.params["branches"])
            return [_chosen(needs[0], cases) for cases in zip(*branches, strict=True)]
        case "dynamic_slice":
            return [needs[0] and _any([needs[0], *_indices(eqn, needs, 1, eqn.outvars[0])])]
        case "dynamic_update_slice":
            indices = _indices(eqn, needs, 2, eqn.invars[1])
            return [_any([*needs[:2], *indices]) if indices else needs[1]]
        case "gather":
            return [needs[0] and _any(needs[:1] if _is_of_whole_dims(eqn) else needs)]
        case "scan" | "while":
            return _loop_made_of(eqn, needs)
    called = list(jaxprs_in_params(eqn.params))
    if [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr in called] == [(len(needs), len(eqn.outvars))]:
        return _results(called[0], needs)
    return [_any(needs) | (_DATA | _FIRST if _is_collective(eqn) else 0)] * len(eqn.outvars)


def _any(needs: Iterable[int]) -> int:
    return reduce(or_, needs, 0)


def _all(needs: Iterable[int]) -> int:
    return reduce(and_, needs)


def _chosen(choice: int, cases: Sequence[int]) -> int:
    return _any([choice, *cases]) if choice & _DATA else _all(cases)


def _slice_of(bits: int) -> int:
    """Returns what a slice is made of whose place the compiler does not know."""
    return _DATA if bits else 0


def _of(needs: dict, variables: Sequence) -> list[int]:
    return [_of_constant(x.val) if isinstance(x, Literal) else needs[x] for x in variables]


def _of_constant(value) -> int:
    if isinstance(value, jax.core.Tracer):
        return _DATA
    if np.ndim(value) == 0:
        return 0
    numbers = np.ravel(value)
    return _TABLE if (numbers != numbers[:1]).any() else 0


def _indices(eqn: JaxprEqn, needs: Sequence[int], first: int, part) -> list[int]:
    """Returns what the inputs are made of, from the first index on, that say where in an array a part of it lies."""
    sizes = zip(eqn.invars[0].aval.shape, part.aval.shape, strict=True)
    return [needs[first + i] for i, (whole, size) in enumerate(sizes) if size < whole]


def _is_of_whole_dims(gather: JaxprEqn) -> bool:
    shape, sizes = gather.invars[0].aval.shape, gather.params["slice_sizes"]
    return all(sizes[dim] == shape[dim] for dim in gather.params["dimension_numbers"].start_index_map)


def _loop_made_of(eqn: JaxprEqn, needs: Sequence[int]) -> list[int]:
    if _is_one_step(eqn):
        return _results(_body(eqn), needs)
    if eqn.primitive.name == "scan":
        counts = scan_counts(eqn.params)
    else:
        needs, num_constants = needs[eqn.params["cond_nconsts"] :], eqn.params["body_nconsts"]
        counts = num_constants, len(needs) - num_constants
    constants, carried, sliced = _split(needs, *counts)
    sliced = [bits and bits | _DATA for bits in sliced]
    while True:
        results = _results(_body(eqn), [*constants, *carried, *sliced])
        grown = [before | after for before, after in zip(carried, results, strict=False)]
        if grown == carried:
            return results
        carried = grown


def _results(jaxpr: Jaxpr, needs: Sequence[int]) -> list[int]:
    return _of(_followed(jaxpr, needs), jaxpr.outvars)


def _followed(jaxpr: Jaxpr, needs: Sequence[int]) -> dict:
    """Returns for each variable of a jaxpr what it is made of if the inputs are made of `needs`."""
    made_of: dict = dict.fromkeys(jaxpr.constvars, 0) | dict(zip(jaxpr.invars, needs, strict=True))
    for eqn in jaxpr.eqns:
        made_of |= zip(eqn.outvars, _made_of(eqn, _of(made_of, eqn.invars)), strict=True)
    return made_of


def _never(others: Sequence[jax.Array]) -> jax.Array:
    """Returns false once the others exist: whether one is no number and a number, which no compiler sees through."""
    total = jnp.zeros((), jnp.float32)
    for other in others:
        total += lax.convert_element_type(other[(0,) * other.ndim], jnp.float32)
    return (total != total) & (total == total)


def _wait(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Returns `x`, which exists only after the others exist.

    The choice is a branch, which compilers fuse with nothing: the arithmetic around it, down to its rounding, stays
    what it would be without. No collective reads what is on the host, which waits for nothing.
    """
    if is_on_host(x):
        return x
    return lax.cond(_never(others), jnp.zeros_like, lambda x: x, x)
