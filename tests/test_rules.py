"""Tests of the rules that config, search and plan share."""

import ast
import collections
from dataclasses import replace
from pathlib import Path

import pytest

from sppo_jax.rules import RULES, Broken, Facts, broken, check, divisors, layers_per_virtual_stage, nearest_multiples

# Facts that break one rule each, in the order of RULES, and a part of the text.
CASES = {
    "_pipelines": (dict(per_step=4, data=3), "mesh.data must divide sequence.per_step=4, got mesh.data=3; "),
    "_stages_of_table": (dict(table_stages=2, pipe=4), "mesh.pipe must be 2, the number of stages of schedule.table"),
    "_layers_of_stages": (
        dict(num_layers=6, pipe=4),
        "mesh.pipe must divide model.num_layers=6, got mesh.pipe=4; use 3 ",
    ),
    "_types_of_groups": (
        dict(layer_types=("a", "b", "b") * 4, pipe=3, interleave=2),
        "mesh.pipe * schedule.interleave must divide the layers into equal patterns of model.layers, got 6 parts; use "
        "1 or 2 or 4, or another pattern",
    ),
    "_layers_of_groups": (
        dict(num_layers=4, pipe=4, schedule="breadth-first"),
        "schedule breadth-first must have at least 2 layers per stage, got 4 layers on 4 stages",
    ),
    "_flexible_members": (dict(groups="flex", seq=6), "mesh.seq must be a power of two of at least 2"),
    "_length": (
        dict(length=1000, seq=8, tile=16),
        "mesh.seq * 16 (the tile of a device) must divide sequence.length=1000",
    ),
    "_count": (dict(length=64, seq=8, chunks=9), "9 chunks must have at least mesh.seq tokens, got mesh.seq=8"),
    "_chunk_lengths": (
        dict(chunks=(8, 10), seq=4),
        "a positive multiple of mesh.seq, got 10 in chunk 1 with mesh.seq=4",
    ),
    "_chunks_add_up": (dict(chunks=(12, 8), length=24), "add up to sequence.length=24, got 20; change a chunk by +4"),
    "_rising_shapes": (dict(shapes=(16, 8)), "sequence.shapes must be positive and rise, got [16, 8]"),
    "_shared_shapes": (
        dict(shapes=(12, 32), seq=8),
        "mesh.seq must divide each of sequence.shapes=[12, 32], got mesh.seq=8",
    ),
    "_longest_shape": (dict(shapes=(8, 16), chunks=(24, 8)), "must hold the longest chunk, 24 tokens, got 16"),
    "_factor": (
        dict(ulysses=3, seq=8),
        "sequence.ulysses=3 must divide mesh.seq, got mesh.seq=8; use one of [1, 2, 4, 8]",
    ),
    "_heads": (dict(split="ulysses", seq=8, num_heads=12), "mesh.seq must divide model.num_heads=12 for ulysses"),
    "_heads_of_states": (
        dict(state_heads=12, seq=8),
        "mesh.seq must divide the 12 heads of a layer with a state, got mesh.seq=8; use one of [1, 2, 3, 4, 6, 12]",
    ),
    "_groups_of_states": (
        dict(state_heads=4, groups="flex"),
        "a model with layers that have a state must have sequence.groups=static, got sequence.groups=flex; ",
    ),
    "_keys_of_states": (
        dict(attends=False, kv="host"),
        "a model without attention must have stash.kv=keep, because it has no keys and values, got stash.kv=host; use ",
    ),
    "_outputs_of_states": (
        dict(attends=False, places=("keep", "host", "keep")),
        "has no attention outputs for stash.attention=host, and must have stash.inputs=host, got stash.inputs=keep; ",
    ),
    "_window": (
        dict(window=30, seq=8, ulysses=2),
        "model.sliding_window must be a multiple of the 4 devices on the ring, got 30; use 28 or 32, ",
    ),
    "_kernel_of_window": (
        dict(window=32, groups="flex", kernel="cudnn"),
        "must have model.kernel=blockwise where sequence.groups=flex, got model.kernel=cudnn; change it, or use ",
    ),
    "_chunks_of_kernel": (
        dict(kernel="pallas", chunks=(512, 384), seq=4, ulysses=2),
        "each of sequence.chunks must be a multiple of 128 * 2 devices with model.kernel=pallas, got 384; use 256 or "
        "512, or model.kernel=blockwise",
    ),
    "_window_of_kernel": (
        dict(kernel="pallas", window=128, seq=2, split="ring"),
        "model.sliding_window must be a multiple of 128 * 2 devices with model.kernel=pallas, got 128; use 256, or ",
    ),
    "_memory_of_kernel": (
        dict(kernel="pallas", blocks=(70 * 2**20, 56 * 2**20)),
        "blocks of model.kernel=pallas must fit into the 56 MiB of a core's memory for them, got 70 MiB; use more ",
    ),
    "_visits_of_kernel": (
        dict(kernel="pallas", visits=(300, 1000)),
        "must visit at most 196608 pairs of blocks in a chunk, got 300 blocks of queries and 1000 of keys; use more ",
    ),
    "_wave": (
        dict(sequences=12, wave=5),
        "schedule.wave=5 must divide the sequences of a pipeline, got 12; use 4 or 6, ",
    ),
    "_one_group_at_a_time": (
        dict(kv="rebuild", schedule="sppo", one_group_at_a_time=False),
        "stash.kv=rebuild must have schedule.name=breadth-first, which passes one group of layers at a time, got "
        "schedule.name=sppo; use schedule.name=breadth-first, or stash.kv=keep",
    ),
    "_several_groups": (
        dict(weights="gathered", interleave=1),
        "weights=gathered must have at least 2 groups of layers",
    ),
    "_several_members": (
        dict(weights="gathered", data=1, seq=1, optimizer="device"),
        "mesh.weights=gathered must have stages of at least 2 devices",
    ),
    "_gathered_for_host": (
        dict(weights="resident", optimizer="host"),
        "must have mesh.weights=gathered, got mesh.weights=re",
    ),
    "_one_wave_for_host": (
        dict(optimizer="host", wave=1, sequences=2),
        "optimizer.place=host must have all 2 sequences of a pipeline in one wave, got schedule.wave=1; use "
        "schedule.wave=2",
    ),
    "_all_recomputed": (
        dict(places=("recompute", "keep", "auto")),
        "must be recompute where stash.inputs=recompute, got keep",
    ),
    "_rest_of_period": (
        dict(places=("period", "keep", "host")),
        "stash.rest must be recompute where stash.inputs=period, got host; change it, or use stash.inputs=host",
    ),
    "_types_of_period": (
        dict(places=("period", "auto", "auto"), is_mixed=False),
        "stash.inputs=period must have a model with layers of several types, got layers that are all alike; use ",
    ),
    "_teams_of_period": (
        dict(places=("period", "auto", "auto"), groups="auto"),
        "stash.inputs=period must have sequence.groups=static, got auto; change it, or use stash.inputs=host",
    ),
    "_rebuilds_of_period": (
        dict(places=("period", "auto", "auto"), kv="rebuild", most_whole=2),
        "must have at most one layer without a window in a group where stash.inputs=period, got 2; use stash.kv=host",
    ),
    "_balance_over_batch": (
        dict(balance_over="batch", sequences=4, wave=2),
        "all forwards of a step before its first backward, got 4 sequences of a pipeline in waves of 2",
    ),
}


