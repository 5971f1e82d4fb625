"""Any cloud, by three programs of its user's: `create`, `list` and `delete` in one folder.

    create TOKEN   asks for one node. Its environment says what: DRYSTONE_TOKEN, DRYSTONE_NODE (the
                   name under which the machine is to join), DRYSTONE_OFFER, DRYSTONE_GPU,
                   DRYSTONE_NUM_GPUS, DRYSTONE_INSTANCE, DRYSTONE_INFRA, DRYSTONE_SPOT (1 or 0) and
                   DRYSTONE_ADDRESS (of the cluster). Exit code 3: there is none to be had.
    list FLEET     prints a JSON object a line for each node whose token begins so: `token`, `stage`
                   (starting, running, failed or ended); where known `price_dollars_per_hour`,
                   `since_seconds` (billed since then, Unix time), `billed_dollars` (in all, once it
                   is over) and `reason`.
    delete TOKEN   gives a node back, or takes the request back; nothing where there is none.

A program that fails, hangs or prints something else changes nothing that is known: it is asked
again later. Before a token is created that this process has not created, it is looked for, so a
controller that died after `create` does not rent twice.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from drystone.describe.market import Offer
from drystone.errors import InvalidSpec, UnknownName
from drystone.run.rentals import MICRO_DOLLARS
from drystone.run.renting.provider import ProviderTrouble, Rental, Stage, node_name

NONE_LEFT: Final = 3  # exit code of `create`
_PROGRAMS: Final = ("create", "list", "delete")
_MAX_OUTPUT_BYTES: Final = 32 * 2**20
_KEYS: Final = frozenset(
    {
        "token", "stage", "reason", "offer", "price_dollars_per_hour", "since_seconds",
        "billed_dollars",
    }
)  # fmt: skip


class CommandProvider:
    """The programs of a folder; each may take `wait_seconds`."""

    def __init__(
        self, folder: Path, offers: Sequence[Offer], *, address: str = "", wait_seconds: float = 600
    ) -> None:
        for name in _PROGRAMS:
            if not os.access(folder / name, os.X_OK) or not (folder / name).is_file():
                raise InvalidSpec(
                    f"{folder} has no program `{name}` that can be run",
                    hint="Write create, list and delete, and chmod +x them (docs/renting.md)",
                )
        self._folder, self._address, self._wait_seconds = folder.absolute(), address, wait_seconds
        self._offers = {offer.name: offer for offer in offers}
        self._lock = threading.Lock()
        self._created: set[str] = set()  # tokens, by this process
        self._refused: dict[str, str] = {}  # by token: why there is none
        self._first_seen: dict[str, float] = {}  # running, where the list does not say since when

    def quote(self) -> dict[str, float]:
        """The prices of the market file: programs say what a node costs, not what one would."""
        return {name: offer.price_dollars_per_hour for name, offer in self._offers.items()}

    def rent(self, token: str, offer: Offer) -> None:
        """Create a node, unless there is one of this token."""
        if offer.name not in self._offers:
            raise UnknownName("offer", offer.name, self._offers)
        with self._lock:
            is_known = token in self._created or token in self._refused
        if is_known or any(rental.token == token for rental in self.status(token)):
            return
        code, output = self._run("create", token, self._environment(token, offer))
        if code not in (0, NONE_LEFT):
            raise _trouble("create", code, output)
        with self._lock:
            if code == 0:
                self._created.add(token)
            else:
                self._refused[token] = _last_line(output) or f"there is no {offer.name} to be had"

    def status(self, fleet: str) -> list[Rental]:
        """All that the list shows, and what could not be created."""
        code, output = self._run("list", fleet, dict(os.environ))
        if code != 0:
            raise _trouble("list", code, output)
        rows = [self._read(line) for line in output.splitlines() if line.strip()]
        found: dict[str, Rental] = {}
        for rental in rows:
            if not rental.token.startswith(fleet):
                continue
            if rental.token in found and found[rental.token].stage is not rental.stage:
                # Somebody made it twice: what still costs money is what there is.
                rental = min(found[rental.token], rental, key=lambda row: _LIVELY[row.stage])
            found[rental.token] = rental
        with self._lock:
            for token, reason in self._refused.items():
                if token.startswith(fleet):
                    found.setdefault(
                        token, Rental(token=token, offer="", stage=Stage.FAILED, reason=reason)
                    )
        return list(found.values())

    def release(self, token: str) -> None:
        """Delete a node."""
        code, output = self._run("delete", token, dict(os.environ))
        if code != 0:
            raise _trouble("delete", code, output)

    def _environment(self, token: str, offer: Offer) -> dict[str, str]:
        return {
            **os.environ,
            "DRYSTONE_TOKEN": token,
            "DRYSTONE_NODE": node_name(offer.name, int(token.rpartition("-")[2])),
            "DRYSTONE_OFFER": offer.name,
            "DRYSTONE_GPU": offer.gpu,
            "DRYSTONE_NUM_GPUS": str(offer.num_gpus),
            "DRYSTONE_INSTANCE": offer.instance,
            "DRYSTONE_INFRA": offer.infra,
            "DRYSTONE_SPOT": str(int(offer.is_spot)),
            "DRYSTONE_ADDRESS": self._address,
        }

    def _read(self, line: str) -> Rental:
        try:
            row = json.loads(line)
            unknown = row.keys() - _KEYS
            stage, token = Stage(row["stage"]), str(row["token"])
            amounts = {
                key: _amount(row[key])
                for key in ("price_dollars_per_hour", "since_seconds", "billed_dollars")
                if row.get(key) is not None
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProviderTrouble(f"`list` printed {line[:120]!r}: {error}") from None
        if unknown:
            raise ProviderTrouble(f"`list` printed unknown keys: {', '.join(sorted(unknown))}")
        offer = str(row.get("offer") or "")
        billed = amounts.get("billed_dollars")
        return Rental(
            token=token,
            offer=offer,
            stage=stage,
            reason=str(row.get("reason") or ""),
            price_dollars_per_hour=amounts.get("price_dollars_per_hour", self._listed(offer)),
            since_seconds=amounts.get("since_seconds", self._seen(token, stage)),
            billed_micro_dollars=None if billed is None else round(billed * MICRO_DOLLARS),
        )

    def _listed(self, offer: str) -> float:
        """The price of the market file; the only one there is where the list names no offer."""
        if offer in self._offers:
            return self._offers[offer].price_dollars_per_hour
        prices = {offer.price_dollars_per_hour for offer in self._offers.values()}
        if len(prices) == 1:
            return prices.pop()
        raise ProviderTrouble("`list` must print `offer` or `price_dollars_per_hour`")

    def _seen(self, token: str, stage: Stage) -> float:
        if stage is not Stage.RUNNING:
            return 0.0
        with self._lock:
            return self._first_seen.setdefault(token, time.time())

    def _run(self, name: str, word: str, environment: dict[str, str]) -> tuple[int, str]:
        """Its exit code and what it printed; on the error stream only where it fails."""
        process = subprocess.Popen(
            [str(self._folder / name), word],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=self._folder,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=self._wait_seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise ProviderTrouble(f"`{name}` did not end within {self._wait_seconds:g} s") from None
        if len(output) > _MAX_OUTPUT_BYTES:
            raise ProviderTrouble(f"`{name}` printed {len(output)} bytes")
        shown = output if process.returncode == 0 else errors or output
        return process.returncode, shown.decode("utf-8", errors="replace")


# What is there and costs money comes before what is not.
_LIVELY: Final = {Stage.RUNNING: 0, Stage.STARTING: 1, Stage.ENDED: 2, Stage.FAILED: 3}


def _trouble(name: str, code: int, output: str) -> ProviderTrouble:
    return ProviderTrouble(f"`{name}` ended with {code}: {_last_line(output) or 'without a word'}")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _amount(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r} is no amount")
    return number
