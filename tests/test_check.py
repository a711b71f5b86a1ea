"""`sppo check` from end to end on simulated devices: faults that tests inject are named, and fail the command."""

import json
import re

import pytest
from distributed_cases import finish, start_in, start_processes

# The rows that train take most of the time, and have a test of their own.
FEW = """
from sppo_jax.check import collectives, host_rows, products, run
from sppo_jax.cli import main
from jax import lax
import jax.numpy as jnp
add = run.Rows.add
run.Rows.add = lambda self, name, *rest, **more: add(self, name, *rest, **more) if name in {KEPT} else None
"""
KEPT = "{'software', 'machine', 'processes', 'devices', 'products', 'host rows', 'collectives in a host'}"


def rows_of(out):
    """Returns the verdict and the text of each row that was printed."""
    found = [re.match(r"(\S.{25}) (ok|slow|FAILS|not known|not judged) +(.*)", line) for line in out.splitlines()]
    return {row[1].strip(): (row[2], row[3]) for row in found if row}


def test_faults_of_devices_fail_the_command_and_name_the_device(tmp_path):
    code = (
        FEW.replace("{KEPT}", KEPT)
        + """
multiply, permute, read = products.multiply, collectives.permute, host_rows.read
def off_by_one(a, b):
    row, column = (lax.broadcasted_iota(jnp.int32, a.shape, axis) for axis in (0, 1))
    return multiply(a, b) + ((lax.axis_index("device") == 1) & (row == 3) & (column == 5))
products.multiply = off_by_one
collectives.permute = lambda x, pairs: permute(x, pairs) + (lax.axis_index("device") == 0)
host_rows.read = lambda host, row, elements: read(host, 63 - row, elements)
sys.exit(main(["check", "--devices", "cpu:2", "--quick", "--out", sys.argv[1]]))
"""
    )
    ((status, out, errors),) = finish(start_in([{}], code, tmp_path / "check.json"))
    rows = rows_of(out)
    assert status == 1, errors
    assert [name for name, (verdict, _) in rows.items() if verdict == "FAILS"] == [
        "products",
        "host rows",
        "collectives in a host",
    ]
    assert "device 1 has 3 wrong rows" in rows["products"][1]
    assert "rows read in order on device 0" in rows["host rows"][1]
    assert "ring: 1024 wrong elements on device 0" in rows["collectives in a host"][1]
    stored = json.loads((tmp_path / "check.json").read_text())["rows"]
    assert stored["products"]["verdict"] == "FAILS" and stored["products"]["figures"][0]["wrong_rows"] == [0, 3]


def test_a_process_that_sleeps_is_named_and_ends_the_others():
    code = (
        FEW.replace("{KEPT}", "{'processes', 'devices', 'collectives in a host'}")
        + """
run.EXCHANGE_LIMIT_S = 4.0
if os.environ["SPPO_PROCESS_ID"] == "1":
    exchange = run._collectives
    run._collectives = lambda *given: (time.sleep(600), exchange(*given))
sys.exit(main(["check", "--devices", "cpu:2", "--quick"]))
"""
    )
    for status, out, errors in finish(start_processes(code, 2)):
        assert status == 1, errors
        verdict, text = rows_of(out)["collectives in a host"]
        assert verdict == "FAILS" and re.match(r"no answer within 4 s from process 1 on \S+ \(has not begun\);", text)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "sppo check must find a GPU or a TPU, got none that this process may use"),
        (["--devices", "gpu:2"], "--devices must be auto or cpu:N with N at least 1, got 'gpu:2'"),
        (["--devices", "cpu:2", "--out", "/nowhere/check.json"], "--out must name a file that can be written"),
    ],
)
def test_wrong_input_is_a_line(words, line, capsys, monkeypatch):
    from sppo_jax.cli import main

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["check", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1
