"""Programs that combine features, drawn from a seed: one generator for what CI compiles and for the slow draws."""

import math
import random
from dataclasses import replace
from itertools import combinations

from programs import KV_GRAD_ROUNDINGS, Case, host_kinds

from sppo_jax.config.layer_types import parse_layers
from sppo_jax.schedule.check import check
from sppo_jax.schedule.csv_format import to_csv
from sppo_jax.schedule.generators import make_table
from sppo_jax.schedule.table import Table

MESHES = [
    (data, pipe, seq)
    for data in (1, 2)
    for pipe in (1, 2, 3, 4)
    for seq in (1, 2, 3, 4, 5, 6)
    if data * pipe * seq <= 8
] + 4 * [(1, 2, 4), (2, 1, 4), (1, 1, 6)]  # the meshes that a hybrid can have are few
KEPT = (("keep", "keep", "keep"), ("keep", "keep", "recompute"), ("keep", "recompute", "keep"))
AGAIN = (("keep", "recompute", "recompute"), ("recompute", "recompute", "recompute"))
HOSTED = (
    ("host", "host", "keep"),
    ("host", "host", "recompute"),
    ("host", "recompute", "recompute"),
    ("keep", "host", "keep"),
)
REST_HOSTED = (("host", "host", "host"), ("keep", "keep", "host"), ("host", "keep", "host"))

# Two of one line never stand in one program.
EXCLUSIVE = (
    ("ulysses", "ring", "hybrid"),
    ("float64", "float32", "bfloat16"),
    ("recomputes all", "shares on host"),
    ("recomputes all", "rest on host"),
)


