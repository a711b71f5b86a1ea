"""One order of a program's collectives on every device, where the runtime keeps none.

XLA:CPU runs on a pool of threads whatever has its inputs. The collectives of one computation it starts in one order,
but a loop counts as started before the collectives inside it are: one that comes after the loop, and needs nothing of
it, may overtake them, on some devices and not on others. Devices then wait for each other without end, or exchange with
the wrong collective, since all of `shard_map`'s have one channel (seen with jaxlib 0.10.2, with twice as many threads
as devices); since jaxlib 0.12 even neighbours change places. GPUs and TPUs keep the order of the compiler's schedule.

So here every collective is made to need something of the last loop before it (with newer runtimes of its neighbour
too). Most do anyway; the others get an input that waits. Every loop carries a token: a number that counts steps. The
token's first value needs all collectives and loops before the loop, and what comes later waits for the last value.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, jaxprs_in_params

from sppo_jax.compat import is_on_host, neighbours_keep_order, scan_counts


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
        run.evaluate(closed, leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), run.results(closed.jaxpr.outvars))

    return ordered


class _Run:
    """An evaluation of a jaxpr in which every collective gets its place.

    Collectives, and scans that hold some, are events. Event number i is bit i of a set; `needs` has for each variable
    the set of events whose results it is made of.

    Args:
        events: for each event before all others, values that are there once it is over.
    """

    def __init__(self, events: Sequence[Sequence[jax.Array]] = ()):
        self.events = list(events)
        self.last_loop = 0  # a set of at most one event; all older ones are before it
        self.values: dict = {}
        self.needs: dict = {}

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[jax.Array], *, of_first: Collection[int] = ()) -> None:
        """Evaluates all equations; the inputs of these numbers are made of the first event."""
        jaxpr = closed.jaxpr
        self._set((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), 0)
        self.needs |= {jaxpr.invars[i]: 1 for i in of_first}
        self._evaluate(jaxpr)

    def _evaluate(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if not _communicates(eqn):
                self._compute(jaxpr, eqn)
            elif _is_one_step(eqn):
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

    def _set(self, variables: Sequence, values: Sequence[jax.Array], needs: int) -> None:
        for variable, value in zip(variables, values, strict=True):
            self.values[variable], self.needs[variable] = value, needs

    def _needed(self, variables: Sequence) -> int:
        return reduce(or_, (0 if isinstance(x, Literal) else self.needs[x] for x in variables), 0)

    def _witnesses(self, events: int) -> list[jax.Array]:
        return [x for i, values in enumerate(self.events) if events >> i & 1 for x in values]

    def _compute(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> None:
        results = _bind(jaxpr, eqn, [self.value(x) for x in eqn.invars])
        for variable, value, sources in zip(eqn.outvars, results, _made_of(eqn), strict=True):
            self._set([variable], [value], self._needed([eqn.invars[i] for i in sources]))

    def _collective(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> None:
        if not _is_collective(eqn):
            raise NotImplementedError(f"collectives in {eqn.primitive.name} have no order on CPUs; move them out of it")
        results = _bind(jaxpr, eqn, [self.after_loops(x) for x in eqn.invars])
        self._happened(eqn, results, results, self.last_loop)

    def _scan(self, eqn: JaxprEqn) -> None:
        num_constants, num_carried = scan_counts(eqn.params)
        constants, carried, sliced = _split([self.value(x) for x in eqn.invars], num_constants, num_carried)
        still = {*range(num_constants), *(num_constants + i for i in _kept(eqn, (num_constants, num_carried)))}
        body = _with_order_inside(eqn.params["jaxpr"], set(range(len(eqn.invars))) - still)

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
        self._loop(eqn, token, [*carried, *stacked], (num_constants, num_carried))

    def _while(self, eqn: JaxprEqn) -> None:
        if any(map(_communicates, eqn.params["cond_jaxpr"].eqns)):
            raise NotImplementedError(
                "collectives in the condition of a while have no order on CPUs; move them out of it"
            )
        num_of_condition, num_constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        inputs = [self.value(x) for x in eqn.invars]
        of_condition, constants, carried = _split(inputs, num_of_condition, num_constants)
        condition = jaxpr_as_fun(eqn.params["cond_jaxpr"])
        body = _with_order_inside(eqn.params["body_jaxpr"], changed=())  # so everything in it waits
        with _named(eqn):
            token, *carried = lax.while_loop(
                lambda carry: condition(*of_condition, *carry[1:])[0],
                lambda carry: tuple(body(carry[0], *constants, *carry[1:])),
                (self.token(), *carried),
            )
        self._loop(eqn, token, carried, (num_constants, len(carried)))

    def _loop(self, eqn: JaxprEqn, token: jax.Array, results: list, counts: tuple[int, int]) -> None:
        self._happened(eqn, results, [token], (1 << len(self.events)) - 1)
        first = counts[0] if eqn.primitive.name == "scan" else len(eqn.invars) - counts[1]
        for i in _kept(eqn, counts):  # the compiler takes it out of the loop
            self.needs[eqn.outvars[i]] = self._needed([eqn.invars[first + i]])
        self.last_loop = 1 << (len(self.events) - 1)

    def _once(self, eqn: JaxprEqn) -> None:
        """Evaluates the only step of a scan in the place of the scan, as the compiler does."""
        body = eqn.params["jaxpr"]
        num_constants, num_carried = scan_counts(eqn.params)
        self._set(body.jaxpr.constvars, body.consts, 0)
        for i, (inner, outer) in enumerate(zip(body.jaxpr.invars, eqn.invars, strict=True)):
            value = self.value(outer)
            self._set([inner], [value if i < num_constants + num_carried else value[0]], self._needed([outer]))
        self._evaluate(body.jaxpr)
        for i, (inner, outer) in enumerate(zip(body.jaxpr.outvars, eqn.outvars, strict=True)):
            value = self.value(inner)
            self._set([outer], [value if i < num_carried else value[None]], self._needed([inner]))

    def _happened(self, eqn: JaxprEqn, results: Sequence, witnesses: Sequence, before: int) -> None:
        self.events.append(tuple(witnesses))
        happened = 1 << (len(self.events) - 1)
        self._set(eqn.outvars, results, self._needed(eqn.invars) | before | happened)


def _is_collective(eqn: JaxprEqn) -> bool:
    axes = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
    named = any(isinstance(axis, str) for axis in (axes if isinstance(axes, tuple) else (axes,)))
    return named and eqn.primitive.name != "axis_index"


def _is_one_step(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and eqn.params["length"] == 1


def _communicates(eqn: JaxprEqn) -> bool:
    inner = [e for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns]
    return _is_collective(eqn) or any(_communicates(e) for e in inner)


def _bind(jaxpr: Jaxpr, eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Applies one equation of a jaxpr, under its own name in profiles."""
    given = {x: value for x, value in zip(eqn.invars, inputs, strict=True) if not isinstance(x, Literal)}
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())


