"""`sppo check` from end to end on simulated devices: faults that tests inject are named, and fail the command."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace

import pytest
from distributed_cases import REPO, environment, finish, start_in, start_processes
from quick_flags import QUICK_XLA_FLAGS
from small_run import write_config

from sppo_jax.check.small import shrunk
from sppo_jax.commands import check
from sppo_jax.config import load_config
from sppo_jax.files.format_bytes import format_bytes
from sppo_jax.hardware import parse_cluster
from sppo_jax.models.counts import num_params
from sppo_jax.search.make import make_plan, resolve_cluster

# The rows that train take most of the time, and have a test of their own.
FEW = """
from sppo_jax.check import collectives, host_rows, products, run
from sppo_jax.cli import main
from jax import lax
import jax.numpy as jnp
add = run.CheckRows.add
run.CheckRows.add = lambda self, name, *rest, **more: add(self, name, *rest, **more) if name in {KEPT} else None
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


def test_a_process_that_never_comes_is_named():
    code = """
from sppo_jax.cli import main
sys.exit(main(["check", "--devices", "cpu:2", "--quick"]))
"""
    came, killed = start_processes(code, 2, SPPO_TIMEOUT_S=2)
    killed.kill()
    (status, out, errors), _ = finish([came, killed])
    assert (status, out, errors.count("\n")) == (1, "", 1), errors
    assert "got 1, without process 1;" in errors


ALONE = "from sppo_jax.cli import main\nsys.exit(main(['check', *sys.argv[1:]]))"


def test_a_full_disk_and_a_flag_that_hangs_fail_before_a_device_starts(tmp_path):
    """/proc is a file system without a free byte."""
    config = write_config(tmp_path / "config.yaml")
    flag = "--xla_gpu_experimental_enable_nvshmem=true"
    flags = {"XLA_FLAGS": f"{QUICK_XLA_FLAGS} {flag}"}
    ((status, out, errors),) = finish(start_in([flags], ALONE, config, "checkpoint.dir=/proc/x"))
    rows = rows_of(out)
    assert status == 1 and list(rows) == ["software", "machine", "processes"], errors
    assert rows["software"][0] == "FAILS" and rows["software"][1].startswith(f"{flag} with 2 devices")
    verdict, text = rows["machine"]
    needed = 2 * 12 * num_params(load_config(config).model)
    assert verdict == "FAILS" and text.startswith("0 B free at /proc of process 0 on ")
    assert f"(expected: {format_bytes(needed)}, for two checkpoints); free space" in text


def test_a_config_for_other_devices_ends_with_3_and_one_line(tmp_path):
    config = write_config(tmp_path / "config.yaml")
    ((status, out, errors),) = finish(start_in([{}], ALONE, config, "hardware.cluster=cpu:1x8"))
    assert (status, errors) == (3, "")
    line = out.splitlines()[-1]
    assert line.startswith(f"{config} cannot run here: it is for hardware.cluster=cpu:1x8, got cpu:1x2; set hardware.")


@pytest.mark.slow
def test_a_disk_that_fills_while_a_checkpoint_is_written_fails_the_command(tmp_path):
    """A file system of 64 KiB, which only this process sees, takes the first bytes."""
    apart = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64k full "$1" && shift && exec "$@"', "sh"]
    if subprocess.run([*apart, str(tmp_path), "true"], capture_output=True).returncode:
        pytest.skip("this system lets no user mount a file system apart")
    (tmp_path / "full").mkdir()
    config = write_config(tmp_path / "config.yaml")
    words = ["check", config, "--devices", "cpu:2", "--quick", f"checkpoint.dir={tmp_path / 'full'}"]
    code = FEW.replace("{KEPT}", "{'machine', 'devices', 'one program', 'three steps'}") + (
        f"import sys; sys.exit(main({list(map(str, words))}))"
    )
    run = [*apart, str(tmp_path / "full"), sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, env=environment(), cwd=REPO, timeout=300)
    verdict, text = rows_of(done.stdout)["three steps"]
    assert done.returncode == 1 and done.stderr == "", done
    assert verdict == "FAILS" and "No space left on device" in text and "in process 0 on " in text


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


