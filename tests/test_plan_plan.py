"""The Plan holds together, survives JSON and refuses what it does not know."""

import json
from dataclasses import replace
from itertools import product

import pytest
from exactness import small_plan

from sppo_jax.plan.parts import MeshShape, PlannedFor, Predicted, SchedulePlan, StashPlan
from sppo_jax.plan.plan import Plan
from sppo_jax.program.stash import stash_classes
from sppo_jax.schedule.csv_format import to_csv
from sppo_jax.schedule.generators import make_table


def make(**changes) -> Plan:
    stash = StashPlan(inputs="host", attention="host", rest="recompute", alpha=(0.5, 0.5, 0.25, 0.0, 0.0))
    fields = dict(
        version="1.2.3",
        mesh=MeshShape(data=2, pipe=2, seq=4),
        ulysses=2,
        ring=2,
        sequence_kind="hybrid",
        sequence_length=56,
        sequences_per_pipeline=1,
        chunk_lengths=(16, 16, 16, 8),
        schedule=SchedulePlan(name="sppo"),
        stash=stash,
        kv_slots=1,
        predicted=Predicted(step_s=1.5, bubble_fraction=0.2, hbm_bytes=(3, 4), host_bytes=(5, 6)),
        reasons={"chunks": "they fit", "weather": "sunny"},
    )
    return Plan(**{**fields, **changes})


def test_json_round_trip():
    for plan in (make(), make(schedule=SchedulePlan(name="table", csv=to_csv(make().table())))):
        again = Plan.from_json(plan.to_json())
        assert again == plan and hash(again) == hash(plan)
        assert Plan.from_dict(plan.to_dict()) == plan
        assert again.table().ticks == make().table().ticks


def test_a_plan_from_before_groups_is_read():
    values = make().to_dict()
    del values["groups"]
    del values["schedule"]["wave"]
    assert Plan.from_dict({**values, "schema_version": 2}) == make()


def test_a_plan_from_before_waves_is_read():
    values = make().to_dict()
    del values["schedule"]["wave"]
    assert Plan.from_dict({**values, "schema_version": 3}) == make()
    with pytest.raises(ValueError, match=r"schedule of plan\.json must be an object, got 3"):
        Plan.from_dict({**values, "schedule": 3, "schema_version": 3})


def test_a_plan_from_before_shapes_has_none_and_a_newer_one_is_refused():
    values = make().to_dict()
    del values["schedule"]["shapes"], values["stash"]["kv"]
    assert Plan.from_dict({**values, "schema_version": 4}) == make() and make().schedule.shapes == ()
    with pytest.raises(ValueError, match=r"schema_version of plan\.json must be 17, got 18; plan again"):
        Plan.from_dict({**make().to_dict(), "schema_version": 18})
    with pytest.raises(ValueError, match=r"schedule of plan\.json must have every key, got none named shapes"):
        Plan.from_dict(values)


def test_a_plan_from_before_keys_were_made_again_keeps_them():
    values = make().to_dict()
    del values["stash"]["kv"]
    assert Plan.from_dict({**values, "schema_version": 5}) == make() and make().stash.kv == "keep"


def test_a_plan_from_before_gathered_weights_has_resident_ones():
    values = make().to_dict()
    del values["weights"]
    assert Plan.from_dict({**values, "schema_version": 6}) == make() and make().weights == "resident"


def test_a_plan_from_before_late_attention_stashes_it_all():
    values = make().to_dict()
    del values["stash"]["attention_from"]
    assert Plan.from_dict({**values, "schema_version": 7}) == make() and make().stash.attention_from == 0


def test_a_plan_from_before_waiting_rooms_on_the_host_keeps_them():
    values = make().to_dict()
    del values["stash"]["waiting"]
    assert Plan.from_dict({**values, "schema_version": 8}) == make() and make().stash.waiting == "keep"


def test_a_plan_from_before_optimizers_on_the_host_has_them_on_the_device():
    values = make().to_dict()
    del values["optimizer"]
    assert Plan.from_dict({**values, "schema_version": 9}) == make() and make().optimizer == "device"


