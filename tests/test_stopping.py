"""The signals that end a run, in processes of their own: at once where nothing is to be saved, else remembered."""

import os
import signal
import subprocess
import sys
import time

import pytest
from distributed_cases import environment, finish, start_processes

from sppo_jax.processes.stopping import SAVES, Stopping, in_force

HEAD = """
import atexit, ctypes, os, pathlib, signal, sys, time
from sppo_jax.processes.stopping import AGREES, ENDS, SAVES, Stopping, in_force
stopping, libc, mutex = Stopping().begin(), ctypes.CDLL(None), ctypes.create_string_buffer(64)

def in_c(seconds):
    # Waits in C for a lock that it holds already; a signal does not interrupt that.
    end = time.time() + seconds
    until = (ctypes.c_long * 2)(int(end), int(end % 1 * 1e9))
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, until)
    libc.pthread_mutex_unlock(mutex)
"""
READY = "print('ready', flush=True)\n"
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)


@pytest.fixture(autouse=True)
def heeded_interrupts():
    """Tests in the background ignore Ctrl-C, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(code):
    """Starts a process with signals taken, and waits until it says a word; returns the process and the word."""
    command = [sys.executable, "-c", HEAD + code]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def end_of(process, *numbers, pause_s=0.4):
    """Sends signals with pauses; returns exit code, standard error, and the seconds that it took."""
    for index, number in enumerate(numbers):
        time.sleep(pause_s if index else 0)
        process.send_signal(number)
    start_s = time.monotonic()
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors, time.monotonic() - start_s


@pytest.mark.parametrize("number", ALL)
def test_a_signal_ends_a_process_that_is_in_a_long_c_call(number):
    process, _ = start(READY + "in_c(20)")
    code, errors, seconds = end_of(process, number)
    assert (code, errors) == (130, f"stopped by {number.name}\n") and seconds < 3


REMEMBER = "stopping.mode = SAVES\n" + READY + "in_c(1.5)\nprint(stopping.reason)\nsys.exit(7)"


@pytest.mark.parametrize("first, second", [(signal.SIGTERM, signal.SIGHUP), (signal.SIGHUP, signal.SIGHUP)])
def test_the_first_signal_is_remembered_and_a_dropped_connection_is_no_second(first, second):
    process, _ = start(REMEMBER)
    code, errors, _ = end_of(process, first, second)
    assert (code, errors) == (7, "")


def test_the_same_signal_twice_at_once_is_one():
    process, _ = start(REMEMBER)
    code, errors, _ = end_of(process, signal.SIGTERM, signal.SIGTERM, pause_s=0.05)
    assert (code, errors) == (7, "")


@pytest.mark.parametrize("warning", WARNINGS)
def test_a_batch_system_warns_more_than_once_and_ends_the_job_with_a_first_signal(warning):
    process, _ = start(REMEMBER)
    assert end_of(process, warning, warning, signal.SIGTERM)[:2] == (7, "")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(second):
    process, _ = start(REMEMBER)
    code, errors, seconds = end_of(process, signal.SIGTERM, second)
    assert code == 130 and seconds < 1
    assert errors == f"stopped at once by a second signal, {second.name}: what is not saved is lost\n"


def test_behind_the_last_word_a_signal_ends_with_the_code_that_is_known():
    code = "atexit.register(stopping.exit)\natexit.register(in_c, 20)\nstopping.decide(3)\n" + READY
    process, _ = start(code)
    time.sleep(0.2)
    code, errors, seconds = end_of(process, signal.SIGINT)
    assert (code, errors) == (3, "") and seconds < 3


def test_the_last_callback_ends_with_the_code_that_was_decided():
    process, _ = start("atexit.register(stopping.exit)\nstopping.decide(5)\n" + READY + "print('last', end='')")
    out, errors = process.stdout.read(), process.stderr.read()
    assert (process.wait(timeout=30), out, errors) == (5, "last", "")


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process, _ = start(READY + "in_c(0.5)\nsys.exit(7)")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert end_of(process, signal.SIGHUP)[:2] == (7, "")


def test_a_folder_that_is_being_filled_is_removed(tmp_path):
    code = f"""
from sppo_jax.models.hf.write import new_folder
atexit.register(stopping.exit)
with new_folder(pathlib.Path({str(tmp_path / "model")!r}), 0) as folder:
    {READY}
    for number in range(10**9):
        (folder / str(number % 1000)).write_text("a tensor")
"""
    process, _ = start(code)
    time.sleep(0.2)
    assert end_of(process, signal.SIGTERM)[:2] == (130, "stopped by SIGTERM\n")
    assert list(tmp_path.iterdir()) == []


JOINED = """
    import signal, threading
    from sppo_jax.processes.stopping import Stopping
    Stopping().begin()
    me = int(os.environ["SPPO_PROCESS_ID"])
"""


def test_processes_that_have_joined_end_together():
    """Process 1 alone is told; process 0 says so as well, for it is the one that speaks."""
    code = """
    join()
    distributed.exchange("")
    if me == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    distributed.exchange("")
    print("went on")
    """
    first, second = finish(start_processes(JOINED + code, 2))
    assert first == (130, "", "stopped by SIGTERM in process 1\n")
    assert second == (130, "", "stopped by SIGTERM\n")


def test_long_work_before_the_first_step_is_given_up_in_all_processes():
    """Process 1 alone is told, in the middle of its work; process 0 hears of it between two of its own batches."""
    code = """
    join()
    listener = distributed.Listener()
    def work():
        for number in range(1000):
            if me == 1 and number == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            listener.check()
        print("worked to the end")
    distributed.together(work, is_long=True)
    """
    first, second = finish(start_processes(JOINED + code, 2))
    assert first == (130, "", "stopped by SIGTERM in process 1\n")
    assert second == (130, "", "stopped by SIGTERM\n")


def test_a_process_does_not_wait_for_one_that_was_stopped_as_it_joined():
    """Both are told, process 1 a moment before it would have waited for process 0."""
    code = """
    real = distributed.exchange
    def exchange(text):
        if me == 1:
            os._exit(130)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return real(text)
    distributed.exchange = exchange
    join()
    """
    start_s = time.monotonic()
    first, second = finish(start_processes(JOINED + code, 2))
    assert first == (130, "", "stopped by SIGTERM\n") and second[0] == 130
    assert time.monotonic() - start_s < 60, "SPPO_TIMEOUT_S is 600"


def test_a_program_gets_its_signals_back():
    before = [signal.getsignal(number) for number in ALL]
    with Stopping() as stopping:
        assert in_force() is stopping
        stopping.mode = SAVES
        for number in ALL:
            os.kill(os.getpid(), number)
        assert stopping.reason == "SIGINT"
    assert [signal.getsignal(number) for number in ALL] == before and in_force() is None
    assert signal.set_wakeup_fd(-1) == -1