def test_programs_for_simulated_devices_alone_compile_soon(monkeypatch):
    monkeypatch.setattr(check, "simulate_devices", lambda _: None)
    for num_simulated, want in ((0, 0), (2, 1)):
        monkeypatch.setenv("XLA_FLAGS", "")
        assert check._given(Namespace(config=None), num_simulated) is None
        assert os.environ["XLA_FLAGS"].count("--xla_cpu_parallel_codegen_split_count=1") == want


@pytest.mark.parametrize(("name", "num_layers"), [("olmo-3-7b-1gpu", 8), ("gemma-3-27b-1m-8gpu", 12)])
def test_a_config_made_small_keeps_its_mesh_kinds_kernel_and_places(name, num_layers):
    config = load_config(REPO / "configs" / f"{name}.yaml")
    cluster = resolve_cluster(config)
    plan = make_plan(config, cluster)
    few = shrunk(config, plan, cluster)
    small = make_plan(few, cluster)
    assert (small.mesh, small.kernel, small.optimizer) == (plan.mesh, plan.kernel, plan.optimizer)
    assert (small.stash.inputs, small.stash.attention) == (plan.stash.inputs, plan.stash.attention)
    assert few.model.num_layers == num_layers and set(few.model.type_names) == set(config.model.type_names)
    assert few.model.hidden_size == config.model.hidden_size and small.sequence_length <= 4096


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_ends_the_others():
    code = (
        FEW.replace("{KEPT}", "{'processes', 'devices', 'collectives in a host'}")
        + """
if os.environ["SPPO_PROCESS_ID"] == "1":
    run._collectives = lambda *_: os.kill(os.getpid(), 9)
sys.exit(main(["check", "--devices", "cpu:2", "--quick"]))
"""
    )
    (status, out, errors), (killed, _, _) = finish(start_processes(code, 2, SPPO_HEARTBEAT_S=5))
    assert (status, killed) == (1, -9), errors
    verdict, text = rows_of(out)["collectives in a host"]
    assert verdict == "FAILS" and text.startswith("process 1 stopped answering longer than SPPO_HEARTBEAT_S = 5 ago")


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_simulated_devices_pass(num_processes, tmp_path):
    """Alone, and as two processes that launch/local.sh starts."""
    command = [sys.executable, "-m", "sppo_jax.cli", "check", "--devices", "cpu:4", "--quick"]
    if num_processes > 1:
        command = [str(REPO / "launch" / "local.sh"), str(num_processes), "--", *command]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    rows = rows_of("\n".join(lines))
    assert {verdict for verdict, _ in rows.values()} <= {"ok", "not judged"}
    assert {"products", "attention", "host rows", "three steps", "losses"} <= set(rows)
    assert (rows["one program"][1].endswith(f"in {num_processes} processes")) and not any("[1] " in x for x in lines)


@pytest.mark.slow
def test_a_run_whose_processes_lower_different_programs_ends_before_it_compiles(tmp_path):
    config = write_config(tmp_path / "config.yaml")
    code = """
from sppo_jax.cli import main
from sppo_jax.train import loop
import jax
make = loop.make_train_step
def doubled(value_and_grad, optimizer, *rest):
    def update(grads, *more):
        return optimizer.update(jax.tree.map(lambda x: x * 2, grads), *more)
    return make(value_and_grad, optimizer._replace(update=update), *rest)
if os.environ["SPPO_PROCESS_ID"] == "1":
    loop.make_train_step = doubled
sys.exit(main(["train", *sys.argv[1:]]))
"""
    for status, out, errors in finish(start_processes(code, 2, config, "--run-dir", tmp_path / "run"), timeout_s=300):
        assert status == 2 and "compiled the training step" not in out
        assert errors.startswith("all processes must lower the same training step, got another one in process 1 on ")
        assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("named", "ends"), [("h100:1x8", ""), ("h100:2x8", "set hardware.cluster=h100:1x8"), (None, "")]
)
def test_a_config_for_other_devices_cannot_run_here(named, ends, monkeypatch):
    here = parse_cluster("h100:1x8")
    monkeypatch.setattr(check, "local_cluster", lambda: here)
    config = load_config(REPO / "configs" / "llama3-8b-128k-8gpu.yaml", [f"hardware.cluster={named or 'null'}"])
    text = check._other_devices(config, parse_cluster(named or "h100:1x8"))
    assert text.endswith(ends) and bool(text) == bool(ends)
