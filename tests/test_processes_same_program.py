"""Processes that would compile different programs are told so in a line, before anything is compiled."""

import json
from types import SimpleNamespace

import pytest
from distributed_cases import finish, start_processes

from sppo_jax.processes import same_program
from sppo_jax.processes.gpu_start import refused_flags
from sppo_jax.processes.same_program import check_lowered, differing_fact, differing_program, first_difference
from sppo_jax.processes.software import flags, software
from sppo_jax.train import loop

FACTS = {"jax": "0.12.0", "NCCL": "2.29.1", "device memory": "77300000000"}


def posts(*facts, digits=("a", "a")):
    return [
        {"host": f"node{k}", "facts": one, "digits": digit}
        for k, (one, digit) in enumerate(zip(facts, digits, strict=True))
    ]


def test_the_first_fact_that_differs_is_named():
    assert differing_fact(posts(FACTS, FACTS)) == ""
    line = differing_fact(posts(FACTS, {**FACTS, "NCCL": "2.28.3"}))
    assert line.startswith(
        "processes of one program must have the same NCCL, got 2.28.3 in process 1 on node1 and 2.29.1 in process 0"
    )
    missing = differing_fact(posts(FACTS, {"jax": "0.12.0", "device memory": "77300000000"}))
    assert "got none in process 1" in missing
    more = differing_fact(posts(FACTS, {**FACTS, "XLA_FLAGS": "--xla_x=1"}))
    assert "XLA_FLAGS, got --xla_x=1 in process 1" in more and "none in process 0" in more


def test_cards_of_one_kind_have_about_the_same_memory():
    assert differing_fact(posts(FACTS, {**FACTS, "device memory": "77100000000"})) == ""
    assert "device memory" in differing_fact(posts(FACTS, {**FACTS, "device memory": "60000000000"}))


def test_the_first_line_that_differs_is_named():
    text = "module {\n  a\n  b\n}"
    assert first_difference(text, text) == (0, "", "")
    assert first_difference(text, text.replace("  b", "  c")) == (3, "b", "c")
    assert first_difference(text, text + "\nmore") == (5, "", "more")
    long = "x" * 500
    number, ours, theirs = first_difference(f"a\n{long}1{long}", f"a\n{long}2{long}")
    assert number == 2 and "1" in ours and "2" in theirs and len(ours) < 200
    assert differing_program(posts(FACTS, FACTS, digits=("a", "b"))) == 1
    assert differing_program(posts(FACTS, FACTS)) is None


def test_flags_that_change_no_program_may_differ():
    flag = "--xla_gpu_autotune_level=0"
    environ = {"XLA_FLAGS": f"--xla_dump_to=/tmp/a {flag} --xla_force_host_platform_device_count=2"}
    assert flags(environ) == (flag,)
    limit = "--xla_gpu_experimental_parallel_collective_overlap_limit"
    assert refused_flags([f"{limit}=1", f"{limit}=2", flag]) == (f"{limit}=2",)
    assert refused_flags(["--xla_gpu_experimental_enable_nvshmem=false"]) == ()


def test_one_process_makes_no_text():
    check_lowered("training step", SimpleNamespace(), None)


def test_a_run_compares_before_it_compiles(monkeypatch):
    done = []
    lowered = SimpleNamespace(compile=lambda: done.append("compiled"))
    step = SimpleNamespace(lower=lambda *_: lowered)
    monkeypatch.setattr(loop, "make_train_step", lambda *_: step)
    monkeypatch.setattr(loop, "batch_shapes", lambda *_: None)
    monkeypatch.setattr(loop, "shardings_of", lambda *_: None)
    monkeypatch.setattr(loop, "check_lowered", lambda name, *_: done.append(name))
    mesh = SimpleNamespace(local_devices=[None])
    config = SimpleNamespace(model=None)
    experiment = SimpleNamespace(value_and_grad=None, optimizer=None, shapes=None, config=config, plan=None, mesh=mesh)
    record, signals = SimpleNamespace(say=lambda _: None), SimpleNamespace(array=lambda: None)
    loop._compile(experiment, None, signals, record)
    assert done == ["training step", "compiled"]


@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_compare_what_they_lower(num_processes):
    """What may differ does: names of hosts, paths, host memory, the seed of hashes, the order of the start."""
    code = """
        me = int(os.environ["SPPO_PROCESS_ID"])
        time.sleep(0.3 * (3 - me))
        import socket, tempfile
        from sppo_jax.hardware import machine
        socket.gethostname = lambda: f"node{me}"
        machine.host_bytes = lambda: (500 + me) * 2**30
        os.chdir(tempfile.mkdtemp())
        join(int(os.environ["SPPO_NUM_PROCESSES"]))
        import jax, jax.numpy as jnp
        from sppo_jax.processes.same_program import Different, check_lowered
        for factor in (3, 2 + (me == 0)):
            code = compile("def scaled(x): return jnp.sin(x) * factor", f"{os.getcwd()}/program.py", "exec")
            exec(code)
            lowered = jax.jit(scaled).lower(jnp.ones(4))
            begin = time.monotonic()
            try:
                check_lowered("training step", lowered, jax.local_devices()[0])
                print("same", flush=True)
            except Different as error:
                print(json.dumps([str(error), time.monotonic() - begin]), flush=True)
                distributed.leave(2)
    """
    found = finish(start_processes(code, num_processes, PYTHONHASHSEED="random"))
    assert [(status, out.splitlines()[0]) for status, out, _ in found] == [(2, "same")] * num_processes, found
    lines = [json.loads(out.splitlines()[1]) for _, out, _ in found]
    assert max(seconds for _, seconds in lines) < 5 and len({text for text, _ in lines}) == 1
    text = lines[0][0]
    assert text.startswith("all processes must lower the same training step, got another one in process 1 on node1")
    assert "2.0" in text and "3.0" in text and "process-1.mlir" in text


def test_what_may_differ_between_processes_is_no_fact():
    """Host memory, paths, names and seeds change no program; each process posts its facts alone."""
    assert not any(word in name for name in software() for word in ("host", "path", "HASH", "cwd"))
    together = [{"host": f"node{k}", "facts": FACTS, "digits": "a"} for k in range(4)]
    assert differing_fact(together) == "" and differing_program(together) is None
    together[3] = {"host": "node3", "facts": {**FACTS, "jax": "0.11.2"}, "digits": "b"}
    assert "jax, got 0.11.2 in process 3 on node3" in differing_fact(together) and differing_program(together) == 3


def test_a_difference_is_wrong_input():
    assert issubclass(same_program.Different, ValueError)
