"""How GPUs are wired: links, and machines of equal nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

from drystone.describe.gpu import GpuSpec
from drystone.errors import InvalidSpec, UnknownName
from drystone.units import GB

if TYPE_CHECKING:  # a profile is checked by pydantic, which nobody needs who has no profile
    from drystone.describe.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way from one GPU to another: bandwidth of one direction per GPU, and latency of a hop."""

    name: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    source: str = ""

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_second <= 0 or self.latency_seconds < 0:
            raise InvalidSpec(f"link {self.name}: bandwidth must be > 0 and latency >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal nodes of one GPU type: what an estimate needs to know of the hardware."""

    gpu: GpuSpec
    gpus_per_node: int
    intra: Link  # inside a node
    inter: Link  # between nodes, per GPU
    profile: Profile | None = None  # what was measured on such a GPU, where somebody did

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise InvalidSpec(f"machine of {self.gpu.name}: gpus_per_node must be >= 1")


# Profiles by the full name of their GPU type; `profile.adopt_profiles` alone adds to it.
MEASURED: Final[dict[str, Profile]] = {}

_MICRO: Final = 1e-6
_TOPO: Final = "github:NVIDIA/nccl/src/graph/topo.h@069a3d4f9"
_TUNING: Final = "github:NVIDIA/nccl/src/graph/tuning.cc@b6475625f (hwLat, ring, Simple)"

# Latency of one hop and where it is from, by what carries it.
_NVLINK_HOP: Final = (3.4 * _MICRO, _TUNING)
_FABRIC_HOP: Final = (3.4 * _MICRO, "assumption: as NVLink")
_PCIE_HOP: Final = (5.7 * _MICRO, _TUNING)
_RDMA_HOP: Final = (14.0 * _MICRO, _TUNING)
_TCP_HOP: Final = (40.0 * _MICRO, "assumption: RDMA's, and half a round trip of 50 us through TCP")

# What collectives reach of the nominal bandwidth of a GPU's own links, by link name.
_LINK_SHARES: Final[dict[str, tuple[float, str]]] = {
    "NVLink 1.0": (18.0 / 20.0, f"{_TOPO}: 18 of 20 GB/s a link (SM60)"),
    "NVLink 2.0": (20.0 / 25.0, f"{_TOPO}: 20 of 25 GB/s a link (SM70)"),
    "NVLink 3.0": (
        235.0 / 300.0,
        "github:NVIDIA/nccl/src/graph/tuning.cc@01afd20a7 caps the A100 at 235 of 300 GB/s; "
        "nccl-tests on 8 x A100 reach 230 to 250 (docs.alayanew.com, 2026-05-06)",
    ),
    "NVLink 4.0": (
        20.6 / 25.0,
        f"{_TOPO}: 20.6 of 25 GB/s a link (SM90); all-reduce in the switch (NVLS) reaches 476, "
        "github issue NVIDIA/nccl-tests#290, other collectives do not",
    ),
    "NVLink 5.0": (40.1 / 50.0, f"{_TOPO}: 40.1 of 50 GB/s a link (SM100)"),
    "NVLink 3.0 bridge": (12.0 / 14.0625, f"{_TOPO}: 12 of 14 GB/s a link (SM86)"),
    "NVLink 4.0 bridge": (20.6 / 25.0, f"{_TOPO}: 20.6 of 25 GB/s a link (SM90)"),
    "Infinity Fabric": (0.68, "assumption: 304 of 448 GB/s on an MI300X node (not re-read)"),
}
# Nominal bytes per second, both directions, of the GPU that each link is best known from.
_LINK_NOMINAL: Final = {
    "NVLink 1.0": 160 * GB, "NVLink 2.0": 300 * GB, "NVLink 3.0": 600 * GB,
    "NVLink 4.0": 900 * GB, "NVLink 5.0": 1800 * GB, "NVLink 3.0 bridge": 112.5 * GB,
    "NVLink 4.0 bridge": 600 * GB, "Infinity Fabric": 896 * GB,
}  # fmt: skip

_PCIE_SHARE: Final = 12.0 / 15.754  # NCCL's 12 GB/s of a third-generation bus of 16 lanes
_PCIE_SOURCE: Final = f"{_TOPO}: PCI_BW 12 GB/s for generation 3, doubled with each generation"
# GeForce drivers forbid direct transfers, so each byte crosses the bus to host memory and back.
_HOST_COPY_SHARE: Final = 0.5

# One network card: name, achieved GB/s, hop, source of the rate.
_NETWORKS: Final = (
    ("InfiniBand EDR", 12.2, _RDMA_HOP, "github issue NVIDIA/nccl-tests#29: 12.2 GB/s"),
    ("InfiniBand HDR", 24.0, _RDMA_HOP, "github issue NVIDIA/nccl-tests#119: 96 on 4 cards"),
    ("InfiniBand NDR", 47.0, _RDMA_HOP, "github issue NVIDIA/nccl-tests#290: 46 to 48 GB/s"),
    ("InfiniBand XDR", 94.0, _RDMA_HOP, "assumption: the share of the line rate as NDR"),
    ("RoCE 100", 12.0, _RDMA_HOP, f"{_TOPO}: NET_BW 12 GB/s for 100 Gb/s"),
    ("RoCE 200", 24.0, _RDMA_HOP, f"{_TOPO}: NET_BW 12 GB/s for 100 Gb/s, twice"),
    ("RoCE 400", 47.0, _RDMA_HOP, "assumption: as InfiniBand NDR"),
    ("Slingshot 200", 24.0, _RDMA_HOP, "assumption: as InfiniBand HDR"),
    ("Ethernet 10", 1.1, _TCP_HOP, "assumption: TCP, 88 % of the line rate"),
    ("Ethernet 25", 2.75, _TCP_HOP, "assumption: TCP, 88 % of the line rate"),
    ("Ethernet 50", 5.5, _TCP_HOP, "assumption: TCP, 88 % of the line rate"),
    ("Ethernet 100", 11.0, _TCP_HOP, "assumption: TCP, 88 % of the line rate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wiring:
    """How nodes of some GPU types are usually built: the assumption behind `default_machine`."""

    gpus: tuple[str, ...]
    gpus_per_node: int
    network: str
    cards_per_gpu: float
    like: str  # the system it is taken from


_WIRINGS: Final = (
    _Wiring(gpus=("P100-16GB-SXM", "V100-16GB-SXM", "V100-32GB-SXM"), gpus_per_node=8,
            network="InfiniBand EDR", cards_per_gpu=0.5, like="DGX-1"),
    _Wiring(gpus=("A100-40GB-SXM", "A100-80GB-SXM", "A800-80GB-SXM"), gpus_per_node=8,
            network="InfiniBand HDR", cards_per_gpu=1, like="DGX A100"),
    _Wiring(gpus=("H100-80GB-SXM", "H800-80GB-SXM", "H200-141GB-SXM", "H20-96GB-SXM",
                  "H20-141GB-SXM", "B200-180GB-SXM"),
            gpus_per_node=8, network="InfiniBand NDR", cards_per_gpu=1, like="DGX H100"),
    _Wiring(gpus=("H100-96GB-HBM2e",), gpus_per_node=8, network="RoCE 400", cards_per_gpu=1,
            like="Grand Teton"),
    _Wiring(gpus=("B300-288GB-SXM",), gpus_per_node=8, network="InfiniBand XDR", cards_per_gpu=1,
            like="DGX B300"),
    _Wiring(gpus=("GH200-96GB",), gpus_per_node=4, network="Slingshot 200", cards_per_gpu=1,
            like="four GH200 to a node, as in Alps"),
    # The node is the NVLink domain, not the tray.
    _Wiring(gpus=("GB200-186GB",), gpus_per_node=72, network="InfiniBand NDR", cards_per_gpu=1,
            like="GB200 NVL72"),
    _Wiring(gpus=("GB300-288GB",), gpus_per_node=72, network="InfiniBand XDR", cards_per_gpu=1,
            like="GB300 NVL72"),
    _Wiring(gpus=("MI250X-128GB",), gpus_per_node=4, network="Slingshot 200", cards_per_gpu=1,
            like="Frontier"),
    _Wiring(gpus=("MI300X-192GB", "MI325X-256GB", "MI350X-288GB", "MI355X-288GB"),
            gpus_per_node=8, network="RoCE 400", cards_per_gpu=1,
            like="an eight-GPU Instinct platform"),
    _Wiring(gpus=("DGX-Spark",), gpus_per_node=1, network="RoCE 200", cards_per_gpu=1,
            like="two machines and a cable"),
    _Wiring(gpus=("RTX-2080-Ti", "RTX-3090", "RTX-4080", "RTX-4090", "RTX-5080", "RTX-5090",
                  "RTX-8000", "RTX-A5000", "RTX-A6000", "RTX-6000-Ada", "RTX-PRO-6000",
                  "T4-16GB"), gpus_per_node=4,
            network="Ethernet 100", cards_per_gpu=0.25, like="a workstation or small server"),
    _Wiring(gpus=("K80-12GB", "P40-24GB", "P100-16GB-PCIe", "V100-16GB-PCIe", "A10-24GB",
                  "A10G-24GB", "A30-24GB", "A40-48GB", "L4-24GB", "L40-48GB", "L40S-48GB",
                  "A100-40GB-PCIe", "A100-80GB-PCIe", "H100-80GB-PCIe", "H100-94GB-NVL"),
            gpus_per_node=8, network="Ethernet 100", cards_per_gpu=0.125, like="a PCIe server"),
)  # fmt: skip
_USUAL_GPUS_PER_NODE: Final = 8  # of types whose network alone is known


@cache
def load_links() -> dict[str, Link]:
    """Every link by name; GPU links as on their best-known GPU, networks as one card."""
    links = [_own_link(name, nominal) for name, nominal in _LINK_NOMINAL.items()]
    links += [_bus_link(f"PCIe {gen}.0 x16", 15.754 * GB * 2 ** (gen - 3)) for gen in (3, 4, 5)]
    links += [_make_link(name, rate * GB, hop, source) for name, rate, hop, source in _NETWORKS]
    return {link.name: link for link in links}


def find_link(name: str) -> Link:
    """The link of that name, whatever its case and spaces; the message of a failure has hints."""
    links = load_links()
    by_plain = {_plain(known): link for known, link in links.items()}
    if _plain(name) not in by_plain:
        raise UnknownName("link", name, links)
    return by_plain[_plain(name)]


def gpu_link(gpu: GpuSpec) -> Link:
    """What joins GPUs of this type inside a node.

    Bridges join pairs only, so types that have nothing but a bridge are taken to use the bus.
    """
    if gpu.link in _LINK_SHARES and not gpu.link.endswith("bridge"):
        return _own_link(gpu.link, gpu.link_bytes_per_second)
    if gpu.is_own and gpu.link and not gpu.link.endswith("bridge"):
        share, told = min(_LINK_SHARES.values())[0], "the least of the known links' shares"
        rate = gpu.link_bytes_per_second / 2 * share
        return _make_link(gpu.link, rate, _FABRIC_HOP, f"assumption: {told}, {share:g}")
    link = _bus_link(gpu.bus, gpu.bus_bytes_per_second)
    if not (gpu.like or gpu.name).startswith(("RTX-2", "RTX-3", "RTX-4", "RTX-5")):
        return link
    return replace(
        link,
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * _HOST_COPY_SHARE,
        source=f"{link.source}; halved, as GeForce copies through host memory (assumption)",
    )


def measured_machine(machine: Machine, profile: Profile) -> Machine:
    """The same with what a profile says."""
    return replace(
        machine,
        intra=profile.link("intra") or machine.intra,
        inter=profile.link("inter") or machine.inter,
        profile=profile,
    )


def default_machine(
    gpu: GpuSpec, gpus_per_node: int | None = None, inter: Link | str | None = None
) -> Machine:
    """Nodes of `gpu` as they are usually built; what is given or measured replaces the usual.

    A link given by name is one network card a GPU. A node with fewer GPUs than usual keeps the
    number of cards a GPU, so the bandwidth between nodes stays the same for each GPU.
    """
    wiring = next((one for one in _WIRINGS if (gpu.like or gpu.name) in one.gpus), None)
    profile = MEASURED.get(gpu.name)
    if profile is None and gpu.profile:
        from drystone.describe.profile import profile_at

        profile = profile_at(gpu.profile)
    if inter is None and profile is not None:
        inter = profile.link("inter")
    if inter is None and gpu.network:
        inter = gpu.network
    if inter is None:
        if wiring is None:
            raise InvalidSpec(
                "what joins its nodes is not known",
                where=f"GPU type {gpu.name}",
                hint="Name a network; or give the type a row in `_WIRINGS` of describe/machine.py, "
                "or `network` or `like` in `gpu_types` of a cluster file",
            )
        inter = _shared_link(find_link(wiring.network), wiring)
    elif isinstance(inter, str):
        inter = find_link(inter)
    if gpus_per_node is None:
        gpus_per_node = wiring.gpus_per_node if wiring else _USUAL_GPUS_PER_NODE
    return Machine(
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        intra=(profile and profile.link("intra")) or gpu_link(gpu),
        inter=inter,
        profile=profile,
    )


def _shared_link(card: Link, wiring: _Wiring) -> Link:
    """One GPU's part of the cards of its node."""
    shared = (
        "" if wiring.cards_per_gpu == 1 else f", one card for {1 / wiring.cards_per_gpu:g} GPUs"
    )
    return replace(
        card,
        bandwidth_bytes_per_second=card.bandwidth_bytes_per_second * wiring.cards_per_gpu,
        source=f"{card.source}; assumption: wired like {wiring.like}{shared}",
    )


def _own_link(name: str, nominal_bytes_per_second: float) -> Link:
    """A GPU's own link; the nominal rate counts both directions."""
    share, source = _LINK_SHARES[name]
    hop = _NVLINK_HOP if name.startswith("NVLink") else _FABRIC_HOP
    return _make_link(name, nominal_bytes_per_second / 2 * share, hop, source)


def _bus_link(bus: str, nominal_bytes_per_second: float) -> Link:
    """A bus; the nominal rate counts one direction."""
    return _make_link(bus, nominal_bytes_per_second * _PCIE_SHARE, _PCIE_HOP, _PCIE_SOURCE)


def _make_link(name: str, rate: float, hop: tuple[float, str], source: str) -> Link:
    seconds, hop_source = hop
    return Link(
        name=name,
        bandwidth_bytes_per_second=rate,
        latency_seconds=seconds,
        source=f"{source}; latency: {hop_source}",
    )


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())
