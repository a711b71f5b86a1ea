"""Host copies of a compiled program against the rows of its plan, on texts in the form that XLA:GPU writes."""

import jax
import pytest

from sppo_jax.config import config_from_dict
from sppo_jax.fit.hlo.slices import Slice, slices_of, wrong_slices
from sppo_jax.fit.lowering import train_program
from sppo_jax.search.make import make_plan

MODEL = {
    "vocab_size": 512, "hidden_size": 256, "num_heads": 2, "head_dim": 128, "mlp_size": 512, "kernel": "cudnn",
    "compute_dtype": "bfloat16",
}  # fmt: skip
STASH = {"inputs": "host", "attention": "host", "rest": "recompute", "alpha": 1.0}
SPPO = {"model": {**MODEL, "num_layers": 4}, "schedule": {"name": "sppo"}, "stash": STASH}
BREADTH_FIRST = {
    "model": {**MODEL, "num_layers": 8},
    "schedule": {"name": "breadth-first", "interleave": 4},
    "stash": {**STASH, "kv": "rebuild", "waiting": "host"},
}
# What jaxlib 0.12.0.1 wrote for these plans on one H100, compiled on 2026-11-29: buffer, whether it is written, the
# iterations of the loop, and where slices lie.
SPPO_BUFFER, SPPO_ROW = "u16[7,516,8192]", 8454144
ROOM, ROOM_ROW = "bf16[7,2048,256]", 1048576


def linear(offset: int, stride: int) -> str:
    return f'"linear":{{"byte_offset":"{offset}","byte_stride":"{stride}"}}'


def table(*rows: int) -> str:
    return '"table":{"offsets":[' + ",".join(f'"{row * ROOM_ROW}"' for row in rows) + "]}"


COMPILED = {
    "sppo": [
        (SPPO_BUFFER, True, 6, linear(0, SPPO_ROW)),
        (SPPO_BUFFER, False, 6, linear(5 * SPPO_ROW, -SPPO_ROW)),
    ],
    "breadth-first": [
        ("u16[3999,2,8192]", True, 6, linear(0, 4227072)),
        (ROOM, True, 6, linear(0, ROOM_ROW)),
        (ROOM, False, 16, table(*range(1, 7), *range(7), 0, 1, 2)),
        ("u16[3999,2,8192]", True, 16, linear(29589504, 4227072)),
        (ROOM, True, 16, table(*range(7), *range(7), 0, 1)),
        (ROOM, False, 7, table(3, 4, 5, 6, 0, 1, 2)),
        ("u16[3999,2,8192]", True, 7, linear(97222656, 4227072)),
        (ROOM, True, 7, table(2, 3, 4, 5, 6, 0, 1)),
        ("u16[3999,2,8192]", False, 15, linear(59179008, -4227072)),
        ("u16[3999,2,8192]", False, 15, linear(92995584, -4227072)),
        (ROOM, False, 15, table(1, 0, 6, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3, 2, 1)),
        (ROOM, True, 15, table(2, 1, 0, 6, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3, 2)),
        ("u16[3999,2,8192]", False, 6, linear(21135360, -4227072)),
        (ROOM, False, 6, linear(5 * ROOM_ROW, -ROOM_ROW)),
        ("u16[3999,2,8192]", False, 7, linear(88768512, -4227072)),
        ("u16[3999,2,8192]", False, 7, linear(122585088, -4227072)),
        (ROOM, False, 7, table(1, 0, 6, 5, 4, 3, 2)),
        (ROOM, True, 7, table(2, 1, 0, 6, 5, 4, 3)),
    ],
}
ASKED = {"sppo": SPPO, "breadth-first": BREADTH_FIRST}