def _with_order_inside(body: ClosedJaxpr, changed: Collection[int]) -> Callable:
    """Returns a loop's body in order, of a token and the inputs, to a later token and the results.

    The compiler takes a collective that is the same in every iteration out of the loop. So a collective waits for the
    token unless it needs one of the inputs that change, whose numbers are given.
    """
    holds_loops = any(_communicates(inner) and not _is_collective(inner) for inner in body.eqns)
    waits = _repeats(body.jaxpr, changed)
    if neighbours_keep_order() and not holds_loops and not waits:
        return lambda token, *inputs: [token + 1, *jaxpr_as_fun(body)(*inputs)]

    def ordered(token, *inputs):
        run = _Run([[token]] if waits else ())
        run.last_loop = len(run.events)
        run.evaluate(body, inputs, of_first=changed if waits else ())
        return [token + 1 + run.token(), *map(run.value, body.jaxpr.outvars)]

    return ordered


def _repeats(jaxpr: Jaxpr, changed: Collection[int]) -> bool:
    """Returns whether a collective, or a loop that holds some, needs none of a body's inputs of these numbers."""
    made_of = _followed(jaxpr)
    for eqn in filter(_communicates, jaxpr.eqns):
        needed = [set() if isinstance(x, Literal) else made_of[x] for x in eqn.invars]
        varying = {i for i, sources in enumerate(needed) if not sources.isdisjoint(changed)}
        if _is_collective(eqn):
            repeats = len(varying) < len(needed)
        else:
            repeats = _repeats(_body(eqn), varying) if _is_one_step(eqn) else not varying
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


def _kept(eqn: JaxprEqn, counts: tuple[int, int]) -> set[int]:
    """Returns which of the values that a loop carries are the same in every step."""
    body, (num_constants, num_carried) = _body(eqn), counts
    passed_on = _passed_on(body)
    return {i for i in range(num_carried) if passed_on[i] == num_constants + i}