def test_there_is_a_case_for_each_rule():
    assert [rule.__name__ for rule in RULES] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_names_what_must_hold_what_was_found_and_what_to_change(name):
    facts, words = CASES[name]
    (error,) = broken(Facts(**facts))
    assert words in str(error) and error.number == list(CASES).index(name)
    must, _, got = str(error).partition(", got ")
    assert (must, got) == (error.must, f"{error.got}; {error.change}") and "\n" not in str(error)
    with pytest.raises(Broken):
        check(Facts(**facts))


def test_with_teams_a_loss_over_sequences_is_of_sums_over_rows():
    facts = Facts(balance_over="sequence", groups="flex", sequences=4, wave=2, schedule="sppo")
    (error,) = broken(facts)
    assert "balance_over=sequence with sequence.groups=flex must have all forwards of a step before its" in str(error)
    assert "use schedule.wave=4, or sequence.groups=static" in str(error)
    for free in (dict(groups="static"), dict(groups="auto"), dict(sequences=1, wave=1), dict(balance_over=None)):
        assert not list(broken(replace(facts, **free)))


# Facts without which a rule is broken all the same.
NOT_NEEDED = {"_one_group_at_a_time": ("schedule",), "_types_of_groups": ("interleave",)}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_holds_where_one_of_its_facts_is_open(name):
    facts, _ = CASES[name]
    for open_fact in facts.keys() - {"tile"} - set(NOT_NEEDED.get(name, ())):
        left = Facts(**{key: value for key, value in facts.items() if key != open_fact})
        assert name not in [RULES[error.number].__name__ for error in broken(left)], open_fact


