"""Processes that would compile different programs are told so in a line, before anything is compiled."""

import json
from types import SimpleNamespace

import pytest
from distributed_cases import finish, start_processes

from sppo_jax.hardware import machine
from sppo_jax.processes import same_program
from sppo_jax.processes.gpu_start import refused_flags
from sppo_jax.processes.same_program import check_lowered, differing_fact, differing_program, first_difference
from sppo_jax.processes.software import flags, run_facts, software
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


def taking(host_bytes):
    """Returns a plan that takes so much host memory for each device."""
    return SimpleNamespace(predicted=SimpleNamespace(host_bytes=(0, host_bytes)))


def test_host_memory_counts_up_to_what_the_plan_takes(monkeypatch):
    def facts(gib, kernel_check="passed"):
        monkeypatch.setattr(machine, "host_bytes", lambda: gib * 2**30)
        return run_facts(taking(50 * 2**30), 8, kernel_check)

    assert differing_fact(posts(facts(500), facts(400))) == ""
    line = differing_fact(posts(facts(500), facts(390)))
    assert "the same host memory, got 390 GiB in process 1 on node1 and at least 400 GiB in process 0" in line
    line = differing_fact(posts(facts(500), facts(500, "not checked")))
    assert "the same result of the kernel check, got not checked in process 1 on node1 and passed in process 0" in line


def test_one_process_makes_no_text():
    check_lowered("training step", SimpleNamespace(), None)


def test_a_run_compares_before_it_compiles(monkeypatch):
    done = []
    lowered = SimpleNamespace(compile=lambda: done.append("compiled"))
    step = SimpleNamespace(lower=lambda *_: lowered)
    monkeypatch.setattr(loop, "make_train_step", lambda *_: step)
    monkeypatch.setattr(loop, "batch_shapes", lambda *_: None)
    monkeypatch.setattr(loop, "shardings_of", lambda *_: None)
    monkeypatch.setattr(loop, "check_lowered", lambda name, lowered, device, facts: done.append((name, facts)))
    mesh = SimpleNamespace(local_devices=[None])
    made = dict.fromkeys(("value_and_grad", "optimizer", "shapes"))
    config, plan = SimpleNamespace(model=None), taking(0)
    experiment = SimpleNamespace(config=config, plan=plan, mesh=mesh, kernel_check="passed", **made)
    record, signals = SimpleNamespace(say=lambda _: None), SimpleNamespace(array=lambda: None)
    loop._compile(experiment, None, signals, record)
    facts = {"result of the kernel check": "passed", "host memory": "at least 0 B"}
    assert done == [("training step", facts), "compiled"]


@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_compare_what_they_lower(num_processes):
    """What may differ does: names of hosts, paths, memory above the plan's, seeds of hashes, the order of starts."""
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
        from types import SimpleNamespace
        from sppo_jax.processes.same_program import Different, check_lowered
        from sppo_jax.processes.software import run_facts
        plan = SimpleNamespace(predicted=SimpleNamespace(host_bytes=[100 * 2**30]))
        for factor, kernel_check in ((3, "passed"), (3, f"passed in {me + 1} ways"), (2 + (me == 0), "passed")):
            code = compile("def scaled(x): return jnp.sin(x) * factor", f"{os.getcwd()}/program.py", "exec")
            exec(code)
            lowered = jax.jit(scaled).lower(jnp.ones(4))
            begin = time.monotonic()
            try:
                device = jax.local_devices()[0]
                check_lowered("training step", lowered, device, run_facts(plan, 5, kernel_check))
                print("same", flush=True)
            except Different as error:
                print(json.dumps([str(error), time.monotonic() - begin]), flush=True)
        distributed.leave(2)
    """
    found = finish(start_processes(code, num_processes, PYTHONHASHSEED="random"))
    assert [(status, out.splitlines()[0]) for status, out, _ in found] == [(2, "same")] * num_processes, found
    lines = [json.loads(line) for _, out, _ in found for line in out.splitlines()[1:]]
    assert max(seconds for _, seconds in lines) < 5 and len(lines) == 2 * num_processes
    checked, text = list(dict.fromkeys(text for text, _ in lines))
    assert "the same result of the kernel check, got passed in 2 ways in process 1 on node1" in checked
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