def text_of(copies) -> str:
    """Writes copies as XLA does: each in a fusion that a loop starts, beside a copy that stays on the device."""
    found, loops = [], []
    for number, (buffer, goes_out, iterations, where) in enumerate(copies):
        config = '"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"0",' + where + "}"
        host, name = f"{buffer}{{2,1,0:S(5)}}", f"wrapped.{number}"
        row = "1" + buffer[buffer.index(",") :]
        part = buffer[: buffer.index("[") + 1] + row + "{2,1,0}"
        sliced = (
            f"{host} dynamic-update-slice(%p.{number}, %x, %i, %z, %z)"
            if goes_out
            else f"{part} dynamic-slice(%p.{number}, %i, %z, %z), dynamic_slice_sizes={{{row[:-1]}}}"
        )
        found.append(
            f"%{name} (p.{number}: {buffer}, i: s32[]) -> {buffer} {{\n"
            f'  %p.{number} = {host} parameter(0), metadata={{scheduling_name="p"}}\n'
            f'  ROOT %s.{number} = {sliced}, metadata={{op_name="a/b" scheduling_name="s"}}, '
            f'backend_config={{"device_type":"x",{config}}}\n}}\n'
        )
        found.append(
            f"%body.{number} (t: (s32[], {buffer})) -> (s32[], {buffer}) {{\n"
            f"  %start.{number} = (({host}, s32[]), {part}, u32[]) fusion-start(%e, %i), kind=kLoop, calls=%{name}\n"
            f"  %inner.{number} = (s32[]) while(%t), condition=%c, body=%layers.{number}, "
            f'backend_config={{"known_trip_count":{{"n":"3"}}}}\n}}\n'
            f"%layers.{number} (t: (s32[])) -> (s32[]) {{\n"
            '  %d = f32[1,4] dynamic-slice(%a, %i), backend_config={"dynamic_slice_config":{"loop_index":"0",'
            + linear(0, 16)
            + "}}\n}\n"
        )
        loops.append(
            f"  %while.{number} = (s32[], {host}) while(%t), condition=%c, body=%body.{number}, "
            f'backend_config={{"known_trip_count":{{"n":"{iterations}"}}}}\n'
        )
    return "".join(found) + "ENTRY %main (p: s32[]) -> s32[] {\n" + "".join(loops) + "}\n"


@pytest.fixture(scope="module")
def planned() -> dict[str, list[Slice]]:
    def slices(asked):
        sequence = {"length": 16384, "chunks": 8}
        hardware = {"cluster": "h100:1x1"}
        config = config_from_dict({**asked, "sequence": sequence, "hardware": hardware, "train": {"steps": 1}})
        return train_program(config, make_plan(config), jax.devices()[:1], "gpu").slices

    return {name: slices(asked) for name, asked in ASKED.items()}


@pytest.mark.parametrize("name", ASKED)
def test_the_rows_of_a_right_program_are_those_of_its_plan(planned, name):
    found = slices_of(text_of(COMPILED[name]))
    assert len(found) == len(COMPILED[name]) and wrong_slices(found, planned[name]) == ()
    for one in found:  # each was judged
        assert wrong_slices([one._replace(offsets_bytes=(1, 2))], planned[name])


def change(where: str, iterations: int, how: str) -> str:
    """Returns other places: reversed rows, all rows moved on by one, or the stride of elements twice as large."""
    offsets = slices_of(text_of([(SPPO_BUFFER, True, iterations, where)]))[0].offsets_bytes
    step = abs(offsets[1] - offsets[0])
    found = {
        "reversed": tuple(reversed(offsets)),
        "a row later": tuple(offset + step for offset in offsets),
        "another dtype": tuple(offsets[0] + 2 * (offset - offsets[0]) for offset in offsets),
    }[how]
    return '"table":{"offsets":[' + ",".join(f'"{offset}"' for offset in found) + "]}"


@pytest.mark.parametrize("how", ["reversed", "a row later", "another dtype"])
@pytest.mark.parametrize("name", ASKED)
def test_other_rows_are_found(planned, name, how):
    for number, (buffer, goes_out, iterations, where) in enumerate(COMPILED[name]):
        copies = [*COMPILED[name]]
        copies[number] = buffer, goes_out, iterations, change(where, iterations, how)
        (wrong,) = wrong_slices(slices_of(text_of(copies)), planned[name])
        assert (wrong.buffer, wrong.goes_out) == (buffer, goes_out)
        assert wrong.describe().startswith("writes to" if goes_out else "reads from")


def test_the_other_direction_is_found(planned):
    turned = [(buffer, not goes_out, *rest) for buffer, goes_out, *rest in COMPILED["sppo"]]
    assert len(wrong_slices(slices_of(text_of(turned)), planned["sppo"])) == 2


def test_a_loop_may_be_compiled_in_parts_and_other_buffers_are_not_judged(planned):
    parts = [(SPPO_BUFFER, True, 2, linear(0, SPPO_ROW)), (SPPO_BUFFER, True, 4, linear(2 * SPPO_ROW, SPPO_ROW))]
    other = [("f32[7,516,8192]", True, 6, linear(5, 3))]
    assert wrong_slices(slices_of(text_of(parts + other)), planned["sppo"]) == ()


def test_every_row_is_written_once_and_read_back_in_reverse(planned):
    copies = planned["sppo"]
    written = [offset for one in copies if one.goes_out for offset in one.offsets_bytes]
    read = [offset for one in copies if not one.goes_out for offset in one.offsets_bytes]
    assert written == [row * SPPO_ROW for row in range(7)] and sorted(read) == written
