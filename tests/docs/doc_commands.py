"""Command lines in pages: are the verbs and options there that they name?"""

import re
import shlex
from functools import cache

from doc_blocks import ROOT

from drystone.cli.main import VERBS, _build_app

_ENDS = {"|", "||", "&", "&&", ";", "(", ")"}
_REDIRECTIONS = {"<", ">", ">>", "<<"}


def command_lines(text: str) -> list[list[str]]:
    """The commands of a shell block as words, without comments, redirections and here-documents."""
    text = re.sub(r"<<\s*'?(\w+)'?([^\n]*)\n.*?\n\1\n", r"\2\n", text + "\n", flags=re.DOTALL)
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        skips = False
        for token in lexer:
            if token in _ENDS:
                found.append(words)
                words = []
            elif set(token) <= {"<", ">", "&"}:
                if words and words[-1].isdigit():
                    words.pop()  # the number of a stream
                skips = True
            elif skips:
                skips = False
            else:
                words.append(token)
        found.append(words)
    return [_without_variables(words) for words in found if _without_variables(words)]


def _without_variables(words: list[str]) -> list[str]:
    while words and re.match(r"^\w+=", words[0]):
        words = words[1:]
    return words


def check_command(words: list[str]) -> str:
    """What is wrong with a command, if anything."""
    if words[:3] == ["python", "-m", "drystone"]:
        words = ["drystone", *words[3:]]
    if words[0] == "drystone":
        return check_drystone(words[1:])
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return ", ".join(f"no target {one}" for one in words[1:] if one not in targets)
    missing = [
        word
        for word in (one.partition("::")[0] for one in words)
        if re.match(r"^(tests|benchmarks|examples|docs)/[\w/.-]+$", word)
        and not (ROOT / word).exists()
    ]
    return ", ".join(f"no {one}" for one in missing)


def check_drystone(arguments: list[str]) -> str:
    """Let the app read a command line, without running it."""
    import typer.main

    app = typer.main.get_command(_build_app(arguments))
    try:
        context = app.make_context("drystone", list(arguments))
        while hasattr(context.command, "commands"):
            rest = [*context._protected_args, *context.args]
            name, command, rest = context.command.resolve_command(context, rest)
            context = command.make_context(name, rest, parent=context)
    except Exception as error:
        if type(error).__name__ == "Exit":  # --help, --version
            return ""
        return f"drystone {' '.join(arguments)}: {getattr(error, 'message', error)}"
    return ""


@cache
def known_options(verb: str) -> frozenset[str]:
    """Every option of a verb and of the verbs inside it; those of `drystone` itself too."""
    import typer.main

    app = typer.main.get_command(_build_app([verb]))
    command = app.commands[verb]
    commands = [app, command, *getattr(command, "commands", {}).values()]
    return frozenset(
        option
        for one in commands
        for parameter in one.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    ) | {"--help", "-h"}


def check_mention(text: str) -> str:
    """A command in a sentence may lack arguments, but what it names must be there."""
    words = text.split()[1:]
    if not words or words[0].startswith("-") or words[0].isupper():
        return ""
    verb = words[0].strip(",")
    if verb not in VERBS:
        return f"`{text}`: no verb {verb}"
    options = re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", text)
    unknown = [one for one in options if one not in known_options(verb)]
    return f"`{text}`: no option {unknown[0]}" if unknown else ""
