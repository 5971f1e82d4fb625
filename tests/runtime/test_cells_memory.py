"""What a rank of a split job is seen to hold."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros
from torch.testing._internal.distributed.fake_pg import FakeStore

from drystone.run.runtime.ledger import Ledger

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks of which the other is not there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_of_a_tensor_that_is_split_the_part_counts(two_ranks):
    mesh = init_device_mesh("cpu", (2,))

    with Ledger() as ledger:
        split = zeros(1000, 3, device_mesh=mesh, placements=[Shard(0)])
        seen = ledger.live_bytes
        doubled = split * 2

    assert seen == 500 * 3 * 4
    assert ledger.live_bytes == 2 * seen
    assert doubled.to_local().shape == torch.Size([500, 3])
