"""The command `drystone`: which verbs there are, and how a run ends.

Only the verb that is asked for is imported, so `drystone --help` stays fast however heavy the
verbs grow. A verb is one line in `VERBS` and a function of that name, whose docstring starts with
the same summary, in `drystone/cli/<name>.py`; short verbs about one subject share a file, which
`_SHARED_FILES` names. Examples stand in `cli/examples.py`.

Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 3 nothing fits. Results go to
standard output, every message to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from drystone.errors import DrystoneError

if TYPE_CHECKING:
    import typer

VERBS: Final = MappingProxyType(
    {
        "demo": "Show the best of what there is, on CPU.",
        "plan": "Rank the ways to run a model on GPUs, equal or mixed.",
        "export": "Write a plan for Kubernetes or other trainers, or model files.",
        "estimate": "Estimate one layout: memory by item, step time, dollars.",
        "table": "Say what training models takes, by GPU type, with ranges.",
        "fits": "Say whether training configs fit the GPUs that they name.",
        "check": "Judge the estimates by published measurements.",
        "profile": "Measure the device that is here, for estimates to use.",
        "simulate": "Run scheduling policies on a trace of jobs and compare them.",
        "frontier": "Draw mean completion time against budget.",
        "trace": "Make, convert and look at traces of jobs.",
        "run": "Train a job here and now, without a service.",
        "serve": "Run the controller on this machine.",
        "submit": "Show what a job would get and cost, and submit it.",
        "jobs": "List the jobs: state, GPUs, progress, end, cost, reason.",
        "show": "Show one job in full.",
        "logs": "Show what a job writes.",
        "wait": "Wait until jobs are over.",
        "events": "Show what happened, in sentences.",
        "why": "Say why a job waits, or why it got what it has.",
        "cancel": "Cancel jobs.",
        "pause": "Pause jobs until they are resumed.",
        "resume": "Let paused jobs run again.",
        "cluster": "List nodes and GPUs, and who uses them.",
        "budget": "Show the ledger: spent by job and by node, against the budget.",
        "waste": "List GPUs that are paid for and not used, in dollars.",
        "drain": "Move jobs away from a node and start none there.",
        "top": "Watch cluster, jobs and events.",
        "token": "Make, list and revoke tokens for a service.",
        "login": "Talk to a service over the network from now on.",
        "team": "Make teams, list them, set their quotas and budgets.",
        "mcp": "Answer assistants over standard input and output (MCP).",
        "log": "Check, repair, compact and back up the log.",
        "gpus": "List the GPU types: memory, rates, links, prices.",
        "models": "List the models known by name: shapes and parameters.",
        "doctor": "Say what is installed, missing, and which devices are here.",
        "verify": "Try on these devices everything that training needs.",
    }
)
_SHARED_FILES: Final = MappingProxyType(
    {
        **dict.fromkeys(("show", "why", "wait", "logs", "cancel", "pause", "resume"), "jobs"),
        **dict.fromkeys(("drain", "budget", "waste"), "cluster"),
        **dict.fromkeys(("login", "token", "team"), "people"),
        **dict.fromkeys(("gpus", "models"), "catalogue"),
    }
)
DEBUG_VARIABLE: Final = "DRYSTONE_DEBUG"
COMPLETION_VARIABLE: Final = "_DRYSTONE_COMPLETE"  # set by what --install-completion installs


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    sys.exit(run([word for word in arguments if word != "--debug"], debug=debug))


def run(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run one command line and return its exit code; every failure becomes one message."""
    arguments = list(arguments) or ["--help"]
    try:
        if not _ran_quickly(arguments):
            return _flush_output(_run_app(arguments, debug=debug))
    except SystemExit as end:
        return _flush_output(_exit_code(end))
    except DrystoneError as error:
        _show_error(error, debug=debug)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # a full disk, a file without permission: neither fault nor request
        _show_message(str(error), "", debug=debug)
        return _flush_output(1)
    except Exception as error:  # the last line of defence: a person sees a message, not a stack
        _show_surprise(error, debug=debug)
        return 1
    return _flush_output(0)


def _run_app(arguments: Sequence[str], *, debug: bool) -> int:
    """Run a verb; a command line that cannot be read ends like any other wrong request."""
    import typer

    try:
        code = _build_app(arguments)(args=arguments, prog_name="drystone", standalone_mode=False)
    except typer.Abort as end:  # a question that nobody answered, or an interrupt
        return 130 if isinstance(end.__cause__, KeyboardInterrupt) else 1
    except Exception as error:
        # Typer brings its own copy of click's errors, or uses click's: both have this method.
        if not hasattr(error, "format_message"):
            raise
        _show_misuse(error, debug=debug)
        return 2
    return code if isinstance(code, int) else 0