def test_a_plan_from_before_blocking_saves_has_asynchronous_ones():
    values = make().to_dict()
    del values["saves"]
    assert Plan.from_dict({**values, "schema_version": 10}) == make() and make().saves == "async"
    with pytest.raises(ValueError, match="saves of a plan must be one of async, blocking, got 'never'; choose one"):
        Plan.from_dict({**values, "saves": "never"})


def test_a_plan_from_before_host_pieces_has_one_array():
    values = make().to_dict()
    assert values.pop("host_pieces") == [1024]
    assert Plan.from_dict({**values, "schema_version": 11}) == make() and make().host_pieces == (1024,)
    cut = make(host_pieces=(858, 166))
    assert Plan.from_json(cut.to_json()) == cut and hash(Plan.from_json(cut.to_json())) == hash(cut)
    assert "the stash in 2 arrays, 858 : 166" in cut.describe() and "arrays" not in make().describe()


def test_a_plan_from_before_documents_counted_is_for_full_ones():
    values = make().to_dict()
    del values["planned_for"], values["cluster"], values["predicted"]["documents_step_s"]
    found = Plan.from_dict({**values, "schema_version": 12})
    assert found == make() and found.planned_for.documents == "full" and found.predicted.documents_step_s is None
    known = make(planned_for=PlannedFor(documents="known", mean_tokens=17.0, attended=0.25))
    assert Plan.from_json(known.to_json()) == known and hash(known) == hash(known)
    with pytest.raises(ValueError, match="planned_for.documents of a plan must be one of full, known, got 'none'"):
        make(planned_for=PlannedFor(documents="none"))


def test_a_plan_from_before_sequences_of_one_document_has_any_number():
    values = make().to_dict()
    assert values.pop("backward_queries") == 0
    assert values.pop("sequence_documents") == "many"
    assert Plan.from_dict({**values, "schema_version": 14}) == make()
    one = make(sequence_documents="one")
    assert Plan.from_json(one.to_json()) == one and one != make()
    with pytest.raises(ValueError, match="sequence_documents of a plan must be one of many, one, got 'two'"):
        make(sequence_documents="two")
    with pytest.raises(ValueError, match="sequence_documents of a plan with teams must be many, .*, got one with"):
        make(sequence_documents="one", groups="flex")


NOT_SHARES = [(), (1023,), (1024, 1), (1025, -1), (1024, 0), (512.0, 512.0), (1023, True), "1024"]


@pytest.mark.parametrize("pieces", NOT_SHARES)
def test_host_pieces_are_shares_of_1024(pieces):
    words = "host_pieces of a plan must be whole numbers above 0 that add up to 1024, got .*; use .1024. for one array"
    with pytest.raises(ValueError, match=words):
        make(host_pieces=pieces)


@pytest.mark.parametrize(
    ("chunks", "schedule", "words"),
    [
        ((16, 16, 24), "breadth-first", "at least 4 chunks on 2 stages, so that each waits for 2 ticks or more, got 3"),
        (
            (16, 16, 16, 8),
            "sppo",
            "passes one group of layers at a time, got schedule.name=sppo; use",
        ),
    ],
)
def test_chunks_that_wait_on_the_host_wait_long_enough(chunks, schedule, words):
    plan = SchedulePlan(name=schedule, interleave=2)
    with pytest.raises(ValueError, match="stash.waiting=host must have") as error:
        make(chunk_lengths=chunks, schedule=plan, stash=replace(STASH, waiting="host"))
    assert words in str(error.value)


def test_a_plan_with_shapes_holds_together():
    plan = make(schedule=SchedulePlan(name="sppo", shapes=(12, 20)))
    assert Plan.from_json(plan.to_json()) == plan and hash(plan) == hash(Plan.from_json(plan.to_json()))
    assert plan.table().shapes == plan.outline().shapes == (12, 20)
    assert plan.table().tick_tokens == plan.outline().tick_tokens and set(plan.table().tick_tokens) == {12, 20}
    assert "ticks of 12, 20" in plan.describe()
    given = make(schedule=SchedulePlan(name="table", csv=to_csv(make().table()), shapes=(12, 20)))
    assert given.table().tick_tokens == plan.table().tick_tokens


