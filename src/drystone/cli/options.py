"""Options that several verbs share, groups of options, and names that a shell completes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def complete_models(incomplete: str) -> list[str]:
    """Models that are known by name."""
    from drystone.describe.model_source import model_names

    return _starting(incomplete, model_names())


def complete_gpus(incomplete: str) -> list[str]:
    """GPU types of the catalogue; what is typed keeps its case, of which names are free."""
    from drystone.describe.catalogue import gpu_names

    typed = len(incomplete)
    begun = [name for name in gpu_names() if name[:typed].lower() == incomplete.lower()]
    return [incomplete + name[typed:] for name in begun]


def complete_pool(incomplete: str) -> list[str]:
    """The last of several GPU types with their counts: `8xA100-80GB-SXM,4xV1`."""
    match = re.fullmatch(r"(.*,)?(\d+\s*[xX*]\s*)?([^,]*)", incomplete)
    before, count, name = match.groups("") if match else ("", "", incomplete)
    return [f"{before}{count}{gpu}" for gpu in complete_gpus(name)]


def complete_policies(incomplete: str) -> list[str]:
    """The last of several policies: `prices,ce`."""
    from drystone.schedule.decision import POLICIES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{policy}" for policy in _starting(last, POLICIES)]


def words(*known: str) -> Callable[[str], list[str]]:
    """One of a few words."""

    def complete(incomplete: str) -> list[str]:
        return _starting(incomplete, known)

    return complete


def _starting(incomplete: str, known: Iterable[str]) -> list[str]:
    return [word for word in known if word.startswith(incomplete)]


Profiles = Annotated[
    list[Path] | None,
    typer.Option("--profile", help="A profile of a GPU type (`drystone profile`; repeatable)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", help="A cluster file: GPU types of your own, and prices."),
]
WebhookUrls = Annotated[
    list[str] | None,
    typer.Option(
        help="Tell this address when jobs end or fail, nodes are lost, deadlines or budgets at "
        "risk; slack+https://... in Slack's form (repeatable). DRYSTONE_WEBHOOK_SECRET signs."
    ),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="A config of Axolotl, LLaMA-Factory, TRL, Hugging Face's Trainer, NeMo or "
        "Megatron-Bridge, or a launch script of torchtitan or Megatron-LM; by a second --config, "
        "of Accelerate or DeepSpeed."
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        help="A name (see `drystone models`), a config.json or its folder, or module.py:function.",
        autocompletion=complete_models,
    ),
]


def takes_groups(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Let a verb take a dataclass: each of its fields becomes an option of the command line.

    Typer reads options from a function's signature, so the fields stand there in the place of the
    parameter, and the verb gets the whole group.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        group = parameter.annotation
        if not dataclasses.is_dataclass(group):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        assert isinstance(group, type)
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            has_default = field.default is not dataclasses.MISSING
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default if has_default else inspect.Parameter.empty,
                    annotation=hints[field.name],
                )
            )

    @functools.wraps(verb)
    def run(**given: Any) -> Any:
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group)]
            given[name] = group(**{field: given.pop(field) for field in fields})
        return verb(**given)

    del run.__wrapped__  # whoever unwraps wants the options, not the groups
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