def _passed_on(jaxpr: Jaxpr) -> list[int | None]:
    """Returns for each result which input the result is once the compiler has dropped barriers and inlined calls."""
    origins = {x: i for i, x in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        sources = []
        called = list(jaxprs_in_params(eqn.params))
        if eqn.primitive.name == "optimization_barrier":
            sources = list(range(len(eqn.invars)))
        elif eqn.primitive.name == "scan":
            counts = scan_counts(eqn.params)
            kept = _kept(eqn, counts)
            sources = [counts[0] + i if i in kept else None for i in range(counts[1])]
        elif len(called) == 1 and len(called[0].invars) == len(eqn.invars):
            sources = _passed_on(called[0])
        for result, source in zip(eqn.outvars, sources, strict=False):
            if source is not None and not isinstance(eqn.invars[source], Literal) and eqn.invars[source] in origins:
                origins[result] = origins[eqn.invars[source]]
    return [None if isinstance(x, Literal) else origins.get(x) for x in jaxpr.outvars]


def _made_of(eqn: JaxprEqn) -> list[Collection[int]]:
    """Returns for each result of an equation which inputs the compiler makes the result of.

    The compiler drops barriers. It also drops the parts of loops and calls that a result does not need, and the index
    of a slice that is the whole array.
    """
    if eqn.primitive.name == "optimization_barrier":
        return [[i] for i in range(len(eqn.invars))]
    if eqn.primitive.name == "dynamic_slice":
        return [[0, *_indices(eqn, 1, eqn.outvars[0])]]
    if eqn.primitive.name == "dynamic_update_slice":
        indices = _indices(eqn, 2, eqn.invars[1])
        return [[0, 1, *indices] if indices else [1]]
    if eqn.primitive.name == "gather" and _is_of_whole_dims(eqn):
        return [[0]]
    if eqn.primitive.name == "scan":
        return _scan_made_of(eqn)
    called = list(jaxprs_in_params(eqn.params))
    arguments, results = len(eqn.invars), len(eqn.outvars)
    if [(len(jaxpr.invars), len(jaxpr.outvars)) for jaxpr in called] == [(arguments, results)]:
        return _results_made_of(called[0])
    return [range(arguments)] * results


def _indices(eqn: JaxprEqn, first: int, part) -> list[int]:
    """Returns which inputs, from the first index on, say where in an array a part of it lies."""
    sizes = zip(eqn.invars[0].aval.shape, part.aval.shape, strict=True)
    return [first + i for i, (whole, size) in enumerate(sizes) if size < whole]


def _is_of_whole_dims(gather: JaxprEqn) -> bool:
    shape, sizes = gather.invars[0].aval.shape, gather.params["slice_sizes"]
    return all(sizes[dim] == shape[dim] for dim in gather.params["dimension_numbers"].start_index_map)


def _scan_made_of(eqn: JaxprEqn) -> list[Collection[int]]:
    num_constants, num_carried = scan_counts(eqn.params)
    of_step, found = _results_made_of(_body(eqn)), []
    for sources in of_step:
        before, sources = set(), set(sources)
        while before != sources:
            before = set(sources)
            carried = (i - num_constants for i in before if 0 <= i - num_constants < num_carried)
            sources = before.union(*(of_step[i] for i in carried))
        found.append(sources)
    return found


def _results_made_of(jaxpr: Jaxpr) -> list[set[int]]:
    made_of = _followed(jaxpr)
    return [set() if isinstance(x, Literal) else made_of[x] for x in jaxpr.outvars]


def _followed(jaxpr: Jaxpr) -> dict:
    """Returns for each variable of a jaxpr the numbers of the inputs that it is made of."""
    made_of: dict = {x: set() for x in jaxpr.constvars} | {x: {i} for i, x in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for result, sources in zip(eqn.outvars, _made_of(eqn), strict=True):
            inputs = [eqn.invars[i] for i in sources]
            made_of[result] = set().union(*(made_of[x] for x in inputs if not isinstance(x, Literal)))
    return made_of


def _never(others: Sequence[jax.Array]) -> jax.Array:
    """Returns false once the others exist: whether one is no number and a number, which no compiler sees through."""
    never = jnp.zeros((), bool)
    for other in others:
        first = lax.convert_element_type(other[(0,) * other.ndim], jnp.float32)
        never |= (first != first) & (first == first)
    return never


def _wait(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Returns `x`, which exists only after the others exist.

    The choice is a branch, which compilers fuse with nothing: the arithmetic around it, down to its rounding, stays
    what it would be without. No collective reads what is on the host, which waits for nothing.
    """
    if is_on_host(x):
        return x
    return lax.cond(_never(others), jnp.zeros_like, lambda x: x, x)