def test_a_plan_in_waves_holds_together():
    stash = replace(STASH, alpha=(0.5,) * 8 + (0.0,))
    wave = dict(schedule=SchedulePlan(name="sppo", wave=2), sequences_per_pipeline=4, kv_slots=2, stash=stash)
    plan = make(**wave)
    assert plan.table() == make_table("sppo", 2, 4, (16, 16, 16, 8), 1, 2) and plan.table().wave == 2
    assert Plan.from_json(plan.to_json()) == plan and "waves of 2 sequences" in plan.describe()
    own = SchedulePlan(name="own", csv=to_csv(plan.table()))
    with pytest.raises(ValueError, match="sequences of a wave must be those of the schedule table, 2, got 1"):
        make(**{**wave, "schedule": own})
    assert make(**{**wave, "schedule": replace(own, wave=2)}).table().ticks == plan.table().ticks


def test_json_has_the_public_keys_as_plain_lists():
    values = make().to_dict()
    assert values["mesh"] == {"data": 2, "pipe": 2, "seq": 4}
    assert values["chunk_lengths"] == [16, 16, 16, 8]
    assert values["predicted"]["hbm_bytes"] == [3, 4] and values["predicted"]["host_bytes"] == [5, 6]
    assert {"sequence_kind", "schedule", "stash", "reasons", "schema_version", "version"} <= set(values)


def test_table_has_the_plans_shape():
    table = make().table()
    assert table == make_table("sppo", 2, 1, (16, 16, 16, 8))


def test_description_gives_every_choice_with_its_reason():
    text = make().describe()
    for words in ("data 2 x pipe 2 x seq 4", "4: 3 x 16, 8", "they fit", "weather", "2 x 0.5, 0.25, 2 x 0.0", "20.0%"):
        assert words in text


def edited(path: str, value) -> str:
    values = make().to_dict()
    *groups, key = path.split(".")
    place = values
    for group in groups:
        place = place[group]
    if value is None:
        del place[key]
    else:
        place[key] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON text"),
        ("[]", "JSON object, got a value of type list"),
        (edited("schema_version", 99), "schema_version of plan.json must be 17, got 99"),
        (edited("schema_version", None), "schema_version of plan.json must be 17, got None"),
        (edited("color", "red"), ", got color too; plan again"),
        (edited("mesh.color", "red"), "mesh of plan.json must have only the keys data, pipe, seq, got color too"),
        (edited("stash.alpha", None), "stash of plan.json must have every key, got none named alpha"),
        (edited("kv_slots", None), "plan.json must have every key, got none named kv_slots"),
        (edited("mesh", 3), "mesh of plan.json must be an object, got 3"),
    ],
)
def test_json_errors(text, words):
    with pytest.raises(ValueError) as error:
        Plan.from_json(text)
    assert words in str(error.value)


