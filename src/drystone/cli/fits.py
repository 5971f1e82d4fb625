"""`drystone fits`: do training configs still fit the GPUs that they name? For pull requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from drystone.cli.options import AsJson, complete_pool

_NAMED = re.compile(r"#\s*drystone:\s*(?:gpus\s*[:=]?\s*)?([\w.,* -]+?)\s*$", re.MULTILINE)


def fits(
    files: Annotated[list[Path], typer.Argument(help="Configs; see `drystone plan --config`.")],
    gpus: Annotated[
        str,
        typer.Option(
            help="For files that name none by a line `# drystone: 8xA100-80G`.",
            autocompletion=complete_pool,
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Say whether training configs fit the GPUs that they name.

    Files without GPUs are passed over, so that a hook may give all of them. Exit code 3: one does
    not fit, with how much is missing and what would fit.

    With --json: [{file, gpus, fits, high_bytes, usable_bytes, layout, advice}].
    """
    from drystone.cli.output import print_json
    from drystone.errors import NothingFits

    named = {path: gpus or _named_gpus(path) for path in files}
    found = [_judged(path, pool) for path, pool in named.items() if pool]
    if as_json:
        print_json(found)
    else:
        for row in found:
            fit = "fits" if row["fits"] else "DOES NOT FIT"
            need, room = row["high_bytes"] / 2**30, row["usable_bytes"] / 2**30
            print(f"{row['file']}: {fit} {row['gpus']}: up to {need:.1f} of {room:.1f} GiB")
            if row["advice"]:
                print(f"  {row['advice']}")
        if not found:
            typer.echo("No file names GPUs: # drystone: 8xA100-80G", err=True)
    wrong = [row["file"] for row in found if not row["fits"]]
    if wrong:
        raise NothingFits(f"{', '.join(wrong)}: not on the GPUs named")


def _named_gpus(path: Path) -> str:
    from drystone.errors import UnreadableFile

    try:
        match = _NAMED.search(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise UnreadableFile("cannot be read", where=str(path)) from None
    return match[1] if match else ""


def _judged(path: Path, gpus: str) -> dict[str, Any]:
    from drystone.cli.configs import ConfigRequest, find_search
    from drystone.cli.request import RecipeOptions, find_pool
    from drystone.errors import InvalidSpec

    pool = find_pool(gpus, "")
    request = ConfigRequest.read([path], pool)
    shape = request.shape("")
    batch = request.global_batch
    recipe = request.recipe(request.options(RecipeOptions()).recipe(shape, global_batch=batch))
    answer = request.estimate(shape, recipe, pool)
    if answer is None:
        raise InvalidSpec("cannot be split over unlike GPUs", where=f"{path}: {gpus}")
    advice = ""
    if not answer.fits:
        search = find_search("", False, tools=request.asked.tools, has_gpus=True)
        plans = search(shape, recipe, pool).plans
        advice = "Nothing that this tool can express fits there"
        if plans:
            advice = f"This fits: {plans[0].layout}, recompute {plans[0].recipe.recompute}"
    return {
        "file": str(path),
        "gpus": gpus,
        "fits": answer.fits,
        "high_bytes": answer.hungriest.high_bytes,
        "usable_bytes": answer.machine.gpu.usable_bytes,
        "layout": str(answer.layout),
        "advice": advice,
    }