def test_groups_of_one_stage_have_as_many_layers_of_each_shape():
    """In any order, and of any types of a shape; or they are lone layers."""
    layer_types, stacks = ("local", "wide", "wide", "full", "full", "wide"), ("a", "b", "b", "a", "a", "b")
    for interleave in (1, 3, 6):
        check(Facts(layer_types=layer_types, stacks=stacks, pipe=1, interleave=interleave))
    with pytest.raises(
        Broken, match=r"into groups with as many layers of each shape, got 2 parts; use 1 or 3 or 6, or"
    ):
        check(Facts(layer_types=layer_types, stacks=stacks, pipe=1, interleave=2))
    with pytest.raises(Broken, match=r"into equal patterns of model.layers, got 3 parts; use 1, or another pattern"):
        check(Facts(layer_types=layer_types, stacks=stacks, pipe=3))


def test_the_last_group_of_one_stage_may_be_the_beginning_of_a_period():
    period = ("local", "local", "full")
    facts = Facts(
        num_layers=8, layer_types=(*period, *period, "local", "local"), stacks=("a",) * 8, pipe=1, interleave=3
    )
    check(facts)
    assert layers_per_virtual_stage(8, 1, 3, facts.layer_types, facts.stacks) == 3
    check(replace(facts, stacks=("a", "a", "b", "a", "a", "b", "a", "a")))
    for change in (
        dict(interleave=5),
        dict(pipe=3, interleave=1),
        dict(layer_types=(*period, *period, "full", "local")),
        dict(layer_types=()),
    ):
        assert list(broken(replace(facts, **change))), change


def test_each_factor_suits_the_kind_of_sequence_parallelism():
    for split in (None, "ulysses", "ring", "hybrid"):
        for seq in range(1, 9):
            for factor in range(9):
                given = factor or None
                allowed = {"ulysses": (None, seq), "ring": (None, 1)}.get(split, (None, factor))
                holds = given in allowed and (given is None or seq % given == 0)
                assert holds == (not list(broken(Facts(split=split, seq=seq, ulysses=given))))


def test_nearest_layers_and_waves_by_all_cases():
    for layers in range(1, 13):
        for pipe in range(1, 14):
            for interleave in (1, 2):
                stages = pipe * interleave
                if layers % stages == 0:
                    assert layers_per_virtual_stage(layers, pipe, interleave) == layers // stages
                else:
                    with pytest.raises(Broken):
                        layers_per_virtual_stage(layers, pipe, interleave)
    for wave, words in ((0, "use 1, "), (5, "use 4 or 6, "), (7, "use 6 or 12, "), (13, "use 12, ")):
        (error,) = broken(Facts(sequences=12, wave=wave))
        assert error.change.startswith(words)
    assert (nearest_multiples(10, 4), nearest_multiples(3, 4), nearest_multiples(-1, 4)) == ("8 or 12", "4", "4")


def _texts(path):
    """Yields the rule of each message of a file, values left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        rule = text.partition(", got ")[0]
        # What begins with a name that is filled in is another rule for each name.
        named = not rule.startswith(("{}", " must"))
        if named and " must " in rule and ", got " in text and "\n" not in text:
            yield rule


def test_no_rule_stands_twice():
    """The rule of each message is in one file, once."""
    root = Path(__file__).parent.parent / "sppo_jax"
    found = collections.defaultdict(set)
    for path in sorted(set(root.rglob("*.py")) - set(root.glob("data/*.py"))):
        for rule in _texts(path):
            found[rule].add(str(path.relative_to(root)))
    assert len(found) > 200
    assert {rule: files for rule, files in found.items() if len(files) > 1} == {}


def test_divisors_rise_and_are_all():
    for value in range(1, 200):
        assert divisors(value) == [count for count in range(1, value + 1) if value % count == 0]
    assert len(divisors(2**30)) == 31