STASH = make().stash
AGAIN = StashPlan(inputs="recompute", attention="recompute", rest="recompute", alpha=())
PERIOD = StashPlan(inputs="period", attention="host", rest="recompute", alpha=())
BY_GROUPS = SchedulePlan(name="breadth-first", interleave=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(schema_version=1), "schema_version of a plan must be 17, got 1"),
        (dict(backward_queries=-1, kernel="cudnn"), "backward_queries of a plan must be 0, or more with"),
        (dict(backward_queries=8192), "got 8192 with kernel=blockwise, groups=static"),
        (dict(schedule=SchedulePlan(name="sppo", wave=2)), "must divide the sequences of a pipeline, got 1; use 1"),
        (dict(mesh=MeshShape(data=0, pipe=2, seq=4)), "mesh.data of a plan must be at least 1, got 0"),
        (dict(sequence_kind="star"), "ulysses, ring, hybrid, got 'star'"),
        (dict(ring=1), "ulysses * ring of a plan must be mesh.seq = 4, got 2 * 1"),
        (
            dict(sequence_kind="ulysses"),
            "must be mesh.seq (or auto) for sequence.split=ulysses, got sequence.ulysses=2",
        ),
        (dict(sequence_length=64), "sequence.chunks must add up to sequence.length=64, got 56"),
        (dict(chunk_lengths=(16, 16, 14, 10)), "a positive multiple of mesh.seq, got 14 in chunk 2"),
        (
            dict(schedule=SchedulePlan(name="sppo", shapes=(10, 16))),
            "must divide each of sequence.shapes=[10, 16], got mesh.seq=4 and [10]",
        ),
        (dict(schedule=SchedulePlan(name="sppo", shapes=(8, 12))), "hold the longest chunk, 16 tokens, got 12"),
        (dict(schedule=SchedulePlan(name="sppo", shapes=(16, 8))), "must be positive and rise, got [16, 8]"),
        (
            dict(schedule=SchedulePlan(name="sppo", shapes=tuple(range(4, 32, 4)))),
            "must be at most 6 token counts, got 7",
        ),
        (dict(kv_slots=2), "kv_slots of a plan must be 1 for the schedule, got 2"),
        (
            dict(stash=replace(STASH, inputs="moon")),
            "must be one of keep, host, recompute, period, got 'moon'",
        ),
        (dict(stash=replace(STASH, kv_grad_dtype="int8")), "kv_grad_dtype must be one of"),
        (
            dict(stash=replace(STASH, inputs="recompute")),
            "stash.attention and stash.rest must be recompute where stash.inputs=recompute",
        ),
        (dict(stash=replace(STASH, kv="disk")), "stash.kv must be one of keep, recompute, rebuild, host, got 'disk'"),
        (
            dict(stash=replace(STASH, kv="rebuild")),
            "one group of layers at a time, got schedule.name=sppo; use schedule.name=breadth-first, or stash.kv=keep",
        ),
        (
            dict(schedule=BY_GROUPS, stash=replace(AGAIN, alpha=(0.0,) * 9, kv="rebuild")),
            "stash.kv=rebuild must have a stash of every layer, got stash.inputs=recompute",
        ),
        (
            dict(stash=replace(PERIOD, alpha=STASH.alpha, rest="keep")),
            "stash.rest must be recompute where stash.inputs=period, got keep",
        ),
        (
            dict(schedule=BY_GROUPS, chunk_lengths=(56,), stash=replace(STASH, alpha=(0.0,) * 4, kv="rebuild")),
            "stash.kv=rebuild of a plan must have at least 2 chunks, got 1; write recompute there, or plan again",
        ),
        (
            dict(schedule=BY_GROUPS, stash=replace(STASH, alpha=(0.0,) * 9, kv="recompute")),
            "stash.kv=recompute of a plan must have exactly 1 chunk, got 4; write rebuild there, or plan again",
        ),
        (
            dict(stash=replace(AGAIN, alpha=STASH.alpha, attention_from=1)),
            "attention_from must be 0 where no attention outputs are stashed, got 1 with stash.attention=recompute",
        ),
        (dict(stash=replace(STASH, attention_from=4)), "attention_from must be a chunk's number, 0 to 3, got 4"),
        (dict(stash=replace(STASH, attention_from=-1)), "attention_from must be a chunk's number, 0 to 3, got -1"),
        (
            dict(groups="flex", stash=replace(STASH, attention_from=1)),
            "must be 0 where each document has its own team of devices, got 1; use sequence.groups=static",
        ),
        (
            dict(
                schedule=SchedulePlan(name="gpipe"),
                sequences_per_pipeline=2,
                kv_slots=2,
                stash=replace(STASH, alpha=(0.0,) * 5, attention_from=2),
            ),
            "got gpipe, interleave 1, where chunks on both sides share buffers",
        ),
        (dict(weights="sold"), "weights of a plan must be one of resident, gathered, got 'sold'"),
        (
            dict(weights="gathered"),
            "mesh.weights=gathered must have at least 2 groups of layers per stage, got 1",
        ),
        (
            dict(
                weights="gathered",
                mesh=MeshShape(data=1, pipe=2, seq=1),
                ulysses=1,
                ring=1,
                schedule=BY_GROUPS,
                stash=replace(STASH, alpha=(0.0,) * 9),
            ),
            "stages of at least 2 devices, which share the weights, got mesh.data=1 and mesh.seq=1",
        ),
        (dict(optimizer="sold"), "optimizer of a plan must be one of device, host, got 'sold'"),
        (dict(optimizer="host"), "optimizer.place=host must have at least 2 groups of layers per stage, got 1"),
        (
            dict(
                optimizer="host",
                weights="gathered",
                sequences_per_pipeline=2,
                schedule=BY_GROUPS,
                stash=replace(STASH, alpha=(0.0,) * 18),
            ),
            "have all 2 sequences of a pipeline in one wave, got schedule.wave=1; use schedule.wave=2, or",
        ),
        (dict(schedule=SchedulePlan(name="breadth-first")), "must have schedule.interleave of at least 2, got 1"),
        (dict(stash=replace(STASH, alpha=(0.0,) * 4)), "each of the 5 diagonals of the schedule, got 4"),
        (dict(stash=replace(STASH, alpha=(2.0, 0.0, 0.0, 0.0, 0.0))), "in [0, 1], got 2.0 at diagonal 0"),
        (
            dict(stash=replace(STASH, alpha=(0.0, 0.0, 0.0, 0.0, 0.5))),
            "got 0.5 at diagonal 4, which is read back after 1;",
        ),
        (dict(schedule=SchedulePlan(name="seq1f1b", interleave=2)), "use schedule.name=interleaved-seq1f1b"),
        (
            dict(schedule=SchedulePlan(name="table", csv=to_csv(make_table("sppo", 3, 1, (8,))))),
            "stages must be those of the schedule table, 3, got 2",
        ),
        (
            dict(schedule=SchedulePlan(name="table", csv=to_csv(make_table("sppo", 2, 1, (56,))))),
            "chunk lengths must be those of the schedule table",
        ),
        (dict(schedule=SchedulePlan(name="table", csv=to_csv(make().table()).replace("B0.0.0", ""))), "only idle"),
    ],
)
def test_plans_that_do_not_hold_together(changes, words):
    with pytest.raises(ValueError) as error:
        make(**changes)
    text = str(error.value)
    assert words in text or (words == "only idle" and "got no unit" in text)


def test_breadth_first_parts_late_chunks_from_early_ones_wherever_it_is_asked_to():
    sizes = product((1, 2, 3, 4), (2, 3), ((1, 1), (2, 1), (2, 2)), (2, 3, 5))
    for pipe, interleave, (sequences, wave), num_chunks in sizes:
        for first in range(1, num_chunks):
            table = dict(schedule="breadth-first", interleave=interleave, sequences=sequences, wave=wave)
            plan = small_plan((4,) * num_chunks, mesh=(1, pipe, 1), **table, attention_from=first)
            outline = plan.outline()
            of_class = zip(outline.bundle_last_chunks, stash_classes(outline, plan.stash, 1), strict=True)
            assert {chunk for chunk, one in of_class if one.recomputes} == set(range(first))


def test_alpha_is_one_value_in_a_group():
    # In a stream of two sequences, diagonals 0 and 4 stand in one tick.
    stash = replace(STASH, alpha=(0.5, 0.0, 0.0, 0.0, 0.0))
    with pytest.raises(ValueError) as error:
        make(schedule=SchedulePlan(name="gpipe"), sequences_per_pipeline=2, kv_slots=2, stash=stash)
    assert "got 0.0 at diagonal 4 and 0.5 at diagonal 0" in str(error.value)