class Draws:
    """A seed's numbers, taken from `random()` alone: Python promises the same ones in every version."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def pick(self, options):
        return options[int(self._random.random() * len(options))]

    def number(self, low: int, high: int) -> int:
        """Draws one of low, ..., high."""
        return low + int(self._random.random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        return self._random.random() < share


def draw(seed: int) -> Case:
    """Draws a program that the planner takes.

    Args:
        seed: the same seed gives the same program.
    """
    draws = Draws(seed)
    data, pipe, seq = mesh = draws.pick(MESHES)
    interleave = draws.pick((1, 1, 2, 3)) if pipe > 1 else 1
    places = draws.pick(draws.pick((KEPT, AGAIN, HOSTED, REST_HOSTED)))
    shares = "host" in places[:2]
    ulysses = draws.pick([factor for factor in range(1, seq + 1) if seq % factor == 0])
    kernel = draws.pick(("blockwise", "blockwise", "cudnn"))
    schedule, csv = _draw_schedule(draws, pipe, seq, interleave)
    plan = dict(
        mesh=mesh,
        kind="ulysses" if ulysses == seq else "ring" if ulysses == 1 else "hybrid",
        ulysses=ulysses,
        places=places,
        alpha=tuple(draws.pick((0.3, 0.7, 1.0, 0.0)) for _ in range(draws.number(1, 3))) if shares else 0.0,
        ring_pass=draws.pick(("auto", "kv", "q")),
        kv_grad_dtype=draws.pick(("float32", "float32", "float32", "bfloat16")),
        kernel=kernel,
        **schedule,
    )
    if csv:
        plan["csv"] = csv
    layers = pipe * interleave * (2 if "host" in places else draws.number(1, 2))
    return Case(
        plan,
        _draw_model(draws, layers, ulysses, kernel),
        dtype=draws.pick(("float64", "float64", "float64", "float32", "bfloat16")),
        blocks=(draws.number(1, 11), draws.number(1, 19)),
        optimised=draws.chance(0.15),
    )


def draw_by_groups(seed: int) -> Case:
    """Draws a breadth-first program that the planner takes.

    Args:
        seed: the same seed gives the same program.
    """
    draws = Draws(seed)
    data, pipe, seq = mesh = draws.pick(MESHES)
    interleave, wave = draws.pick((2, 2, 3, 4) if pipe < 4 else (2,)), draws.pick((1, 1, 2))
    places = draws.pick(draws.pick((KEPT, AGAIN, HOSTED, HOSTED, REST_HOSTED)))
    ulysses = draws.pick([factor for factor in range(1, seq + 1) if seq % factor == 0])
    kernel, count = draws.pick(("blockwise", "blockwise", "cudnn")), draws.number(1, 5)
    shortest = math.ceil(12 / (count * seq))
    lengths = [draws.number(3, 9) * shortest] * count
    if draws.chance(0.5):
        lengths = [draws.number(2, 9) * shortest for _ in range(count)]
    plan = dict(
        schedule="breadth-first",
        mesh=mesh,
        chunks=tuple(length * seq for length in lengths),
        interleave=interleave,
        sequences=wave * draws.number(1, 2),
        wave=wave,
        kind="ulysses" if ulysses == seq else "ring" if ulysses == 1 else "hybrid",
        ulysses=ulysses,
        places=places,
        alpha=tuple(draws.pick((0.3, 0.7, 1.0, 0.0)) for _ in range(draws.number(1, 3)))
        if "host" in places[:2]
        else 0.0,
        kv="rebuild" if count > 1 and places[0] != "recompute" and draws.chance(0.7) else "keep",
        weights="gathered" if data * seq > 1 and draws.chance(0.7) else "resident",
        ring_pass=draws.pick(("auto", "kv", "q")),
        kv_grad_dtype=draws.pick(("float32", "float32", "float32", "bfloat16")),
        kernel=kernel,
    )
    layers = pipe * interleave * (2 if "host" in places and pipe * interleave < 6 else 1)
    model = _draw_model(draws, layers, ulysses, kernel)
    if places[1] != "recompute" and count > 1:
        # By another generator, so that all else is drawn as it was without.
        plan["attention_from"] = Draws(seed + 1000).number(0, count - 1)
    if plan["kv"] == "rebuild" and Draws(seed + 2000).chance(0.5):
        plan["kv"] = "host"
    if count == 1 and places[0] != "recompute" and Draws(seed + 4000).chance(0.7):
        plan["kv"] = "recompute"
    if wave * count >= pipe + 2 and Draws(seed + 3000).chance(0.4):
        plan["waiting"] = "host"
    dtype, queries = draws.pick(("float64", "float64", "float64", "float32", "bfloat16")), draws.number(1, 11)
    if plan["kv_grad_dtype"] == "bfloat16":
        # So few roundings, over all layers, as the tolerance is for.
        queries = max(queries, math.ceil(sum(plan["chunks"]) * layers / KV_GRAD_ROUNDINGS))
    return Case(
        plan,
        model,
        dtype=dtype,
        blocks=(queries, draws.number(1, 19)),
        optimised=draws.chance(0.15),
    )


def _draw_schedule(draws: Draws, pipe: int, seq: int, interleave: int) -> tuple[dict, str | None]:
    """Draws schedule, sequences and chunks that fit together, and the table as a file's text, one time in four."""
    name = draws.pick(("gpipe", "1f1b", "sppo", "seq1f1b"))
    count = 1 if name == "1f1b" else draws.number(1, 5)
    sequences = draws.number(1, 4)
    if interleave > 1:
        # Chunks go round the stages in whole convoys.
        sequences = pipe * draws.number(1, 2) if name == "1f1b" else draws.number(1, 3)
        count = count if name == "1f1b" else pipe * draws.number(1, 2 if pipe < 4 else 1)
        name = f"interleaved-{name}" if "1f1b" in name else name
    same = draws.number(3, 9)
    lengths = [same] * count if draws.chance(0.5) else [draws.number(2, 9) for _ in range(count)]
    lengths = [length * max(1, math.ceil(12 / (sum(lengths) * seq))) for length in lengths]
    chunks = tuple(length * seq for length in lengths)
    settings = dict(schedule=name, interleave=interleave, sequences=sequences, chunks=chunks)
    table = _reordered(draws, make_table(name, pipe, sequences, chunks, interleave))
    return settings, to_csv(table) if draws.chance(0.25) else None


def _reordered(draws: Draws, table: Table) -> Table:
    """Moves a backward tick behind the forward tick (and its head) after it, where that is a legal table too."""
    ticks = list(table.ticks)
    turns = [i for i in range(len(ticks) - 1) if ticks[i].op == "B" and ticks[i + 1].op == "F"]
    if not turns:
        return table
    first = draws.pick(turns)
    last = first + 3 if first + 2 < len(ticks) and ticks[first + 2].op == "H" else first + 2
    moved = replace(table, ticks=(*ticks[:first], *ticks[first + 1 : last], ticks[first], *ticks[last:]), name="own")
    try:
        check(moved)
    except ValueError:
        return table
    return moved


