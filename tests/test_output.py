"""Standard output that cannot be written: dropped, or an error, and told once."""

import os
import sys
import threading

import pytest

from sppo_jax.processes import output as module
from sppo_jax.processes.output import Output, OutputLost, lost_lines, take_streams


@pytest.fixture
def pipe():
    """The two ends of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass


def test_lines_are_written_whole_and_at_once(pipe):
    stream = Output(None, pipe[1], drops=False)
    os.set_blocking(pipe[0], False)
    stream.write("a")
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 100)
    print("b", 1, file=stream)
    stream.write("c\nd")
    assert os.read(pipe[0], 100) == b"ab 1\nc\n"
    stream.flush()
    assert os.read(pipe[0], 100) == b"d"
    assert stream.fileno() == pipe[1] and not stream.isatty() and stream.encoding == "utf-8"


def test_without_a_reader_lines_are_dropped_and_told_once(pipe, capsys):
    stream = Output(None, pipe[1], drops=True)
    os.close(pipe[0])
    print("one", file=stream)
    print("two", file=stream, flush=True)
    assert stream.lost == "standard output is lost (Broken pipe): its lines are dropped, the run continues"
    assert capsys.readouterr().err == stream.lost + "\n"


def test_without_a_reader_a_command_that_is_there_for_its_output_ends(pipe):
    stream = Output(None, pipe[1], drops=False)
    os.close(pipe[0])
    with pytest.raises(OutputLost, match="Broken pipe"):
        print("one", file=stream)
    stream.flush()  # nothing is left that fails again at the end


def test_a_full_disk_is_tried_again_and_the_torn_line_gets_its_end(monkeypatch):
    written, room = [], [4]

    def write(_, data):
        part = data[: room[0]]
        if not part:
            raise OSError(28, "No space left on device")
        room[0] -= len(part)
        written.append(bytes(part))
        return len(part)

    monkeypatch.setattr(module.os, "write", write)
    stream = Output(None, 99, drops=True)
    stream.write("first\n")
    stream.write("second\n")
    assert b"".join(written) == b"firs" and "No space left on device" in stream.lost
    room[0] = 100
    stream.write("third\n")
    stream.write("fourth\n")
    assert b"".join(written) == b"firs\nthird\nfourth\n"


def test_a_pipe_that_does_not_block_is_waited_for(pipe):
    os.set_blocking(pipe[1], False)
    text, read = "x" * 200_000 + "\n", []
    with os.fdopen(os.dup(pipe[0])) as file:
        reader = threading.Thread(target=lambda: read.append(file.read()))
        reader.start()
        Output(None, pipe[1], drops=False).write(text)
        os.close(pipe[1])
        reader.join()
    assert read == [text]


def test_streams_are_taken_where_they_have_a_descriptor(monkeypatch, tmp_path, capsys):
    assert take_streams() == (sys.stdout, sys.stderr), "pytest's have none"
    with (tmp_path / "out").open("w", encoding="ascii") as out, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", full)
        assert take_streams() == (out, full)
        print("shown")
        print("lost", file=sys.stderr)
        assert sys.stdout.encoding == "ascii" and lost_lines() == [sys.stderr.lost]
    assert (tmp_path / "out").read_text() == "shown\n"


@pytest.mark.parametrize(
    "encoding, errors",
    [("ascii", "strict"), ("latin-1", "strict"), ("utf-8", "strict"), ("ascii", "surrogateescape")],
)
def test_a_character_that_the_encoding_lacks_is_escaped(pipe, encoding, errors):
    with open(pipe[1], "w", encoding=encoding, errors=errors, closefd=False) as stream:
        Output(stream, pipe[1], drops=False).write("runs/\u03b1\udcff\n")
    told = os.read(pipe[0], 100).decode(encoding)
    assert told in ("runs/\\u03b1\\udcff\n", "runs/\u03b1\\udcff\n")
