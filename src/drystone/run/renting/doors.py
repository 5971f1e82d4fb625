"""How a rented machine becomes a node of the cluster: on one machine, an agent of its own."""

from __future__ import annotations

from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.market import Offer
from drystone.run.engines.local.engine import LocalEngine


class LocalDoor:
    """Nodes of a simulated cloud are emulated here."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def bring(self, name: str, offer: Offer) -> None:
        """Start an agent under that name, unless there is one."""
        if any(one.id == name for one in self._engine.discover().nodes):
            return
        emulations = {offer.gpu: offer.emulation} if offer.emulation is not None else {}
        self._engine.add(
            ClusterSpec(
                nodes=(offer.node(name),),
                emulations=emulations,
                dollars_per_gpu_hour={offer.gpu: offer.price_dollars_per_hour / offer.num_gpus},
            )
        )

    def take(self, name: str, reason: str) -> None:
        """End the agent, and with it all that it started."""
        if any(one.id == name for one in self._engine.discover().nodes):
            self._engine.remove(name, reason)


class OpenDoor:
    """Machines that join by themselves, as those of a cloud do: nothing is to be done here."""

    def bring(self, name: str, offer: Offer) -> None:
        """Its own start script joined the cluster under that name."""

    def take(self, name: str, reason: str) -> None:
        """The provider ended it, and the engine will see that."""