def _draw_model(draws: Draws, layers: int, ulysses: int, kernel: str) -> dict:
    kv_heads = draws.number(1, 4)
    return dict(
        num_layers=layers,
        num_heads=math.lcm(kv_heads, ulysses) * draws.number(1, 2),
        num_kv_heads=kv_heads,
        head_dim=8 * draws.number(1, 2) if kernel == "cudnn" else 2 * draws.number(1, 5),
        hidden_size=draws.number(6, 24),
        mlp_size=draws.number(8, 39),
        vocab_size=draws.number(20, 59),
        mlp=draws.pick(("swiglu", "gelu")),
        qk_norm=draws.chance(0.5),
        qkv_bias=draws.chance(0.5),
        tied_embeddings=draws.chance(0.5),
    )


def draw_experts(seed: int) -> Case:
    """Draws a program of layers with experts: even seeds a depth-first one, odd seeds a breadth-first one.

    Args:
        seed: the same seed gives the same program.
    """
    case, draws = (draw_by_groups if seed % 2 else draw)(seed), Draws(seed + 5000)
    count = draws.number(2, 9)
    experts = dict(
        count=count,
        chosen=draws.number(1, count),
        size=draws.number(3, 11),
        mlp=draws.pick(("swiglu", "geglu", "clamped")),
        bias=draws.chance(0.3),
        shared_size=draws.pick((None, None, 5)),
        scores=draws.pick(("softmax", "sigmoid", "softmax_of_chosen")),
        normalized=draws.chance(0.7),
        scaling=draws.pick((1.0, 2.5)),
        balance=draws.pick((0.0, 0.3, 0.3)),
        balance_form=draws.pick(("model", "layer")),
        z=draws.pick((0.0, 0.02)),
    )
    experts |= dict(shared_gate=experts["shared_size"] is not None and draws.chance(0.5))
    experts |= dict(choice_bias=experts["scores"] != "softmax_of_chosen" and draws.chance(0.4))
    if experts["chosen"] == 1 and experts["normalized"] and experts["scores"] != "softmax_of_chosen":
        # A weight divided by itself is 1: without a loss of its own the router has a gradient of roundings alone.
        experts["z"] = experts["z"] if experts["balance"] else 0.02
    # Narrower dtypes choose other experts for some tokens, and dK and dV in bfloat16 have a tolerance of their own.
    plan = case.plan | {"kv_grad_dtype": "float32"}
    return replace(case, plan=plan, model=case.model | {"experts": experts}, dtype="float64")


def draw_kinds(seed: int) -> Case:
    """Draws a program of layers of several types: even seeds a depth-first one, odd seeds a breadth-first one.

    Args:
        seed: the same seed gives the same program.
    """
    case, draws = (draw_by_groups if seed % 2 else draw)(seed), Draws(seed + 6000)
    plan, model = case.plan | {"kv_grad_dtype": "float32"}, case.model
    groups = plan["mesh"][1] * plan["interleave"]
    names = ("full", "local", "wide")[: draws.pick((2, 2, 3))]
    of_group = [*names, *[draws.pick(names) for _ in range(draws.number(0, 2))]]
    order = sorted(of_group, key=lambda _: draws.number(0, 99))
    kinds = {name: _draw_kind(draws, model, plan["ulysses"], plan["kernel"]) for name in names[1:]}
    if draws.chance(0.5):
        plan["kernel"] = "blockwise"
        ring = plan["mesh"][2] // plan["ulysses"]
        # With a window of one token the gradients of queries and keys are roundings.
        kinds["local"] |= dict(sliding_window=max(2, ring * draws.number(1, 9)), sinks=draws.chance(0.5))
    if draws.chance(0.3):
        experts = dict(count=4, chosen=2, size=5, balance=0.3, shared_size=None)
        model = model | {"experts": experts}
        kinds["local"] |= {"experts": {"count": 0}}
    model = model | dict(num_layers=groups * len(order), layers=f"{groups}x({','.join(order)})", layer_types=kinds)
    return with_norms(replace(case, plan=plan, model=model, dtype="float64"), seed)


def in_lone_groups(case: Case) -> Case:
    """Puts each layer of a breadth-first program into a group of its own, on one stage."""
    data, pipe, seq = case.plan["mesh"]
    return replace(case, plan=case.plan | {"mesh": (data * pipe, 1, seq), "interleave": case.model["num_layers"]})


