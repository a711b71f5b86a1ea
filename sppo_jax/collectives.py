"""One order of a program's collectives on every device, where the runtime keeps none.

XLA:CPU runs on a pool of threads whatever has its inputs. The collectives of one computation it starts in one order,
but a loop counts as started before the collectives inside it are: one that comes after the loop, and needs nothing of
it, may overtake them, on some devices and not on others. Devices then wait for each other without end, or exchange with
the wrong collective, since all of `shard_map`'s have one channel (seen with jaxlib 0.10.2, with twice as many threads
as devices); since jaxlib 0.12 even neighbours change places. GPUs and TPUs keep the order of the compiler's schedule.

So here every collective is made to need something of the last loop before it (with newer runtimes of its neighbour
too), and every loop something of all collectives before it. Most do anyway; the others get an input that waits.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import compress
from operator import or_

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, jaxprs_in_params

from sppo_jax.compat import neighbours_keep_order, scan_counts


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
        return jax.tree.unflatten(jax.tree.structure(shape), [run.after_loops(x) for x in closed.jaxpr.outvars])

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
        self.known: set = set()  # variables whose values the compiler may know

    def evaluate(self, closed: ClosedJaxpr, inputs: Sequence[jax.Array], known: Sequence[bool] = ()) -> None:
        """Evaluates all equations; `known` has for each input whether the compiler may know the value."""
        jaxpr = closed.jaxpr
        self._set((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), 0)
        self.known |= {*jaxpr.constvars, *compress(jaxpr.invars, known)}
        self._evaluate(jaxpr)

    def _evaluate(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if not _communicates(eqn):
                self._compute(jaxpr, eqn)
            elif eqn.primitive.name == "scan" and eqn.params["length"] == 1:
                self._once(eqn)
            elif eqn.primitive.name == "scan":
                self._scan(jaxpr, eqn)
            elif eqn.primitive.name == "while":
                self._while(jaxpr, eqn)
            else:
                self._collective(jaxpr, eqn)

    def after_loops(self, x) -> jax.Array:
        """Returns a variable's value, which waits for the last loop and, where needed, for a neighbour."""
        neighbour = 0 if neighbours_keep_order() else (1 << len(self.events)) >> 1
        return self._waiting(x, self.last_loop | neighbour)

    def value(self, x) -> jax.Array:
        """Returns a variable's value."""
        return x.val if isinstance(x, Literal) else self.values[x]

    def _set(self, variables: Sequence, values: Sequence[jax.Array], needs: int) -> None:
        for variable, value in zip(variables, values, strict=True):
            self.values[variable], self.needs[variable] = value, needs

    def _is_known(self, x) -> bool:
        return isinstance(x, Literal) or x in self.known

    def _needed(self, variables: Sequence) -> int:
        return reduce(or_, (0 if isinstance(x, Literal) else self.needs[x] for x in variables), 0)

    def _waiting(self, x, events: int) -> jax.Array:
        return self._after(self.value(x), events & ~self._needed([x]))

    def _after(self, value: jax.Array, events: int) -> jax.Array:
        witnesses = [y for i, values in enumerate(self.events) if events >> i & 1 for y in values]
        return _wait(value, witnesses) if witnesses else value

    def _compute(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> None:
        self._set(eqn.outvars, _bind(jaxpr, eqn, [self.value(x) for x in eqn.invars]), self._needed(eqn.invars))
        if all(map(self._is_known, eqn.invars)) and eqn.primitive.name != "axis_index":
            self.known.update(eqn.outvars)
        if eqn.primitive.name == "optimization_barrier":  # the compiler drops it, and what it ties together
            for result, x in zip(eqn.outvars, eqn.invars, strict=True):
                self.needs[result] = self._needed([x])

    def _collective(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> None:
        if not _is_collective(eqn):
            raise NotImplementedError(f"collectives in {eqn.primitive.name} have no order on CPUs; move them out of it")
        results = _bind(jaxpr, eqn, [self.after_loops(x) for x in eqn.invars])
        self._happened(eqn, results, results, self.last_loop)

    def _scan(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> None:
        before = (1 << len(self.events)) - 1
        inputs = [self.value(x) for x in eqn.invars]
        # One input that waits is enough: the least. What the steps do not read the compiler takes out of the loop, and
        # what it knows it folds, so neither can wait; nor does either tell what the loop waits for already. Whole
        # numbers come last: they count devices and places, of which the compiler knows more than can be seen here.
        inner = _body(eqn)
        read = {x for step in inner.eqns for x in step.invars if not isinstance(x, Literal)}
        readable = [i for i, x in enumerate(inner.invars) if x in read and jnp.ndim(inputs[i])]
        unknown = [i for i in readable if not self._is_known(eqn.invars[i])] or readable or range(len(inputs))
        least = min(unknown, key=lambda i: (not jnp.issubdtype(inputs[i].dtype, jnp.inexact), inputs[i].size))
        inputs[least] = self._after(inputs[least], before & ~max(self.last_loop - 1, 0))
        counts = scan_counts(eqn.params)
        known = [self._is_known(x) and not counts[0] <= i < sum(counts) for i, x in enumerate(eqn.invars)]
        self._loop(jaxpr, _with_order_inside(eqn, "jaxpr", known), eqn, inputs, counts, before)

    def _while(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> None:
        condition, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        if any(map(_communicates, eqn.params["cond_jaxpr"].eqns)):
            raise NotImplementedError(
                "collectives in the condition of a while have no order on CPUs; move them out of it"
            )
        before = (1 << len(self.events)) - 1
        inputs = [self.value(x) for x in eqn.invars]
        # The loop starts when its condition is known: what waits is the least thing that the condition may read, which
        # is a fori_loop's bound.
        read = [*range(condition), *range(condition + body, len(inputs))]
        least = min((i for i in read if not isinstance(eqn.invars[i], Literal)), key=lambda i: jnp.size(inputs[i]))
        inputs[least] = self._waiting(eqn.invars[least], before & ~max(self.last_loop - 1, 0))
        counts = body, len(inputs) - condition - body
        constants = eqn.invars[condition : condition + body]
        known = [self._is_known(x) for x in constants] + [False] * counts[1]
        self._loop(jaxpr, _with_order_inside(eqn, "body_jaxpr", known), eqn, inputs, counts, before)

    def _loop(self, jaxpr: Jaxpr, ordered: JaxprEqn, eqn: JaxprEqn, inputs: list, counts: tuple, before: int) -> None:
        results = _bind(jaxpr, ordered, inputs)
        self._happened(eqn, results, _changed(eqn, results, counts), before)
        first = counts[0] if eqn.primitive.name == "scan" else len(eqn.invars) - counts[1]
        for i in _kept(eqn, counts):  # the compiler takes it out of the loop
            self.needs[eqn.outvars[i]] = self._needed([eqn.invars[first + i]])
        self.last_loop = 1 << (len(self.events) - 1)

    def _once(self, eqn: JaxprEqn) -> None:
        """Evaluates the only step of a scan in the place of the scan, as the compiler does."""
        body = eqn.params["jaxpr"]
        num_constants, num_carried = scan_counts(eqn.params)
        self._set(body.jaxpr.constvars, body.consts, 0)
        self.known.update(body.jaxpr.constvars)
        for i, (inner, outer) in enumerate(zip(body.jaxpr.invars, eqn.invars, strict=True)):
            value = self.value(outer)
            self._set([inner], [value if i < num_constants + num_carried else value[0]], self._needed([outer]))
            self.known |= {inner} if self._is_known(outer) else set()
        self._evaluate(body.jaxpr)
        for i, (inner, outer) in enumerate(zip(body.jaxpr.outvars, eqn.outvars, strict=True)):
            value = self.value(inner)
            self._set([outer], [value if i < num_carried else value[None]], self._needed([inner]))
            self.known |= {outer} if self._is_known(inner) else set()

    def _happened(self, eqn: JaxprEqn, results: Sequence, witnesses: Sequence, before: int) -> None:
        self.events.append(tuple(witnesses))
        happened = 1 << (len(self.events) - 1)
        self._set(eqn.outvars, results, self._needed(eqn.invars) | before | happened)


def _is_collective(eqn: JaxprEqn) -> bool:
    axes = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
    named = any(isinstance(axis, str) for axis in (axes if isinstance(axes, tuple) else (axes,)))
    return named and eqn.primitive.name != "axis_index"


def _communicates(eqn: JaxprEqn) -> bool:
    inner = [e for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns]
    return _is_collective(eqn) or any(_communicates(e) for e in inner)


def _bind(jaxpr: Jaxpr, eqn: JaxprEqn, inputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Applies one equation of a jaxpr, under its own name in profiles."""
    given = {x: value for x, value in zip(eqn.invars, inputs, strict=True) if not isinstance(x, Literal)}
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())


def _with_order_inside(eqn: JaxprEqn, name: str, known: Sequence[bool]) -> JaxprEqn:
    """Returns a loop whose body is in order; a body without loops stays as is where the compiler keeps order."""
    body = eqn.params[name]
    holds_loops = any(_communicates(inner) and not _is_collective(inner) for inner in body.eqns)
    if neighbours_keep_order() and not holds_loops:
        return eqn

    def ordered(*inputs):
        run = _Run()
        run.evaluate(body, inputs, known)
        return [run.value(x) for x in body.jaxpr.outvars]

    return eqn.replace(params={**eqn.params, name: jax.make_jaxpr(ordered)(*body.in_avals)})


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
            sources = [counts[0] + i if i in _kept(eqn, counts) else None for i in range(counts[1])]
        elif len(called) == 1 and len(called[0].invars) == len(eqn.invars):
            sources = _passed_on(called[0])
        for result, source in zip(eqn.outvars, sources, strict=False):
            if source is not None and not isinstance(eqn.invars[source], Literal) and eqn.invars[source] in origins:
                origins[result] = origins[eqn.invars[source]]
    return [None if isinstance(x, Literal) else origins.get(x) for x in jaxpr.outvars]


def _changed(eqn: JaxprEqn, results: Sequence[jax.Array], counts: tuple[int, int]) -> list[jax.Array]:
    """Returns the smallest result of a loop that is used anyway and exists only after the loop."""
    kept = _kept(eqn, counts)
    wanted = [
        x
        for i, x in enumerate(results)
        if i not in kept and not isinstance(eqn.outvars[i], DropVar) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return [min(wanted, key=lambda x: x.size)] if wanted else list(results)


def _wait(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Returns `x`, which exists only after the others exist.

    The choice is by what no number is, which compilers do not see through. It is a branch, which they fuse with
    nothing: the arithmetic around it, down to its rounding, stays what it would be without.
    """
    never = jnp.zeros((), bool)
    for other in others:
        first = lax.convert_element_type(other[(0,) * other.ndim], jnp.float32)
        never |= (first != first) & (first == first)
    return lax.cond(never, jnp.zeros_like, lambda x: x, x)
