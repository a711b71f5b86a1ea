"""The launchers: local.sh for real with small children, Slurm and TPU pods through stand-ins, the JobSet as data."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from distributed_cases import REPO, environment

LAUNCH = REPO / "launch"
SCRIPTS = ["local.sh", "slurm.sbatch", "tpu_pod.sh"]

CHILD = """
import os, signal, sys, time
me, fate = os.environ["SPPO_PROCESS_ID"], sys.argv[1]
print("started", me, os.environ["SPPO_NUM_PROCESSES"], flush=True)
print("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1")
if fate == "save":
    def save(*_):
        time.sleep(0.5)
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
if fate == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
if fate == "fail" and me == "1":
    print("it broke", file=sys.stderr)
    sys.exit(7)
if fate == "talk":
    for number in range(20000):
        print("line", number)
    sys.exit(0)
if fate == "unsaved":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130 if me == "1" else 0))
    print("steady", flush=True)
if fate != "end":
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def heeded_interrupts():
    """Tests in the background ignore Ctrl-C, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def local(*words, stdout=subprocess.PIPE, **environ):
    """Starts local.sh with the fate of a child, or with other words."""
    return subprocess.Popen(
        [str(LAUNCH / "local.sh"), *words],
        env=environment(**({"CUDA_VISIBLE_DEVICES": ""} | environ)),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(fate, count=2, **settings):
    return local(str(count), "--", sys.executable, "-c", CHILD, fate, **settings)


def wait_for(process, count, word="ready"):
    """Reads lines until `count` of them hold the word; returns all lines."""
    lines = []
    while sum(word in line for line in lines) < count:
        line = process.stdout.readline()
        assert line, lines
        lines.append(line)
    return lines


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)
    assert os.access(LAUNCH / script, os.X_OK) or script.endswith(".sbatch")
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-e", "SC2329", LAUNCH / script], check=True)


def test_every_line_names_its_process():
    out, errors = (process := children("end", 3)).communicate(timeout=60)
    assert process.returncode == 0 and errors == ""
    assert sorted(out.splitlines()) == sorted(
        line for k in range(3) for line in (f"[{k}] started {k} 3", f"[{k}] ready")
    )


SPOKEN = "[Gloo] Rank 1 is connected to 15 peer ranks. Expected number of connected peer ranks is : 15\n"
TORN = [
    SPOKEN + SPOKEN,
    "[Gloo] Rank " + SPOKEN + SPOKEN.removeprefix("[Gloo] Rank "),
    SPOKEN[:-1] + SPOKEN + "\n",
    SPOKEN[:-3] + SPOKEN + "15\n",
    "[Gloo] Rank [Gloo] Rank 11 is connected to  is connected to 15" + 2 * SPOKEN.partition("15")[2],
]


@pytest.mark.parametrize("greeting", TORN)
def test_greetings_are_dropped_also_when_torn_and_nothing_else_is(greeting):
    out, _ = local("1", "--", "printf", "%s\n7\n\n7 peers\n", greeting).communicate(timeout=60)
    assert out.splitlines() == ["[0] ", "[0] 7", "[0] ", "[0] 7 peers"]


def test_a_line_that_a_greeting_tore_is_kept():
    words = "[Gloo] Rank step 1/4\n" + SPOKEN.removeprefix("[Gloo] Rank ")
    out, _ = local("1", "--", "printf", "%s", words + "step 2/4\n").communicate(timeout=60)
    assert out.splitlines() == ["[0] [Gloo] Rank step 1/4", "[0] step 2/4"]


def test_one_failure_ends_the_others_with_its_code():
    start = time.monotonic()
    out, errors = (process := children("fail")).communicate(timeout=60)
    assert process.returncode == 7 and time.monotonic() - start < 15
    assert "[1] it broke" in out
    assert errors == "local.sh: process 1 ended with exit code 7; ending the other processes\n"


def test_without_a_reader_the_processes_go_on():
    process = children("talk")
    wait_for(process, 2, "started")
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == ""


def test_on_a_full_disk_the_processes_go_on():
    with open("/dev/full", "w") as full:
        process = children("talk", stdout=full)
    assert process.wait(timeout=60) == 0 and process.stderr.read() == ""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
)
def test_a_signal_reaches_all_and_is_waited_for(number):
    process = children("save")
    wait_for(process, 2)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


@pytest.mark.parametrize("number, pause_s", [(signal.SIGHUP, 0.3), (signal.SIGTERM, 0.0)])
def test_a_dropped_connection_and_a_doubled_signal_are_one(number, pause_s):
    process = children("save")
    wait_for(process, 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(pause_s)
    process.send_signal(number)
    assert "saved" in process.communicate(timeout=60)[0] and process.returncode == 0


@pytest.mark.parametrize("warning", [signal.SIGUSR1, signal.SIGXCPU])
def test_the_end_of_a_job_after_its_warnings_is_a_first_signal(warning):
    process = children("save")
    wait_for(process, 2)
    for number in (warning, warning, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.22)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


@pytest.mark.parametrize("fate", ["unsaved", "wait"])
def test_a_process_with_nothing_to_save_is_told_by_the_exit_code(fate):
    """One ends with 130 by itself; or all are ended before they take signals."""
    process = children(fate)
    wait_for(process, 2, "steady" if fate == "unsaved" else "ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_second_signal_ends_at_once():
    process = children("stubborn")
    wait_for(process, 2)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.6)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_killed_launcher_takes_its_processes_along():
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    process = local("2", "--", sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    pids = [int(line.split()[-1]) for line in wait_for(process, 2, "[")]
    process.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.communicate()


def test_devices_and_cores_are_shared_out(tmp_path):
    out, _ = local("2", "--", "echo", "a b", DRY_RUN=1, PORT=12345, CUDA_VISIBLE_DEVICES="0,1,4,6").communicate()
    first, second = out.splitlines()
    assert "SPPO_COORDINATOR=127.0.0.1:12345 SPPO_NUM_PROCESSES=2 SPPO_PROCESS_ID=0" in first
    assert r"CUDA_VISIBLE_DEVICES=0\,1 " in first and r"CUDA_VISIBLE_DEVICES=4\,6 " in second
    assert first.rstrip().endswith(r"echo a\ b")
    assert f"NPROC={max(1, len(os.sched_getaffinity(0)) // 2)} " in first


def test_processes_of_several_hosts_are_numbered_host_by_host():
    hosts = dict(DRY_RUN=1, HOSTS=3, HOST_ID=2, SPPO_COORDINATOR="node0:8476")
    out, _ = local("2", "--", "echo", **hosts).communicate()
    for line, number in zip(out.splitlines(), (4, 5), strict=True):
        assert f"SPPO_COORDINATOR=node0:8476 SPPO_NUM_PROCESSES=6 SPPO_PROCESS_ID={number} " in line


@pytest.mark.parametrize("number", ["3", "-1", "first"])
def test_a_host_without_a_place_is_refused(number):
    process = local("2", "--", "echo", HOSTS=3, HOST_ID=number, SPPO_COORDINATOR="node0:8476")
    assert f"HOST_ID must be from 0 to HOSTS - 1, got HOST_ID={number} and HOSTS=3" in process.communicate()[1]
    process = local("2", "--", "echo", HOSTS=3, HOST_ID=1)
    assert "several hosts must meet at SPPO_COORDINATOR, got none" in process.communicate()[1]
    assert process.returncode == 2


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "launch/local.sh N CONFIG.yaml"),
        (["2"], "launch/local.sh N CONFIG.yaml"),
        (["two", "x.yaml"], "launch/local.sh N CONFIG.yaml"),
        (["0", "x.yaml"], "launch/local.sh N CONFIG.yaml"),
        (["2", "nowhere.yaml"], "a config must be a readable file, got nowhere.yaml"),
        (["2", "--", "no-such-command"], "no-such-command must be on the path, got none"),
    ],
)
def test_wrong_words_are_refused(words, said):
    process = local(*words)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and said in errors


@pytest.fixture
def slurm(tmp_path):
    """Stand-ins of Slurm's commands, which note how they are called; srun runs its command as two tasks would."""
    tools = {
        "scontrol": 'echo "scontrol $*" >>"$NOTES"; [[ $1 == show ]] && printf "node7\\nnode8\\n"; exit 0',
        "scancel": 'echo "scancel $*" >>"$NOTES"; kill -TERM $(cat "$NOTES.pid")',
        "srun": 'echo "srun $*" >>"$NOTES"; while [[ $1 == -* ]]; do shift; done; export SLURM_PROCID=1; exec "$@"',
        "sppo": 'echo $$ >"$NOTES.pid"; echo "sppo $* as $SPPO_PROCESS_ID of $SPPO_NUM_PROCESSES at $SPPO_COORDINATOR";'
        ' trap "echo saved; exit 0" TERM; [[ $FATE == wait ]] && { sleep 30 >/dev/null 2>&1 & wait; }; exit $FATE',
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(*words, fate="0", **environ):
        env = environment(NOTES=tmp_path / "notes", FATE=fate, **environ)
        env |= {"PATH": f"{tmp_path}:{env['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
        (tmp_path / "notes").write_text("")
        return subprocess.Popen(
            ["bash", LAUNCH / "slurm.sbatch", *words],
            env=env | {"SLURM_JOB_ID": "42"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ), (lambda: (tmp_path / "notes").read_text())

    return run


JOB = ["configs/quickstart.yaml", "--run-dir", "runs/a b"]


@pytest.mark.parametrize("per_node, count", [({"SLURM_NTASKS_PER_NODE": 8}, 8), ({}, 1)])
def test_slurm_runs_as_many_processes_as_it_is_asked_for(slurm, per_node, count):
    process, notes = slurm(*JOB, **per_node)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert out == f"sppo train configs/quickstart.yaml --run-dir runs/a b as 1 of {2 * count} at node7:8476\n"
    assert f"srun --nodes=2 --ntasks-per-node={count} --distribution=block --gpu-bind=none" in notes()
    assert "--kill-on-bad-exit=1" in notes() and "requeue" not in notes()


def test_slurm_prints_what_it_would_run(slurm):
    process, notes = slurm(*JOB, DRY_RUN=1)
    out, _ = process.communicate(timeout=30)
    assert out.startswith("SPPO_COORDINATOR=node7:8476 SPPO_NUM_PROCESSES=2\nsrun ") and "srun" not in notes()


@pytest.mark.parametrize(
    "fate, restarts, again", [("1", 0, True), ("134", 4, True), ("1", 5, False), ("2", 0, False), ("3", 0, False)]
)
def test_slurm_queues_a_failed_run_anew(slurm, fate, restarts, again):
    process, notes = slurm(*JOB, fate=fate, SLURM_RESTART_COUNT=restarts)
    _, errors = process.communicate(timeout=30)
    assert ("scontrol requeue 42" in notes()) == again == ("queued the job again" in errors)
    assert process.returncode == (0 if again else int(fate))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGTERM])
def test_slurm_saves_before_the_time_is_up_and_queues_anew(slurm, number):
    process, notes = slurm(*JOB, fate="wait", SLURM_RESTART_COUNT=50)
    wait_for(process, 1, "sppo train")
    time.sleep(0.2)
    process.send_signal(number)
    out, errors = process.communicate(timeout=30)
    assert out == "saved\n" and process.returncode == 0, errors
    assert f"scancel --signal={number.name.removeprefix('SIG')} 42\nscontrol requeue 42" in notes()


@pytest.mark.parametrize(
    "words",
    [
        "configs/quickstart.yaml train.steps=3 x=1",
        "configs/quickstart.yaml x=1 --run-dir",
        "configs/quickstart.yaml --run-dir --plan plan.json",
        "configs/quickstart.yaml --run-dir=",
        "--run-dir runs/a",
        "--run-dir=runs/a",
    ],
)
def test_slurm_asks_for_a_config_and_a_run_directory(slurm, words):
    process, _ = slurm(*words.split())
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and "add --run-dir DIR" in errors


@pytest.mark.parametrize("words", ["c.yaml --run-dir=runs/a", "--run-dir runs/a c.yaml", "c.yaml x=1 --run-dir runs/a"])
def test_slurm_takes_the_run_directory_as_sppo_does(slurm, words):
    process, _ = slurm(*words.split(), DRY_RUN=1)
    assert process.communicate(timeout=30)[0] and process.returncode == 0


def test_the_slurm_head_asks_for_requeue_and_an_early_signal():
    head = (LAUNCH / "slurm.sbatch").read_text()
    for line in ("--requeue", "--signal=B:USR1@300", "--open-mode=append"):
        assert f"#SBATCH {line}\n" in head
    tasks, gpus = (re.search(f"#SBATCH --{name}-per-node=(.*)", head)[1] for name in ("ntasks", "gpus"))
    assert tasks == gpus, "one process a GPU"


def test_the_jobset_gives_every_pod_its_place():
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec, (group,) = jobset["spec"], jobset["spec"]["replicatedJobs"]
    job, pod = group["template"]["spec"], group["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["failurePolicy"]["maxRestarts"] > 0 and spec["network"]["enableDNSHostnames"]
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, 3] and rule["onExitCodes"]["containerName"] == container["name"]
    assert pod["terminationGracePeriodSeconds"] >= 300
    env = {item["name"]: item for item in container["env"]}
    assert env["HOSTS"]["value"] == str(job["parallelism"]) == str(job["completions"])
    assert env["PROCESSES"]["value"] == str(container["resources"]["limits"]["nvidia.com/gpu"]), "one a GPU"
    place = f"$(JOBSET_NAME)-{group['name']}-0-0.$(JOBSET_NAME):{container['ports'][0]['containerPort']}"
    assert env["SPPO_COORDINATOR"]["value"] == place
    assert list(env).index("JOBSET_NAME") < list(env).index("SPPO_COORDINATOR"), "a value uses only those before it"
    assert "job-completion-index" in env["HOST_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    run_dir = container["args"][container["args"].index("--run-dir") + 1]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert run_dir.startswith(mounts["shared"]) and {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert (REPO / container["args"][2].removeprefix("/sppo_jax/")).is_file()


@pytest.mark.parametrize("fate, told, status", [("0", False, 0), ("2", False, 2), ("wait", True, 143)])
def test_a_pod_that_is_told_to_go_does_not_count_as_done(slurm, tmp_path, fate, told, status):
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    env = environment(
        NOTES=tmp_path / "notes", FATE=fate, PROCESSES=2, HOSTS=3, HOST_ID=1, SPPO_COORDINATOR="pod0:8476"
    )
    env |= {"PATH": f"{tmp_path}:{env['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    words = [word.replace("/sppo_jax/", f"{REPO}/") for word in (*container["command"], *container["args"])]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = wait_for(process, 1 if fate == "2" else 2, "sppo train")
    assert all(re.match(r"\[[23]\] sppo train /.* as [23] of 6 at pod0:8476", line) for line in first)
    if told:
        time.sleep(0.2)
        process.terminate()
    out, errors = process.communicate(timeout=30)
    assert process.returncode == status and (
        fate == "2" or sorted(out.splitlines()) == told * ["[2] saved", "[3] saved"]
    )


@pytest.fixture
def gcloud(tmp_path):
    """A stand-in of gcloud that notes its words and runs a worker's command here, with a home of its own."""
    (tmp_path / "sppo_jax").mkdir()
    bin_dir = tmp_path / "sppo_env" / "bin"
    bin_dir.mkdir(parents=True)
    (tmp_path / "gcloud").write_text(
        '#!/usr/bin/env bash\necho "gcloud $*" >>"$NOTES"\n'
        'for word; do [[ $word == --command=* ]] && HOME=$FAKE exec bash -c "${word#--command=}"; done\n'
    )
    (bin_dir / "sppo").write_text(
        '#!/usr/bin/env bash\necho "sppo $*"; trap "echo saved; exit 0" TERM\n'
        "[[ $FATE == wait ]] && { sleep 30 >/dev/null 2>&1 & wait; }; exit $FATE\n"
    )
    for tool in (tmp_path / "gcloud", bin_dir / "sppo"):
        tool.chmod(0o755)

    def run(*words, fate="0", **environ):
        env = environment(NOTES=tmp_path / "notes", FAKE=tmp_path, FATE=fate, **environ)
        env["PATH"] = f"{tmp_path}:{env['PATH']}"
        return subprocess.Popen(
            [LAUNCH / "tpu_pod.sh", *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ), (lambda: (tmp_path / "notes").read_text())

    return run


def test_a_pod_runs_on_all_workers(gcloud):
    process, notes = gcloud("pod", "zone-a", *JOB)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and out == "sppo train configs/quickstart.yaml --run-dir runs/a b\n", errors
    assert re.match(r"gcloud compute tpus tpu-vm ssh pod --command=.* --zone=zone-a --worker=all", notes())


def test_a_pod_saves_when_told(gcloud):
    process, notes = gcloud("pod", "zone-a", *JOB, fate="wait")
    wait_for(process, 1, "sppo train")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and out == "saved\n", errors
    assert notes().count("gcloud") == 2


def test_a_pod_does_not_try_wrong_input_again(gcloud):
    process, notes = gcloud("pod", "zone-a", *JOB, fate="2")
    process.communicate(timeout=30)
    assert process.returncode == 2 and notes().count("gcloud") == 1


def test_a_pod_is_installed_and_dry_run(gcloud):
    process, _ = gcloud("pod", "zone-a", "--install", DRY_RUN=1, GCLOUD_FLAGS="--project=p")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and out.count("gcloud compute tpus tpu-vm") == 3 == out.count("--project=p")
    process, _ = gcloud("pod", "zone-a", "configs/quickstart.yaml", "x=1")
    assert "add --run-dir DIR" in process.communicate(timeout=30)[1] and process.returncode == 2


def test_the_environment_variables_are_documented():
    """What the code reads stands in launch/README.md, and the other way round."""
    code = "".join(path.read_text() for path in (REPO / "sppo_jax").rglob("*.py"))
    code += "".join((LAUNCH / name).read_text() for name in SCRIPTS)
    read = set(re.findall(r"\bSPPO_[A-Z_]*[A-Z]\b", code))
    documented = set(re.findall(r"\bSPPO_[A-Z_]*[A-Z]\b", (LAUNCH / "README.md").read_text()))
    assert read == documented