def _ran_quickly(arguments: Sequence[str]) -> bool:
    """The verbs that people run again and again, in their plain forms."""
    if arguments[0] not in ("jobs", "why") or COMPLETION_VARIABLE in os.environ:
        return False
    from drystone.cli.quick import run_quickly

    return run_quickly(arguments)


def load_verb(name: str) -> Callable[..., Any]:
    """The function behind a verb."""
    module = import_module(f"drystone.cli.{_SHARED_FILES.get(name, name)}")
    verb: Callable[..., Any] = getattr(module, name)
    return verb


def _build_app(arguments: Sequence[str]) -> typer.Typer:
    """The app for this command line: the verb asked for in full, the others as a line of help."""
    import typer

    from drystone.cli.examples import add_examples, epilog
    from drystone.cli.global_options import options
    from drystone.cli.help import PlainCommand, VerbGroup

    app = typer.Typer(
        cls=VerbGroup,
        help="Train large models on whatever GPUs there are.",
        epilog=epilog(""),
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Typer's boxes cost 0.1 s of the 0.3 s that --help may take
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    words = _completed_words() or arguments
    wanted = next((word for word in words if not word.startswith("-")), "")
    for name, summary in VERBS.items():
        if name == wanted:
            verb = load_verb(name)
            # A verb that has verbs of its own keeps them in `<name>_group`.
            group = getattr(sys.modules[verb.__module__], f"{name}_group", None)
            if group is not None:
                add_examples(group, name)
                app.add_typer(group, name=name, help=summary, epilog=epilog(name))
            else:
                app.command(name, cls=PlainCommand, epilog=epilog(name))(verb)
        else:
            app.command(name, help=summary)(_not_loaded)
    return app


def _completed_words() -> list[str]:
    """What stands on the line that a shell asks completions for; [] when this is no such request.

    Bash tells it in one variable, zsh and fish in Typer's own; quotes may still be open there, so
    that words are only cut at blanks, which is enough to find the verb.
    """
    if COMPLETION_VARIABLE not in os.environ:
        return []
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return line.split()[1:]


def _not_loaded() -> None:
    """Stand for a verb that only its line of help is needed of."""


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    return 1


def _flush_output(code: int) -> int:
    """Write what is still buffered; a reader that has left (`| head`) is no reason to complain."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would try, and complain, once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0 and not isinstance(error, BrokenPipeError):
            _show_message(str(error), "", debug=False)
        return 1
    return code


def _show_error(error: DrystoneError, *, debug: bool) -> None:
    where = f"{error.where}: " if error.where else ""
    _show_message(f"{where}{error.message}", error.hint, debug=debug)


def _show_misuse(error: Any, *, debug: bool) -> None:
    """What is wrong with a command line, in the words of the library that read it."""
    if type(error).__name__ == "NoArgsIsHelpError":  # `drystone trace`: its help is the answer
        error.show()
        return
    message = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    message, _, near = message.partition(". Did you mean ")
    context = error.ctx  # None while options are cut from the line
    hint = f"`{context.command_path if context else 'drystone'} --help` shows how"
    if near:
        hint = f"Did you mean {near}"
    elif message.startswith("No such command"):
        hint = f"Known: {', '.join(sorted(context.command.commands))}"
    _show_message(message[:1].lower() + message[1:], hint, debug=debug)


def _show_surprise(error: Exception, *, debug: bool) -> None:
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("drystone"):
        told = f"the package {error.name!r} is not installed"
        _show_message(
            told, "`drystone doctor` says what is missing, and how to add it", debug=debug
        )
        return
    hint = f"This is a fault of Drystone. --debug, or {DEBUG_VARIABLE}=1, shows where it arose."
    _show_message(f"{type(error).__name__}: {error}", "" if debug else hint, debug=debug)


def _show_message(message: str, hint: str, *, debug: bool) -> None:
    from rich.text import Text

    from drystone.cli.output import make_console, printable

    console = make_console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), printable(message)), soft_wrap=True)
    if hint:
        console.print(Text(printable(hint), style="yellow"), soft_wrap=True)
    if debug:
        import traceback

        console.print(Text(traceback.format_exc(), style="dim"), soft_wrap=True)
