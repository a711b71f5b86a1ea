"""From a config to a Plan: what is pinned stays, what is auto is chosen by rule, and errors say what to change."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest

from sppo_jax import hardware
from sppo_jax.config import config_from_dict
from sppo_jax.hardware import DEVICES, make_cluster, parse_cluster, usable_host_bytes
from sppo_jax.plan.plan import Plan
from sppo_jax.schedule.csv_format import to_csv
from sppo_jax.schedule.generators import make_table
from sppo_jax.search.make import check_plan, make_plan, resolve_cluster
from sppo_jax.search.search import search
from sppo_jax.search.space.offload import ALPHA_LEVELS, _largest_cap, _levels
from sppo_jax.search.space.partitions import partitions
from sppo_jax.search.space.request import read_request

TINY = dict(vocab_size=256, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, mlp_size=64)
EXPERTS = {**TINY, "experts": {"count": 8, "chosen": 2, "size": 16}}
PER_BATCH = {**TINY, "experts": {"count": 8, "chosen": 2, "size": 16, "balance_over": "batch"}}
LLAMA = dict(vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_size=14336)
HOST = {"inputs": "host", "attention": "host", "rest": "recompute"}
CPU, H200 = make_cluster(DEVICES["cpu"]), make_cluster(DEVICES["h200"], 8)


def changed(cluster, **figures):
    """A cluster whose device has other figures."""
    return replace(cluster, device=replace(cluster.device, **figures))


def config(model=TINY, length=64, **groups):
    sequence = {"length": length, **groups.pop("sequence", {})}
    train = {"steps": 1, **groups.pop("train", {})}
    return config_from_dict({"model": model, "sequence": sequence, "train": train, **groups})


def plan(*args, device=CPU, **groups) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return make_plan(config(*args, **groups), device)


def test_planning_is_pure_and_survives_json():
    made = plan(length=4096, mesh={"pipe": 2, "seq": 2})
    assert made == plan(length=4096, mesh={"pipe": 2, "seq": 2})
    assert Plan.from_json(made.to_json()) == made
    assert {"mesh", "sequence_kind", "chunks", "schedule", "stash", "alpha", "hbm", "host"} <= set(made.reasons)
    assert len(made.predicted.hbm_bytes) == len(made.predicted.host_bytes) == 2
    assert made.predicted.step_s > 0 and 0 < made.predicted.bubble_fraction < 1


def test_a_plan_says_that_sequences_hold_one_document_where_the_settings_do():
    many, one = plan(length=64), plan(length=64, data={"pack": "none"})
    assert (many.sequence_documents, one.sequence_documents) == ("many", "one")
    assert one.reasons["sequence_documents"] == "sequences hold one document at most: data.pack=none gives each its own"
    assert replace(one, sequence_documents="many", reasons=many.reasons) == many
    recall = {"source": "recall", "recall": {"pairs": 2, "distances": [8]}}
    assert "those of a task that is drawn" in plan(length=64, data=recall).reasons["sequence_documents"]
    teams = plan(
        device=make_cluster(DEVICES["cpu"], 2), sequence={"groups": "flex"}, data={"pack": "none", "fill": 0.9}
    )
    assert (teams.groups, teams.sequence_documents) == ("flex", "many")


def test_planning_never_imports_jax():
    code = (
        "import sys, sppo_jax; from sppo_jax.config import config_from_dict\n"
        f"c = config_from_dict(dict(model={TINY!r}, sequence=dict(length=64), train=dict(steps=1)))\n"
        "sppo_jax.make_plan(c); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("seq", "sequence", "expected"),
    [
        (1, {}, ("ulysses", 1, 1)),
        (4, {}, ("ulysses", 4, 1)),
        (3, {}, ("ring", 1, 3)),
        (8, {"split": "ring"}, ("ring", 1, 8)),
        (8, {"ulysses": 2}, ("hybrid", 2, 4)),
        (2, {"split": "ring"}, ("ring", 1, 2)),
        (8, {"split": "hybrid"}, ("hybrid", 4, 2)),
        (4, {"split": "hybrid"}, ("hybrid", 2, 2)),
        (2, {"split": "hybrid"}, ("hybrid", 1, 2)),
        (8, {"split": "hybrid", "ulysses": 2}, ("hybrid", 2, 4)),
    ],
)
def test_sequence_kind(seq, sequence, expected):
    made = plan(length=96, mesh={"seq": seq}, sequence=sequence)
    assert (made.sequence_kind, made.ulysses, made.ring) == expected


@pytest.mark.parametrize(
    ("chunks", "per_pipeline", "interleave", "expected"),
    [
        (4, 1, 1, "sppo"),
        (4, 2, 1, "seq1f1b"),
        (1, 2, 1, "1f1b"),
        (1, 1, 1, "1f1b"),
        (4, 1, 2, "sppo"),
        (4, 2, 2, "interleaved-seq1f1b"),
        (1, 2, 2, "interleaved-1f1b"),
    ],
)
def test_schedule_by_itself(chunks, per_pipeline, interleave, expected):
    made = plan(
        mesh={"pipe": 2},
        sequence={"chunks": chunks, "per_pipeline": per_pipeline},
        schedule={"interleave": interleave},
    )
    assert (made.schedule.name, made.schedule.interleave) == (expected, interleave)


def test_pinned_choices_stay():
    made = plan(
        mesh={"data": 3, "pipe": 2},
        sequence={"chunks": [32, 16, 16], "per_pipeline": 2},
        schedule={"name": "gpipe"},
        stash={"inputs": "keep", "attention": "recompute", "rest": "keep", "kv_grad_dtype": "bfloat16"},
    )
    assert made.chunk_lengths == (32, 16, 16) and made.schedule.name == "gpipe" and made.mesh.data == 3
    assert (made.stash.inputs, made.stash.attention, made.stash.rest) == ("keep", "recompute", "keep")
    assert made.stash.kv_grad_dtype == "bfloat16" and set(made.stash.alpha) == {0.0} and made.kv_slots == 2


def test_one_stage_is_not_cut_while_it_fits():
    assert plan(length=4096).chunk_lengths == (4096,)


def test_more_stages_want_more_chunks_down_to_the_smallest_useful_one():
    counts = [len(plan(length=8192, mesh={"pipe": pipe}).chunk_lengths) for pipe in (1, 2, 4)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] > 8
    assert max(counts) <= 8192 // CPU.device.smallest_chunk
    finer = changed(CPU, smallest_chunk=1024)
    assert len(plan(length=8192, mesh={"pipe": 4}, device=finer).chunk_lengths) == 8


def test_several_sequences_want_fewer_chunks():
    alone = plan(length=16384, mesh={"pipe": 4})
    several = plan(length=16384, mesh={"pipe": 4}, sequence={"per_pipeline": 8})
    assert len(several.chunk_lengths) < len(alone.chunk_lengths)


def test_memory_makes_chunks():
    whole = plan(length=16384, model={**TINY, "mlp_size": 4096})
    assert whole.chunk_lengths == (16384,)
    tight = changed(CPU, hbm_bytes=int(whole.predicted.hbm_bytes[0] * 0.6))
    cut = plan(length=16384, model={**TINY, "mlp_size": 4096}, device=tight)
    assert len(cut.chunk_lengths) > 1
    assert max(cut.predicted.hbm_bytes) < tight.device.hbm_bytes
    assert cut.reasons["hbm"].startswith("fits")


def test_what_cannot_fit_is_planned_with_least_memory_and_says_so():
    with pytest.warns(
        UserWarning, match="no plan fits: the smallest plan is over HBM by .* of 940 B that plans may take"
    ):
        made = make_plan(config(length=4096), changed(CPU, hbm_bytes=1000))
    assert made.reasons["hbm"].startswith("DOES NOT FIT")
    assert max(made.predicted.hbm_bytes) < max(plan(length=4096).predicted.hbm_bytes)


def test_interleaved_counts_are_multiples_of_the_stages():
    request = read_request(config(length=4096, mesh={"pipe": 2}, schedule={"interleave": 2}), CPU)
    counts = {partition.num_chunks for partition in partitions(request)}
    assert sorted(counts) == [2, 4, 8, 16]
    request = read_request(config(length=3100, mesh={"pipe": 2}, schedule={"interleave": 2}), CPU)
    assert {partition.num_chunks % 2 for partition in partitions(request)} == {0}


def test_flops_balance_shortens_the_tail():
    made = plan(length=2**17, sequence={"chunks": 8, "balance": "flops"}, mesh={"pipe": 4})
    lengths = made.chunk_lengths
    assert sum(lengths) == 2**17 and lengths[0] > lengths[-1] and len(set(lengths)) <= 4
    equal = plan(length=2**17, sequence={"chunks": 8, "balance": "equal"}, mesh={"pipe": 4})
    assert made.predicted.step_s < equal.predicted.step_s


def test_millions_of_tokens_go_to_the_host_where_copies_hide():
    made = plan(LLAMA, 2**22, mesh={"pipe": 4, "seq": 8}, device=make_cluster(DEVICES["h100"], 32))
    assert (made.stash.inputs, made.stash.attention) == ("host", "host") and made.stash.rest != "keep"
    assert set(made.stash.alpha) <= set(ALPHA_LEVELS) and max(made.stash.alpha) == 1.0
    assert min(made.predicted.host_bytes) > 2**30
    assert all(length >= 2048 for length in made.chunk_lengths)


def test_alpha_rises_with_the_work_to_hide_behind():
    device = changed(H200, host_link_bytes_s=2.3e9)
    made = plan(LLAMA, 2**18, mesh={"pipe": 4, "seq": 8}, sequence={"chunks": 64}, device=device, stash=HOST)
    alpha = made.stash.alpha
    assert set(alpha) == set(ALPHA_LEVELS)
    gaps = [made.table().bundle_gaps[bundle] for bundle in made.table().diagonal_bundles]
    rising = [value for value, gap in zip(alpha, gaps, strict=True) if gap >= 3]
    # The last diagonals belong to the last stages and chunks alone; all others start at an ever later chunk.
    assert rising == sorted(rising)


def test_alpha_by_hand():
    # One stage of 2 layers, chunks of 16: seconds = flops / rate; alpha = bandwidth * seconds / bytes.
    device = changed(CPU, matmul_flops_s=1e6, overhead_s=0.0, overhead_tokens=0, host_link_bytes_s=1.0, tile=1)
    model = {**TINY, "num_layers": 2}
    weights = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    flops = 2 * (2 * weights * 16 + 4 * 32 * (0 + 128))
    size = 2 * 16 * (32 * 4 + 32 * 4 + 4 * 4)
    exactly_half = 0.5 * size / (flops / 1e6)
    for bandwidth, expected in ((exactly_half * 1.001, 0.5), (exactly_half * 0.999, 0.25)):
        made = plan(
            model, sequence={"chunks": 4}, device=changed(device, host_link_bytes_s=bandwidth), stash={"inputs": "host"}
        )
        assert made.stash.alpha[0] == expected and made.stash.alpha[-1] == 0.0


def test_alpha_is_lowered_to_what_the_host_holds():
    free = plan(length=4096, mesh={"pipe": 2}, sequence={"chunks": 16}, stash=HOST)
    assert max(free.stash.alpha) == 1.0
    need = free.predicted.host_bytes[0]
    little = replace(CPU, host_bytes=int(need * 0.6))
    tight = plan(length=4096, mesh={"pipe": 2}, sequence={"chunks": 16}, device=little, stash=HOST)
    # Plans leave 5% of a host free. The share is the largest that the rest holds, to a hundredth.
    most = need * 0.6 * 0.95
    assert most * 0.97 < tight.predicted.host_bytes[0] <= most
    assert (
        f"at most {max(tight.stash.alpha):g} of the stash is offloaded, because the host has" in tight.reasons["alpha"]
    )


@pytest.mark.parametrize(
    "preset, length, cluster, share",
    [
        ("qwen3-8b", 6815744, "h100:1x8", 0.94),
        pytest.param("llama3-8b", 2**25, "h200:4x8", 0.73, marks=pytest.mark.slow),
        ("llama3-8b", 7340032, "h100:1x8", 0.95),
        pytest.param("llama3-8b", 7077888, "h100:1x8", 1.0, marks=pytest.mark.slow),
    ],
)
def test_as_much_of_the_stash_goes_to_the_host_as_the_host_holds(preset, length, cluster, share):
    groups = {"model": {"preset": preset}, "sequence": {"length": length}, "train": {"steps": 10}}
    found = search(config_from_dict(groups), parse_cluster(cluster))
    assert found.fits and found.plan.schedule.name == "breadth-first"
    assert max(found.plan.stash.alpha) == pytest.approx(share, abs=0.02)
    assert max(found.plan.predicted.host_bytes) > 0.98 * usable_host_bytes(parse_cluster(cluster))


def test_a_host_that_does_not_hold_what_the_places_send_gets_no_more():
    # Bytes over the host's are linear in the cap, or bent: the answer is the same.
    for power in (1, 3):
        caps = [
            _largest_cap(lambda cap, most=most, power=power: round(1e9 * (cap - most) ** power))
            for most in (1.0, 0.999, 0.93, 0.005, -1.0)
        ]
        assert caps == [1.0, 0.99, 0.93, 0.0, 0.0]


def test_one_share_is_solved_and_several_are_in_levels():
    assert _levels([0.0, 0.937, 0.937]) == {0.0: 0.0, 0.937: 0.93}
    assert _levels([0.3, 0.937, 0.0]) == {0.0: 0.0, 0.3: 0.25, 0.937: 0.5}


def test_one_alpha_for_all_but_what_is_read_back_at_once():
    made = plan(mesh={"pipe": 2}, sequence={"chunks": 4}, stash={"alpha": 0.3})
    assert made.stash.alpha == (0.3, 0.3, 0.3, 0.3, 0.0)
    assert "1 of 5 forward ticks" in made.reasons["alpha"]


def test_alpha_as_a_list_is_taken_as_given():
    values = [1.0, 0.75, 0.5, 0.25, 0.0]
    made = plan(mesh={"pipe": 2}, sequence={"chunks": 4}, stash={"alpha": values})
    assert made.stash.alpha == tuple(values)


def test_stash_stays_where_it_cannot_hide():
    one_layer = plan(mesh={"pipe": 4}, sequence={"chunks": 4})
    one_chunk = plan()
    for made in (one_layer, one_chunk):
        assert (made.stash.inputs, made.stash.attention, made.stash.rest) == ("keep", "keep", "keep")
    assert plan(stash={"inputs": "recompute"}).stash.attention == "recompute"


def test_table_given_as_a_file(tmp_path):
    table = make_table("gpipe", 2, 2, (32, 16, 16))
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(table))
    groups = dict(mesh={"pipe": 2}, schedule={"name": "table", "table": str(path)})
    made = plan(sequence={"per_pipeline": 2}, **groups)
    assert made.table() == table and made.schedule.csv == to_csv(table)
    path.unlink()
    assert Plan.from_json(made.to_json()).table() == table
    with pytest.raises(ValueError, match="must be a readable CSV file"):
        plan(sequence={"per_pipeline": 2}, **groups)


def test_table_in_waves_given_as_a_file(tmp_path):
    table = make_table("sppo", 2, 4, (32, 16, 16), 1, 2)
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(table))
    made = plan(mesh={"pipe": 2}, sequence={"per_pipeline": 4}, schedule={"name": "table", "table": str(path)})
    assert made.schedule.wave == 2 and made.kv_slots == 2 and made.table() == table


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            dict(sequence={"per_pipeline": 1}),
            "sequence.per_pipeline must be 2, the number of sequences of schedule.table, got 1",
        ),
        (dict(length=128), "sequence.length must be 64, the number of tokens of schedule.table, got 128"),
        (dict(mesh={"pipe": 4}), "mesh.pipe must be 2, the number of stages of schedule.table, got mesh.pipe=4"),
        (dict(sequence={"per_pipeline": 2, "chunks": 4}), "set sequence.chunks=auto"),
        (dict(interleave=2), "set schedule.interleave=auto"),
        (dict(wave=2), "schedule.wave must be 1, the wave of schedule.table, got 2; set schedule.wave=auto"),
        (
            dict(text=("wave=2", "wave=3")),
            "schedule.table: schedule.wave=3 must divide the sequences of a pipeline, got 2; use 2",
        ),
    ],
)
def test_table_must_agree_with_the_config(tmp_path, groups, words):
    path = tmp_path / "mine.csv"
    before, after = groups.pop("text", ("", ""))
    table = make_table("gpipe", 2, 2, (32, 16, 16), 1, 2 if before else 1)
    path.write_text(to_csv(table).replace(before, after))
    own = {key: groups.pop(key) for key in ("interleave", "wave") if key in groups}
    schedule = {"name": "table", "table": str(path), **own}
    groups = {"sequence": {"per_pipeline": 2}, "mesh": {"pipe": 2}, **groups}
    with pytest.raises(ValueError) as error:
        plan(schedule=schedule, **groups)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            dict(mesh={"pipe": 8}),
            "mesh.pipe must divide model.num_layers=4, got mesh.pipe=8; use 4 virtual stages",
        ),
        (dict(mesh={"pipe": 3}), "got mesh.pipe=3; use 2 or 4 virtual stages, or a model of 3 or 6 layers"),
        (
            dict(mesh={"seq": 8}, sequence={"split": "ulysses"}),
            "mesh.seq must divide model.num_heads=4 for ulysses, got mesh.seq=8; use one of [1, 2, 4]",
        ),
        (
            dict(mesh={"seq": 8}, sequence={"split": "hybrid", "ulysses": 8}),
            "sequence.ulysses must divide model.num_heads=4 for ulysses, got sequence.ulysses=8",
        ),
        (
            dict(mesh={"seq": 2}, sequence={"split": "ring", "ulysses": 2}),
            "set sequence.ulysses=auto, or use sequence.split=hybrid",
        ),
        (dict(mesh={"seq": 5}), "mesh.seq must divide sequence.length=64, got mesh.seq=5; use 60 or 65 tokens"),
        (
            dict(mesh={"seq": 4}, sequence={"chunks": 20}),
            "each of sequence.chunks=20 chunks must have at least mesh.seq tokens, got mesh.seq=4",
        ),
        (dict(mesh={"seq": 4}, sequence={"chunks": [30, 34]}), "got 30 in chunk 0 with mesh.seq=4; use 28 or 32"),
        (dict(sequence={"chunks": 4}, schedule={"name": "1f1b"}), "one chunk a sequence, got 4 chunks"),
        (dict(sequence={"chunks": 3}, mesh={"pipe": 2}, schedule={"interleave": 2}), "use 2 or 4 chunks"),
        (dict(sequence={"chunks": 4}, stash={"inputs": "recompute", "rest": "keep"}), "set stash.inputs=keep"),
        (dict(sequence={"chunks": 4}, stash={"alpha": [0.5]}), "each of the 4 diagonals of the schedule, got 1"),
        (
            dict(sequence={"chunks": 4}, stash={"alpha": [0.5] * 4}),
            "got 0.5 at diagonal 3, which is read back after 1;",
        ),
    ],
)
def test_errors_say_what_to_change(groups, words):
    with pytest.raises(ValueError) as error:
        plan(**groups)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_tile_of_an_accelerator_names_the_nearest_length():
    with pytest.raises(
        ValueError, match=r"must divide sequence.length=1000, got mesh.seq=8; use sequence.length=1024 \(\+2.4%\)$"
    ):
        plan(length=1000, mesh={"seq": 8}, device=H200, model=LLAMA)


def test_unusual_chunk_list_warns_once():
    with pytest.warns(UserWarning) as record:
        make_plan(config(sequence={"chunks": [16, 32, 16]}), CPU)
    assert len(record) == 1


def test_hardware_group_overrides_the_datasheet():
    pinned = config(hardware={"hbm_bytes": 5, "matmul_flops_s": 7e12})
    device = resolve_cluster(pinned, H200).device
    assert (device.hbm_bytes, device.matmul_flops_s, device.matmul_efficiency) == (5, 7e12, 1.0)
    assert device.host_link_bytes_s == H200.device.host_link_bytes_s
    assert resolve_cluster(config(train={"devices": "cpu:1"})) == CPU


def test_measured_figures_come_before_the_datasheet_and_after_pins(monkeypatch):
    monkeypatch.setattr(
        hardware, "measured", lambda device, path: replace(device, hbm_bytes_s=float(len(str(path))), link_bytes_s=2.0)
    )
    asked = config(hardware={"measured": "figures.json", "link_bytes_s": 3})
    device = resolve_cluster(asked, H200).device
    assert (device.hbm_bytes_s, device.link_bytes_s) == (len("figures.json"), 3)
    assert device.host_link_bytes_s == H200.device.host_link_bytes_s


def test_compute_dtype_sets_the_size_of_activations():
    assert read_request(config(), H200).compute_bytes == 2
    assert read_request(config(), CPU).compute_bytes == 4
    assert read_request(config({**TINY, "compute_dtype": "float64"}), H200).compute_bytes == 8


def edited(made: Plan, **changes) -> Plan:
    """A plan.json that was changed by hand, read back; a dotted key, with __ for the dot, goes into a group."""
    values = json.loads(made.to_json())
    for key, value in changes.items():
        *groups, name = key.split("__")
        inner = values
        for group in groups:
            inner = inner[group]
        inner[name] = value
    return Plan.from_json(json.dumps(values))


def test_a_plan_agrees_with_its_own_config():
    for groups in ({}, {"mesh": {"pipe": 2}}, {"mesh": {"data": 2}}, {"sequence": {"per_step": 4}}):
        asked = config(length=4096, **groups)
        check_plan(make_plan(asked, make_cluster(DEVICES["cpu"], 2)), asked)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (dict(length=128), "agree with sequence.length = 128, got 64; set sequence.length=64, or plan again"),
        (dict(sequence={"per_pipeline": 2}), "agree with sequence.per_pipeline = 2, got 1"),
        (dict(sequence={"per_step": 2}), "agree with sequence.per_step = 2, got 1"),
        (dict(mesh={"data": 2}), "agree with mesh.data = 2, got 1"),
        (dict(mesh={"pipe": 1}, sequence={"per_step": 1}), "agree with mesh.pipe = 1, got 2"),
        (dict(mesh={"pipe": 4}), "agree with mesh.pipe = 4, got 2"),
        (dict(model={**TINY, "hidden_size": 64}), "agree with model.hidden_size = 64, got 32"),
        (dict(model={**TINY, "num_kv_heads": 4}), "agree with model.num_kv_heads = 4, got 2"),
        (dict(train={"devices": "cpu:4"}), "agree with train.devices = cpu:4, got a mesh of 2"),
    ],
)
def test_a_plan_of_another_config_is_refused(groups, words):
    made = plan(mesh={"pipe": 2}, sequence={"chunks": 4})
    with pytest.raises(ValueError) as error:
        check_plan(made, config(**groups))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(model__num_layers=8), "agree with model.num_layers = 4, got 8"),
        (dict(chunk_lengths=[16, 16, 16]), "sequence.chunks must add up to sequence.length=64, got 48"),
        (dict(chunk_lengths=[32, 16, 16]), "one value for each of the 4 diagonals of the schedule, got 5"),
        (dict(schedule__name="gpip"), "got 'gpip'"),
        (
            dict(schedule__interleave=4, stash__alpha=[0.0] * 17),
            "mesh.pipe * schedule.interleave=4 must divide model.num_layers=4",
        ),
        (dict(kv_slots=2), "kv_slots of a plan must be 1 for the schedule, got 2"),
        (dict(mesh__pipe=3, stash__alpha=[0.0] * 6), "agree with mesh.pipe = 2, got 3"),
        (dict(model={"num_layers": 4}), "the plan's model must have the fields vocab_size, hidden_size"),
        (dict(model__vocab=3), "the plan's model must have the fields vocab_size, hidden_size"),
    ],
)
def test_a_plan_changed_by_hand_is_refused(changes, words):
    asked = config(mesh={"pipe": 2}, sequence={"chunks": 4}, stash={"inputs": "host"})
    made = make_plan(asked, CPU)
    with pytest.raises(ValueError) as error:
        check_plan(edited(made, **changes), asked)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_plan_from_before_windows_is_read_where_a_window_holds_the_sequence():
    model = {**TINY, "sliding_window": 64}
    made, asked = plan(model, length=64), config(model)
    older = replace(made, model={name: size for name, size in made.model.items() if name != "sliding_window"})
    assert older.model != made.model
    check_plan(older, asked)
    with pytest.raises(ValueError, match="the plan's model must have the fields .*sliding_window"):
        check_plan(older, config({**model, "sliding_window": 32}))


def test_a_plan_says_which_experts_it_was_made_for():
    made, asked = plan(EXPERTS, length=64), config(EXPERTS)
    assert made.model["experts.count"] == 8 and "mlp_size" not in made.model
    check_plan(made, asked)
    check_plan(made, config({**EXPERTS, "mlp_size": 128}))  # which no layer has
    with pytest.raises(ValueError, match=r"agree with model.experts.size = 24, got 16; set model.experts.size=16"):
        check_plan(made, config({**EXPERTS, "experts": {**EXPERTS["experts"], "size": 24}}))
    with pytest.raises(ValueError, match="must have the fields .*mlp_size, got .*experts.count"):
        check_plan(made, config(TINY))


@pytest.mark.parametrize("name", ["auto", "sppo", "seq1f1b", "breadth-first", "gpipe"])
@pytest.mark.parametrize("pipe", [1, 2])
def test_a_loss_of_the_batch_has_all_forwards_first(name, pipe):
    groups = dict(mesh={"pipe": pipe, "seq": 2}, schedule={"name": name}, sequence={"per_pipeline": 4})
    made, asked = plan(PER_BATCH, length=4096, **groups), config(PER_BATCH, length=4096, **groups)
    check_plan(made, asked)
    kinds = [tick.op for tick in made.table().ticks]
    assert "F" not in kinds[kinds.index("B") :] and not made.outline().has_forwards_among_backwards


def test_a_loss_of_sequences_whose_documents_move_has_all_forwards_first():
    groups = dict(mesh={"pipe": 2, "seq": 2}, sequence={"per_pipeline": 4, "groups": "flex"})
    made, asked = plan(EXPERTS, length=4096, **groups), config(EXPERTS, length=4096, **groups)
    check_plan(made, asked)
    assert not made.outline().has_forwards_among_backwards
    must = "balance_over=sequence with sequence.groups=flex must have all forwards of a step before its first backward"
    in_turn = dict(schedule={"wave": 1, "name": "seq1f1b"})
    with pytest.raises(ValueError, match=must):
        plan(EXPERTS, length=4096, **groups, **in_turn)
    static = plan(EXPERTS, length=4096, **groups | {"sequence": {"per_pipeline": 4}}, **in_turn)
    with pytest.raises(ValueError, match=f"{must}, got 4 sequences .* in waves of 1 .* or sequence.groups=static"):
        check_plan(replace(static, groups="flex"), asked)


def test_a_loss_of_the_batch_is_refused_in_several_waves():
    groups = dict(mesh={"pipe": 2, "seq": 2}, sequence={"per_pipeline": 4})
    must = "balance_over=batch must have all forwards of a step before its first backward"
    for schedule in ({"wave": 2}, {"name": "1f1b"}):
        with pytest.raises(ValueError, match=must):
            plan(PER_BATCH, length=4096, **groups, schedule=schedule)
    in_turn = plan(EXPERTS, length=4096, **groups, schedule={"wave": 1, "name": "seq1f1b"})
    with pytest.raises(ValueError, match=f"{must}, got 4 sequences .* in waves of 1 with schedule.name=seq1f1b; use"):
        check_plan(in_turn, config(PER_BATCH, length=4096, **groups))
    # Without a coefficient there is no such loss.
    free = {**PER_BATCH, "experts": {**PER_BATCH["experts"], "balance": 0.0}}
    check_plan(plan(free, length=4096, **groups, schedule={"wave": 1, "name": "seq1f1b"}), config(free, 4096, **groups))


def test_pipelines_that_cannot_share_the_sequences_are_refused():
    asked = config(length=4096, mesh={"pipe": 1, "seq": 1}, sequence={"per_step": 4})
    with pytest.raises(ValueError) as error:
        make_plan(asked, make_cluster(DEVICES["cpu"], 3))
    assert "mesh.data must divide sequence.per_step=4, got mesh.data=3" in str(error.value)


def test_a_plan_visits_no_more_blocks_than_the_kernel_for_tpus_lists():
    """Of one chunk there are 256 blocks of queries and 1024 of keys, of each of two 128 and 768."""
    cluster, kind = parse_cluster("v5p:2x2x1"), {"split": "ulysses", "chunks": 1}
    with pytest.raises(ValueError, match="at most 196608 pairs of blocks in a chunk, got 256 blocks of qu"):
        make_plan(config(LLAMA, 2**18, mesh={"seq": 4}, sequence=kind), cluster)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = make_plan(config(LLAMA, 2**18, mesh={"seq": 4}, sequence={**kind, "chunks": 2}), cluster)
    assert plan.kernel == "pallas" and len(plan.chunk_lengths) == 2
