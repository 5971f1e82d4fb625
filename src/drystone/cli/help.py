"""What `--help` looks like: verbs by subject, plain words for types, no defaults that say nothing.

Typer shows an option as `--batch <int range>  Sequences in a step.  [default: 0; x>=0]`, where 0
means that nothing was said; here that is `--batch N  Sequences in a step.`
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

# Whatever stands in no section is listed last.
SECTIONS: Final = MappingProxyType(
    {
        "Begin here": ("demo", "doctor"),
        "Plan and predict": ("plan", "estimate", "export", "fits", "table", "gpus", "models"),
        "Train": ("run", "submit", "serve", "verify"),
        "Look after jobs": (
            *("jobs", "show", "why", "logs", "events", "wait", "cancel", "pause", "resume", "top"),
        ),
        "Look after the cluster": (
            *("cluster", "drain", "budget", "waste", "log", "token", "login", "team", "mcp"),
        ),
        "Simulate and judge": ("simulate", "frontier", "trace", "check", "profile"),
    }
)
_WORDS: Final = (("path", "PATH"), ("Path", "PATH"), ("int", "N"), ("float", "X"), ("str", "TEXT"))


class PlainCommand(TyperCommand):
    """A verb whose options are shown in plain words."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help, once the parameters say what a person needs and no more."""
        for parameter in self.params:
            _tidy(parameter, ctx)
        super().format_help(ctx, formatter)


class VerbGroup(TyperGroup):
    """All verbs, by subject."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each subject."""
        for title, names in self._sections():
            rows = [(name, self.commands[name].get_short_help_str(80)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

    def _sections(self) -> Iterable[tuple[str, list[str]]]:
        named = {name for names in SECTIONS.values() for name in names}
        for title, names in SECTIONS.items():
            yield title, [name for name in names if name in self.commands]
        if left := [name for name in self.commands if name not in named]:
            yield "More", left


def _tidy(parameter: Any, ctx: Any) -> None:
    if parameter.param_type_name != "option" or parameter.is_flag:
        return
    if parameter.metavar is None:
        shown = parameter.display_type(ctx).strip("<>").removeprefix("list[").rstrip("]")
        words = [word for label, word in _WORDS if shown.startswith(label)]
        parameter.metavar = words[0] if words else None
    if not parameter.default:  # 0, nothing or an empty text: the help says what that means
        parameter.show_default = False
    if parameter.max is None:
        parameter.min = None  # that a count is at least 0 goes without saying; help ends the run