def with_norms(case: Case, seed: int) -> Case:
    """Gives a program other norms, scales and a cap of logits, and its kinds norms and a scale of their own."""
    draws, model = Draws(seed + 7000), case.model
    model = model | _draw_norms(draws, model["qk_norm"])
    model |= dict(embedding_scale=draws.pick((1.0, 4.7)), logit_cap=draws.pick((0.0, 2.0)))
    model["mlp"] = draws.pick((model["mlp"], "geglu"))
    kinds = {
        name: kind | _draw_norms(draws, kind["qk_norm"]) | dict(mlp=draws.pick((kind["mlp"], "geglu")))
        for name, kind in model.get("layer_types", {}).items()
    }
    return replace(case, model=model | ({"layer_types": kinds} if kinds else {}))


def _draw_norms(draws: Draws, qk_norm: bool) -> dict:
    return dict(
        norms=draws.pick(("before", "behind", "both")),
        unit_norm=draws.chance(0.5),
        qk_norm_over_heads=draws.chance(0.5) and qk_norm,
        query_scale=draws.pick((0.0, 0.5)),
    )


def _draw_kind(draws: Draws, model: dict, ulysses: int, kernel: str) -> dict:
    """Draws what a kind has in place of the model's settings; heads are others half of the time."""
    kind: dict = dict(rope=dict(theta=draws.pick((50.0, 10000.0)), fraction=draws.pick((0.0, 0.5, 1.0))))
    kind |= dict(mlp_size=draws.number(8, 39), mlp=draws.pick(("swiglu", "gelu")), qk_norm=draws.chance(0.5))
    if not kind["rope"]["fraction"]:
        kind["qkv_bias"] = False  # without rotation a bias of all keys changes nothing
    if draws.chance(0.5):
        heads = _draw_model(draws, 1, ulysses, kernel)
        kind |= {name: heads[name] for name in ("num_heads", "num_kv_heads", "head_dim")}
    return kind


def draw_unlike_groups(seed: int) -> Case:
    """Draws a program of one stage whose groups of layers have unlike kinds, of one shape or of two.

    Args:
        seed: the same seed gives the same program.
    """
    case, draws = draw_by_groups(seed), Draws(seed + 8000)
    data, pipe, seq = case.plan["mesh"]
    plan = case.plan | {"kv_grad_dtype": "float32", "mesh": (data * pipe, 1, seq)}
    ring, groups = seq // plan["ulysses"], plan["interleave"]
    kinds: dict = {"unrotated": {"rope": {"fraction": 0.0}}, "local": {"rope": {"theta": 50.0}}}
    model = {name: value for name, value in case.model.items() if name not in ("qkv_bias", "num_layers")}
    if draws.chance(0.6):
        plan["kernel"] = "blockwise"
        kinds["local"] |= dict(sliding_window=max(2, ring * draws.number(1, 9)))
        model["sinks"] = draws.chance(0.5)
    names = ("full", "local", "unrotated")[: draws.pick((2, 3))]
    size = draws.pick((1, 1, 2))
    order = [draws.pick(names) for _ in range(groups * size)]
    order[0], order[-1] = "full", "local"  # two patterns at least
    if size == 2 and draws.chance(0.5):
        # Each group has one layer of another shape.
        kinds["wide"] = {"mlp_size": 9}
        order = [kind for pair in zip(order[::2], ["wide"] * groups, strict=True) for kind in pair]
        order[-2] = "local"
    elif draws.chance(0.4):
        model["experts"] = dict(count=4, chosen=2, size=5, balance=0.3, shared_size=None)
    kinds = {name: kind for name, kind in kinds.items() if name in order}
    model |= dict(num_layers=len(order), layers=",".join(order), layer_types=kinds)
    return replace(case, plan=plan, model=model, dtype="float64")


def draw_window(seed: int) -> Case:
    """Draws a program whose layers have a window: even seeds a depth-first one, odd seeds a breadth-first one.

    Args:
        seed: the same seed gives the same program.
    """
    return with_window((draw_by_groups if seed % 2 else draw)(seed), seed)


