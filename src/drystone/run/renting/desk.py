"""Renting, made true step by step: what the log asks for, and what the provider says there is.

`ask` and `release` only write events. At every tick the log is compared with what the provider said
last: what is asked for and not there is requested (the token was in the log before), what runs
is brought into the cluster, what the provider took back leaves it, what is given back is ended once
nobody works there, and what is rented and in no log is ended at once. It can be cut off anywhere.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from drystone.describe.cluster import NodeSpec
from drystone.describe.files.cluster import ClusterSpec
from drystone.describe.market import Offer
from drystone.errors import UnknownName
from drystone.run.control.journal import Journal, node_added
from drystone.run.control.live_state import LiveState
from drystone.run.control.notes import MarketDescribed
from drystone.run.engines.contract import Engine
from drystone.run.events import (
    BillSettled,
    Event,
    NodeJoined,
    PriceChanged,
    ReleaseAsked,
    RentalAsked,
    RentalFailed,
    Stopped,
)
from drystone.run.rentals import RentedNode
from drystone.run.renting.calls import ProviderCalls
from drystone.run.renting.provider import (
    OVER,
    NodeJoiner,
    ProviderStatus,
    ProviderTrouble,
    Rental,
    Renting,
    Stage,
    make_token,
    node_name,
    rental_of,
)

_ROUNDING: Final = 1e-9  # share by which sums of prices may be off
_LATE_SECONDS: Final = 60.0  # a request that was given up may be carried out so much later
_LAST_WAITS_SECONDS: Final = (0.0, 0.2, 1.0, 3.0, 5.0)  # before each try to give everything back


class RentalDesk:
    """Between the log, the provider and the engine; in the thread of the loop."""

    def __init__(self, settings: Renting, engine: Engine, joiner: NodeJoiner, folder: Path) -> None:
        self.settings, self._engine, self._joiner = settings, engine, joiner
        self._offers = {offer.name: offer for offer in settings.offers}
        where = f"{socket.gethostname()}:{folder}"
        # All that this folder ever rented begins alike, also if its log is lost.
        self._family = f"drystone-{hashlib.sha256(where.encode()).hexdigest()[:8]}"
        self._calls = ProviderCalls(
            settings.provider, family=self._family, look_seconds=settings.look_seconds
        )
        self._journal: Journal | None = None
        self._fleet = ""  # the family, and what tells this log from others
        self._running: dict[str, Rental] = {}  # by name of the node, as last seen
        self._taken_in = 0.0  # when the provider was asked for what was taken in last
        self._given_up: dict[int, float] = {}  # rentals that were never seen, and since when

    @property
    def trouble(self) -> str:
        """Why the provider does not answer, or not as asked; empty where it does."""
        return self._calls.trouble or self._calls.call_trouble

    # --- beginning and end ----------------------------------------------------------------------

    def recover(self, live: LiveState) -> ClusterSpec:
        """The cluster of now, with the nodes that the log has rented and that still run.

        Where the provider does not answer they are taken to run: if they do not, they are silent.
        """
        self._fleet = live.market.fleet if live.market is not None else ""
        rented = live.state.rentals.rented
        self._calls.expect(self._as_known(node) for node in rented.values())
        with suppress(Exception):  # whatever a provider raises: it is asked again
            self._calls.look()
        status = self._calls.view
        for row, node in rented.items():
            is_gone = status.rentals[self._token(node.rental)].stage in OVER
            if not is_gone and node.offer in self._offers:
                self._joiner.attach(live.state.nodes[row].id, self._offers[node.offer])
        if status.asked and self._fleet:
            self._note_running(live, status)
        return self._engine.discover()

    def _as_known(self, node: RentedNode) -> Rental:
        """A rental that the log has, as if it had just been seen."""
        return Rental(
            token=self._token(node.rental),
            offer=node.offer,
            stage=Stage.RUNNING,
            price_dollars_per_hour=node.price_dollars_per_hour,
            since_seconds=node.since_seconds,
        )

    def open(self, journal: Journal) -> None:
        """The log is read: say what is on offer, and begin to look."""
        self._journal = journal
        self._fleet = self._fleet or f"{self._family}-{secrets.token_hex(2)}"
        limits = self.settings.budget_dollars_per_hour, self.settings.hard_cap_dollars_per_hour
        budget, cap = (None if math.isinf(dollars) else dollars for dollars in limits)
        note = MarketDescribed(
            time_seconds=journal.now(),
            fleet=self._fleet,
            offers=tuple(
                (offer.name, offer.gpu, offer.num_gpus, offer.price_dollars_per_hour)
                for offer in self.settings.offers
            ),
            budget_dollars_per_hour=budget,
            hard_cap_dollars_per_hour=cap,
        )
        if journal.live.market is None or not note.says_as(journal.live.market):
            journal.commit([note])
        self._calls.start(looks_first=False)

    def close(self) -> None:
        """Ask no more; what is rented stays rented."""
        self._calls.stop()

    def end_all(self) -> None:
        """Give everything back, now: the controller ends and nobody would."""
        self._calls.stop()
        failures = ["nobody answers"]
        for wait_seconds in _LAST_WAITS_SECONDS:
            time.sleep(wait_seconds)
            failures = self._release_all()
            if not failures:
                return
        raise ProviderTrouble(
            f"could not be given back: {'; '.join(failures)}",
            hint="It costs money until it is: start `drystone serve` again, or end it there",
        )

    def _release_all(self) -> list[str]:
        """What could not be given back; one that fails does not keep the others."""
        failures = []
        try:
            rentals = self.settings.provider.status(self._family)
        except Exception as error:  # whatever a provider raises
            return [str(error)]
        for rental in rentals:
            if rental.stage not in OVER:
                try:
                    self.settings.provider.release(rental.token)
                except Exception as error:  # the others are given back in any case
                    failures.append(f"{rental.token}: {error}")
        return failures

    # --- what policies decide -------------------------------------------------------------------

    def ask(self, offer_name: str, num_nodes: int, reason: str) -> None:
        """Nodes of an offer are wanted: the log knows before anybody is asked."""
        if offer_name not in self._offers:
            raise UnknownName("offer", offer_name, self._offers)
        journal = self._opened()
        now, offer = journal.now(), self._offers[offer_name]
        journal.commit(
            [
                RentalAsked(
                    time_seconds=now,
                    offer=offer_name,
                    num_nodes=num_nodes,
                    first_rental=journal.live.state.rentals.num_asked,
                    ready_seconds=now + offer.start_delay_seconds,
                    reason=reason,
                )
            ]
        )

    def release(self, row: int, reason: str) -> None:
        """A node is to be given back, unless somebody got it meanwhile."""
        journal = self._opened()
        state = journal.live.state
        is_free = state.free[row] == state.nodes[row].num_gpus or row in state.lost
        if row in state.rentals.rented and row not in state.closing and is_free:
            journal.commit([ReleaseAsked(time_seconds=journal.now(), node=row, reason=reason)])

    def joining(self, row: int, spec: NodeSpec, now_seconds: float) -> Event | None:
        """The event of a node that joins: rented, of the owner's, or not to be used."""
        found = self._running.get(spec.id)
        if found is None:
            return None if spec.id.startswith("rented-") else node_added(row, spec, now_seconds)
        rental = rental_of(found.token, self._fleet)
        assert rental is not None, "only nodes of this log are noted as running"
        return NodeJoined(
            time_seconds=now_seconds,
            node=row,
            rental=rental,
            offer=found.offer,
            spec=spec,
            price_dollars_per_hour=found.price_dollars_per_hour,
            billed_since_seconds=min(found.since_seconds, now_seconds),
        )

    # --- every tick -----------------------------------------------------------------------------

    def tick(self, busy: frozenset[str]) -> None:
        """One comparison. `busy` are nodes where processes still work or leave."""
        journal, status = self._opened(), self._calls.view
        if not status.asked:
            return  # it has not answered yet
        with journal.lock:
            if status.asked != self._taken_in:
                self._taken_in = status.asked
                self._take_in(journal, status)
            rents = self._to_rent(journal, status)
            self._calls.want(rents, self._to_release(journal, status, busy))

    def _take_in(self, journal: Journal, status: ProviderStatus) -> None:
        """What the provider says becomes events, and nodes of the cluster."""
        state, now = journal.live.state, journal.now()
        journal.commit(self._price_events(state.rentals.prices, status.prices, now))
        failures = self._failures(journal, status)
        journal.commit(failures)
        for failed in failures:  # one that was about to join must not
            self._joiner.detach(node_name(failed.offer, failed.rental), failed.reason)
            if self._token(failed.rental) not in status.rentals:
                self._given_up[failed.rental] = time.monotonic()
        self._note_running(journal.live, status)
        for name, running in self._running.items():
            self._joiner.attach(name, self._offers[running.offer])
        for row, rented in list(state.rentals.rented.items()):
            found = status.rentals.get(self._token(rented.rental))
            if found is None or found.stage in OVER:
                reason = found.reason if found else "the provider does not know it any more"
                self._joiner.detach(state.nodes[row].id, reason)
        journal.commit(self._settlements(journal, status))
        self._keep_cap(journal)

    def _note_running(self, live: LiveState, status: ProviderStatus) -> None:
        """Nodes that were asked for and run: they are expected in the cluster.

        The provider's clock may not be ours: none has cost anything before it was asked for.
        """
        self._running = {}
        for rental, asked in live.state.rentals.asked.items():
            found = status.rentals.get(self._token(rental))
            if found is not None and found.stage is Stage.RUNNING and asked.offer in self._offers:
                since = max(found.since_seconds, asked.asked_seconds)
                running = replace(found, offer=asked.offer, since_seconds=since)
                self._running[node_name(asked.offer, rental)] = running

    def _price_events(
        self, known: Mapping[str, float], prices: Mapping[str, float], now: float
    ) -> list[Event]:
        return [
            PriceChanged(time_seconds=now, offer=name, price_dollars_per_hour=prices[name])
            for name, offer in self._offers.items()
            if name in prices and prices[name] != known.get(name, offer.price_dollars_per_hour)
        ]

    def _failures(self, journal: Journal, status: ProviderStatus) -> list[RentalFailed]:
        """Nodes that will not come, or for which we wait no longer."""
        now, events = journal.now(), list[RentalFailed]()
        for rental, asked in journal.live.state.rentals.asked.items():
            found = status.rentals.get(self._token(rental))
            reason = ""
            if found is not None and found.stage in OVER:
                reason = found.reason or "it ended before it could be used"
            elif now > asked.ready_seconds + self.settings.patience_seconds:
                reason = f"it did not come within {now - asked.asked_seconds:.0f} s"
            elif asked.offer not in self._offers:
                reason = f"there is no offer {asked.offer} any more"
            if reason:
                events.append(
                    RentalFailed(time_seconds=now, rental=rental, offer=asked.offer, reason=reason)
                )
        return events

    def _settlements(self, journal: Journal, status: ProviderStatus) -> list[Event]:
        """Bills of rentals that are over, as the provider says."""
        rentals, now, events = journal.live.state.rentals, journal.now(), list[Event]()
        open_rentals = {rented.rental for rented in rentals.rented.values()} | rentals.asked.keys()
        offers = rentals.offers
        for token, found in status.rentals.items():
            rental = rental_of(token, self._fleet)
            if rental is None or rental in open_rentals or rental >= rentals.num_asked:
                continue
            billed = found.billed_micro_dollars
            if found.stage in OVER and billed is not None and rental not in rentals.settled:
                events.append(
                    BillSettled(
                        time_seconds=now, rental=rental, offer=offers[rental], micro_dollars=billed
                    )
                )
        return events

    def _keep_cap(self, journal: Journal) -> None:
        """Where prices rose above the hard cap, nodes are given back: idle ones, then new ones."""
        state, cap = journal.live.state, self.settings.hard_cap_dollars_per_hour
        rented = state.rentals.rented
        held = {row: node for row, node in rented.items() if row not in state.closing}
        rate = sum(node.price_dollars_per_hour for node in held.values())
        order = sorted(
            held, key=lambda row: (state.free[row] < state.nodes[row].num_gpus, -held[row].rental)
        )
        for row in order:
            if rate <= cap * (1 + _ROUNDING):
                return
            rate -= held[row].price_dollars_per_hour
            now, reason = journal.now(), "its price rose, and the hard cap allows no more"
            stops: list[Event] = [
                Stopped(time_seconds=now, job_id=job_id, reason=reason)
                for job_id, record in state.active.items()
                if any(used == row for used, _ in record.placement)
            ]
            journal.commit([*stops, ReleaseAsked(time_seconds=now, node=row, reason=reason)])

    def _to_rent(self, journal: Journal, status: ProviderStatus) -> dict[str, Offer]:
        """Tokens that the provider does not know, as far as the hard cap has room for them now.

        Nodes that are being given back count until they are gone, and so does what was given up and
        is still listed.
        """
        found, requested = dict[str, Offer](), self._calls.requested
        rate, unasked = self._possible_rate(journal, status), []
        for rental, asked in journal.live.state.rentals.asked.items():
            token = self._token(rental)
            if token not in status.rentals and asked.offer in self._offers:
                unasked.append((token, self._offers[asked.offer]))
        for token, offer in sorted(unasked, key=lambda pair: pair[0] not in requested):
            rate += self._price(journal, offer.name)
            # What was requested might exist: it counts, and giving it up would not change that.
            if token in requested or rate <= self._cap:
                found[token] = offer
        return found

    @property
    def _cap(self) -> float:
        return self.settings.hard_cap_dollars_per_hour * (1 + _ROUNDING)

    def _possible_rate(self, journal: Journal, status: ProviderStatus) -> float:
        """Dollars an hour of all that is there or might be, whether the log wants it or not."""
        rentals = journal.live.state.rentals
        by_token = {
            self._token(rented.rental): rented.price_dollars_per_hour
            for rented in rentals.rented.values()
        }
        by_token |= {
            self._token(number): self._price(journal, rentals.offers[number])
            for number, since in self._given_up.items()
            if time.monotonic() - since <= _LATE_SECONDS
        }
        for token, known in status.rentals.items():
            rental = rental_of(token, self._fleet)
            is_ours = rental is not None and rental < rentals.num_asked
            offer = rentals.offers[rental] if rental is not None and is_ours else known.offer
            if known.stage in OVER:
                by_token.pop(token, None)
            else:
                price = max(known.price_dollars_per_hour, self._price(journal, offer))
                by_token[token] = max(price, by_token.get(token, 0.0))
        return sum(by_token.values())

    def _to_release(
        self, journal: Journal, status: ProviderStatus, busy: frozenset[str]
    ) -> set[str]:
        """Nodes to be given back where nobody works any more, and whatever nobody rented."""
        state, found = journal.live.state, set[str]()
        rented = {node.rental: row for row, node in state.rentals.rented.items()}
        for token, known in status.rentals.items():
            if known.stage in OVER:
                continue
            rental = rental_of(token, self._fleet)
            row = rented.get(rental) if rental is not None else None
            if row is not None:
                if row in state.closing and state.nodes[row].id not in busy:
                    found.add(token)
            elif rental is None or rental not in state.rentals.asked:
                found.add(token)
        return found

    def _price(self, journal: Journal, offer: str) -> float:
        listed = self._offers[offer].price_dollars_per_hour if offer in self._offers else 0.0
        return journal.live.state.rentals.prices.get(offer, listed)

    def _token(self, rental: int) -> str:
        return make_token(self._fleet, rental)

    def _opened(self) -> Journal:
        assert self._journal is not None, "the desk is opened before it is used"
        return self._journal
