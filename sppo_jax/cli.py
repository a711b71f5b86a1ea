"""The command line: finds the command (sppo_jax/commands) and turns its errors into exit codes."""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from sppo_jax import __version__, distributed
from sppo_jax.commands import convert, data, eval, fit, plan, profile, profile_trace, report, train
from sppo_jax.commands.command import FAILED, WRONG_INPUT, Parser

# A command is a module with `run(words) -> exit code`, where words are those behind its name.
COMMANDS = {
    "train": train.run,
    "plan": plan.run,
    "fit": fit.run,
    "profile": profile.run,
    "profile-trace": profile_trace.run,
    "data": data.run,
    "convert": convert.run,
    "report": report.run,
    "eval": eval.run,
}


def _warn_in_a_line(message: Warning | str, *_: object) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a process of several that fails ends here, at once.

    Args:
        argv: the command's words; those of the process by default.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 the user's input is wrong (one line on standard error), 3 it does
        not fit.
    """
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
    except Exception:
        if distributed.num_processes() == 1:
            raise
        traceback.print_exc()
        code = FAILED
    distributed.leave(code)
    return code


def _run(words: list[str]) -> int:
    """Run the command that the first word names; return its exit code."""
    try:
        parser = Parser(prog="sppo", description="Train decoder LLMs on sequences that do not fit on one device.")
        parser.add_argument("--version", action="version", version=f"sppo_jax {__version__}")
        parser.add_argument("command", choices=COMMANDS, help="see sppo COMMAND --help")
        command = parser.parse_args(words[:1]).command
        with warnings.catch_warnings():
            warnings.showwarning = _warn_in_a_line
            return COMMANDS[command](words[1:])
    except ValueError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return WRONG_INPUT
    except MemoryError as error:
        text = " ".join(str(error).split()) or "out of memory"
        print(f"the memory of this machine must hold the run, got: {text}; make it smaller", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader of our output, head for one, has seen enough; let the interpreter's last flush succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
