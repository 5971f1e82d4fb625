"""Real clouds, by SkyPilot (extra `sky`): one cluster of one machine for each rental.

The cluster's name is the rental's token, so launching twice is launching once. A machine joins the
Ray cluster of the controller with the start script below. Written against SkyPilot 0.14.1, tested
against a stand-in, and against its package as far as that goes without a cloud: catalogue prices,
signatures, statuses.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from drystone.describe.market import Offer
from drystone.errors import InvalidSpec, MissingExtra, UnknownName
from drystone.run.rentals import MICRO_DOLLARS
from drystone.run.renting.provider import ProviderTrouble, Rental, Stage, node_name
from drystone.units import HOUR_SECONDS

_MAX_LAUNCHES: Final = 8  # at once; each waits for a request of SkyPilot's
_REPORT_DAYS: Final = 30
# By name of SkyPilot's status; what is stopped is of no use, and is taken down.
_STAGES: Final = {
    "PENDING": Stage.STARTING,
    "INIT": Stage.STARTING,
    "UP": Stage.RUNNING,
    "AUTOSTOPPING": Stage.RUNNING,  # it is still billed
}


class SkyPilot:
    """Offers name an instance type and where it is: `instance`, `infra`, `spot`."""

    def __init__(self, offers: Sequence[Offer], *, ray_address: str, sky: Any = None) -> None:
        for offer in offers:
            if not offer.instance or not offer.infra:
                raise InvalidSpec(
                    f"offer {offer.name} does not say what to rent where",
                    hint="Write instance: p4d.24xlarge and infra: aws/us-east-1",
                )
        if not ray_address:
            raise InvalidSpec(
                "rented machines must know which Ray cluster to join",
                hint="Give --address HOST:PORT, as machines of the cloud reach it",
            )
        self._sky = sky if sky is not None else _import_sky()
        self._offers = {offer.name: offer for offer in offers}
        self._address = ray_address
        self._launches: dict[str, Future[Any]] = {}  # by token: what a launch will end with
        self._pool = ThreadPoolExecutor(_MAX_LAUNCHES, thread_name_prefix="sky")

    def quote(self) -> dict[str, float]:
        """What SkyPilot's catalogue says an hour of each costs."""
        return {
            name: float(self._ask(self._resources(offer).get_cost, HOUR_SECONDS))
            for name, offer in self._offers.items()
        }

    def rent(self, token: str, offer: Offer) -> None:
        """Launch a cluster of this name; it is awaited in a thread."""
        if offer.name not in self._offers:
            raise UnknownName("offer", offer.name, self._offers)
        if token in self._launches:
            return
        task = self._sky.Task(name=token, run=self._start_script(token, offer))
        task.set_resources(self._resources(offer))
        request = self._ask(self._sky.launch, task, cluster_name=token, retry_until_up=False)
        self._launches[token] = self._pool.submit(self._sky.get, request)

    def status(self, fleet: str) -> list[Rental]:
        """Clusters whose names begin so, launches that failed, and bills of those that are gone."""
        mode = self._sky.StatusRefreshMode.AUTO  # asks the cloud where machines may be taken back
        records = self._result(self._sky.status, refresh=mode)
        here = {
            _field(record, "name"): self._rental(record)
            for record in records
            if _field(record, "name").startswith(fleet)
        }
        found = list(here.values())
        for token, launch in list(self._launches.items()):
            if token in here or not token.startswith(fleet) or not launch.done():
                continue
            error = launch.exception()
            if error is not None:
                reason = _first_line(error)
                found.append(Rental(token=token, offer="", stage=Stage.FAILED, reason=reason))
        seen = {rental.token for rental in found}
        return found + [rental for rental in self._ended(fleet) if rental.token not in seen]

    def release(self, token: str) -> None:
        """Take the cluster down, whatever it does; one that is not there is down already."""
        try:
            self._result(self._sky.down, token)
        except ProviderTrouble as error:
            if not isinstance(error.__cause__, self._sky.exceptions.ClusterDoesNotExist):
                raise
        self._launches.pop(token, None)

    def _rental(self, record: Any) -> Rental:
        status, token = _field(record, "status"), _field(record, "name")
        resources = getattr(_field(record, "handle"), "launched_resources", None)
        price = float(resources.get_cost(HOUR_SECONDS)) if resources is not None else 0.0
        stage = _STAGES.get(status.name, Stage.ENDED)
        is_sick = stage is Stage.STARTING and _field(record, "init_kind", "") == "unhealthy"
        return Rental(
            token=token,
            offer="",
            stage=Stage.ENDED if is_sick else stage,
            reason=str(_field(record, "init_status_reason", "") or "") if is_sick else "",
            price_dollars_per_hour=price,
            since_seconds=float(_field(record, "launched_at")),
        )

    def _ended(self, fleet: str) -> list[Rental]:
        """Clusters that are gone, with what SkyPilot says they cost."""
        report = self._result(self._sky.cost_report, days=_REPORT_DAYS)
        return [
            Rental(
                token=row["name"],
                offer="",
                stage=Stage.ENDED,
                reason="it is not there any more",
                billed_micro_dollars=round(float(row["total_cost"]) * MICRO_DOLLARS),
            )
            for row in report
            if row["name"].startswith(fleet)
        ]

    def _resources(self, offer: Offer) -> Any:
        return self._sky.Resources(
            infra=offer.infra, instance_type=offer.instance, use_spot=offer.is_spot
        )

    def _start_script(self, token: str, offer: Offer) -> str:
        """Join the controller's Ray cluster under the name that it expects, and stay."""
        name = node_name(offer.name, int(token.rpartition("-")[2]))
        labels = f"drystone-node={name},drystone-gpu={offer.gpu}"
        return (
            f"ray start --address={self._address} --num-gpus={offer.num_gpus} "
            f"--labels {labels} --disable-usage-stats --block"
        )

    def _result(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Ask, and wait for the answer."""
        return self._ask(self._sky.get, self._ask(call, *args, **kwargs))

    def _ask(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # whatever SkyPilot or a cloud's library raises
            raise ProviderTrouble(f"SkyPilot: {_first_line(error)}") from error


def _import_sky() -> Any:
    try:
        return importlib.import_module("sky")
    except ImportError as error:
        raise MissingExtra("the provider `sky` needs SkyPilot", "sky") from error


def _field(record: Any, name: str, default: Any = None) -> Any:
    """Of a record, which is a model in newer releases and a dictionary in older ones."""
    if isinstance(record, Mapping):
        return record.get(name, default)
    return getattr(record, name, default)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
