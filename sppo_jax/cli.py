"""The command line: finds the command (sppo_jax/commands) and turns its errors into exit codes.

Signals are taken before anything slow is imported: the module of a command is imported when its name is known.
"""

import atexit
import errno
import os
import sys
import traceback
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from sppo_jax.processes.output import OutputLost, take_streams
from sppo_jax.processes.stopping import Stopping
from sppo_jax.version import __version__, missing_requirements

# A line on each command. Its module in sppo_jax/commands has `run(words) -> exit code`; words are those after the name.
COMMANDS = {
    "plan": "say whether a run fits, how long a step takes, and why; needs no accelerator",
    "init": "write a commented config for a model and devices",
    "configs": "list the configs that come with sppo_jax",
    "data": "tokenize and describe the data of a config",
    "check": "check that this machine computes, copies and sends right, and how fast",
    "train": "train as a config says; the same run directory continues a run",
    "eval": "validate a checkpoint: loss by position, recall by distance; or score a model on tasks at lengths",
    "report": "draw a run as one page",
    "convert": "convert models from and to Hugging Face folders",
    "fit": "compile a training step for devices that are not here, and compare its memory",
    "profile": "measure the devices present for the planner",
    "profile-trace": "train a few steps under the profiler",
    "flex": "simulate the gain of a team of devices for each document",
}


def _warn_in_a_line(message: Warning | str, *_: object) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. If one of several processes fails, this function ends the process at once.

    Args:
        argv: the words of a command that runs within another program, which gets its signals and streams back. By
            default the words of the process, which keeps signals and streams until it ends.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 the user's input is wrong (one line on standard error), 3 the plan
        does not fit. A signal ends the process with 130 if there is nothing to save.
    """
    stopping = Stopping().begin()
    if argv is None:
        atexit.register(stopping.exit)  # what is registered first is called last
    streams = take_streams()
    try:
        return _main(list(sys.argv[1:] if argv is None else argv), stopping)
    finally:
        if argv is not None:
            sys.stdout, sys.stderr = streams
            stopping.end()


def _main(words: list[str], stopping: Stopping) -> int:
    from sppo_jax.commands.command import FAILED
    from sppo_jax.processes import distributed

    code = FAILED
    try:
        code = _run(words)
    except SystemExit as end:  # --help and --version
        code = int(end.code or 0)
        raise
    except Exception:
        if distributed.num_processes() == 1:
            raise
        traceback.print_exc()
    finally:
        stopping.decide(code)
    distributed.leave(code)
    return code


def _run(words: list[str]) -> int:
    """Runs the command that the first word names, and returns its exit code."""
    from sppo_jax.commands.command import FAILED, WRONG_INPUT, Parser

    try:
        command = _parser(Parser).parse_args(words[:1]).command
        if command not in COMMANDS:
            near = get_close_matches(command, COMMANDS, n=1, cutoff=0.0)[0]
            raise ValueError(f"sppo: a command must be one of {', '.join(COMMANDS)}, got {command}; use sppo {near}")
        with warnings.catch_warnings():
            warnings.showwarning = _warn_in_a_line
            return import_module(f"sppo_jax.commands.{command.replace('-', '_')}").run(words[1:])
    except ModuleNotFoundError as error:
        missing, module = missing_requirements(), str(error.name).partition(".")[0]
        if not any(line.startswith(module) for line in missing):
            raise
        install = " ".join(f"'{line}'" for line in missing)
        print(f"sppo {command} must find its packages, got no {module}; pip install {install}", file=sys.stderr)
        return WRONG_INPUT
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return WRONG_INPUT
    except MemoryError as error:
        text = " ".join(str(error).split()) or "out of memory"
        print(f"the memory of this machine must hold the run, got: {text}; make the run smaller", file=sys.stderr)
        return FAILED
    except (RuntimeError, AssertionError) as error:
        problem = _backend_problem(error)
        if problem is None:
            raise
        print(problem, file=sys.stderr)
        return WRONG_INPUT
    except OutputLost as error:
        if error.errno == errno.EPIPE:  # the reader, e.g. head, has read enough
            return FAILED
        print(f"standard output must be writable, got: {error.strerror}; send the output elsewhere", file=sys.stderr)
        return WRONG_INPUT


def _parser(parser_type: type[ArgumentParser]) -> ArgumentParser:
    """Returns the parser of the first word, whose help has a line for each command."""
    width = max(map(len, COMMANDS)) + 2
    parser = parser_type(
        prog="sppo",
        formatter_class=RawDescriptionHelpFormatter,
        description="Train decoder LLMs on sequences that do not fit on one device.",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}{line}" for name, line in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"sppo_jax {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="sppo COMMAND --help prints its options")
    return parser


def _backend_problem(error: Exception) -> str | None:
    """Returns one line on the devices that jax did not find; None if an error has another cause."""
    if "jax" not in sys.modules:
        return None
    from sppo_jax.compat import backend_problem

    problem = backend_problem(error)
    if problem is None:
        return None
    got = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
    return (
        f"jax must find devices of the platforms that JAX_PLATFORMS names, got {got} ({problem}); unset JAX_PLATFORMS, "
        "or install the platform's plugin"
    )


if __name__ == "__main__":
    sys.exit(main())