def with_window(case: Case, seed: int) -> Case:
    """Gives a program a window, from one key or two to a whole sequence, and sinks one time in two."""
    draws, (_, _, seq) = Draws(seed + 6000), case.plan["mesh"]
    ring, length = seq // case.plan["ulysses"], sum(case.plan["chunks"])
    window = ring * draws.number(1, max(1, length // ring // draws.pick((1, 2, 4, 8, length))))
    # A window is exact in every dtype in which attention is; dK and dV in bfloat16 have a tolerance of their own.
    plan = case.plan | {"kv_grad_dtype": "float32"} | ({"kernel": "blockwise"} if "groups" in case.plan else {})
    sinks = draws.chance(0.5)
    # A share of one key alone is 1 whatever its score: queries and keys would have no gradient but roundings. Batches
    # with holes leave out every second position.
    window = window if sinks else max(window, ring * math.ceil(3 / ring))
    return replace(case, plan=plan, model=case.model | {"sliding_window": window, "sinks": sinks}, dtype="float64")


def draw_gpt_oss(seed: int) -> Case:
    """Draws a program of layers as in gpt-oss: windows in every second, sinks, all biases, clamped experts.

    Args:
        seed: as in `draw_window`.
    """
    case, draws = (draw_by_groups if seed % 2 else draw)(seed), Draws(seed + 7000)
    plan, count = case.plan | {"kv_grad_dtype": "float32"}, draws.number(2, 6)
    groups, ring = plan["mesh"][1] * plan["interleave"], plan["mesh"][2] // plan["ulysses"]
    experts = dict(count=count, chosen=draws.number(2, count), size=draws.number(3, 11), mlp="clamped", bias=True)
    model = case.model | dict(
        num_layers=2 * groups,
        layers=f"{groups}x(local,full)",
        layer_types={"local": {"sliding_window": ring * draws.number(1, 9)}},
        sinks=True,
        qkv_bias=True,
        output_bias=True,
        qk_norm=False,
        experts=experts | dict(scores="softmax_of_chosen", balance=draws.pick((0.0, 0.3))),
        rope=dict(theta=50.0, scaling="yarn", factor=4.0, original_length=16, truncate=False),
    )
    return replace(case, plan=plan, model=model, dtype="float64")


def draw_period(seed: int) -> Case:
    """Draws a program whose groups run again from their first layer's input; a third have layers as in gpt-oss.

    Args:
        seed: as in `draw_window`.
    """
    return with_period((draw_kinds, draw_unlike_groups, draw_gpt_oss)[seed // 2 % 3](seed), seed)


def with_period(case: Case, seed: int) -> Case:
    """Gives a program of several layer types a stash of each group's first input alone."""
    draws, plan = Draws(seed + 9000), dict(case.plan)
    attention = draws.pick(("keep", "host", "recompute"))
    plan["places"] = ("period", attention, "recompute")
    plan["alpha"] = tuple(draws.pick((0.3, 0.7, 1.0, 0.0)) for _ in range(draws.number(1, 3)))
    if plan.get("kv") in ("rebuild", "host"):
        plan["kv"] = draws.pick(("host", "rebuild")) if _most_whole(case) <= 1 else "host"
    if attention == "recompute":
        plan.pop("attention_from", None)
    return replace(case, plan=plan)


def _most_whole(case: Case) -> int:
    """Returns the most layers of a group that have no window."""
    kinds, size = parse_layers(case.model["layers"]), case.model["num_layers"]
    size //= case.plan["mesh"][1] * case.plan["interleave"]
    whole = [not case.model["layer_types"].get(kind, {}).get("sliding_window", 0) for kind in kinds]
    return max(sum(whole[begin : begin + size]) for begin in range(0, len(whole), size))


def features(case: Case) -> frozenset[str]:
    """Names the features of a program; a share for the host counts only where the schedule lets it leave."""
    plan, model = case.make_plan(), case.model
    shares, rest, _ = host_kinds(plan)
    found = {
        plan.sequence_kind: plan.mesh.seq > 1,
        case.dtype: True,
        "data parallel": plan.mesh.data > 1,
        "pipelined": plan.mesh.pipe > 1,
        "several sequences": plan.sequences_per_pipeline > 1,
        "interleaved": plan.schedule.interleave > 1,
        "unequal chunks": len(set(plan.chunk_lengths)) > 1,
        "table from CSV": plan.schedule.csv is not None,
        "shares on host": shares,
        "rest on host": rest,
        "recomputes all": plan.stash.inputs == "recompute",
        "bfloat16 dK, dV": plan.stash.kv_grad_dtype == "bfloat16",
        "fused kernel": plan.kernel == "cudnn",
        "tied embeddings": model["tied_embeddings"],
    }
    return frozenset(name for name, has in found.items() if has)


def possible_pairs(names) -> set[tuple[str, str]]:
    """Returns the pairs of features that can stand in one program."""
    excluded = {pair for line in EXCLUSIVE for pair in combinations(sorted(line), 2)}
    return set(combinations(sorted(names), 2)) - excluded


def pairs(case: Case) -> set[tuple[str, str]]:
    """Returns the pairs of features of a program."""
    return set(combinations(sorted(features(case)), 2))
