"""A checkpoint is data: a pickle in it that would run something is refused."""

import io
import os
import pickle
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from drystone.errors import UnreadableFile
from drystone.run.train.checkpoint.contents import SafeReader, _TableOfContents

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path):
    state = {
        "model.weight": torch.arange(12.0).reshape(3, 4),
        "model.half": torch.ones(5, dtype=torch.bfloat16),
        "optimizer.weight.step": torch.tensor(7.0),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)
    return tmp_path / "c"


def load(checkpoint: Path) -> dict:
    state = {
        "model.weight": torch.zeros(3, 4),
        "model.half": torch.zeros(5, dtype=torch.bfloat16),
        "optimizer.weight.step": torch.tensor(0.0),
    }
    dcp.load(state, storage_reader=SafeReader(checkpoint), no_dist=True)
    return state


def test_what_torch_writes_is_read(checkpoint):
    loaded = load(checkpoint)

    assert torch.equal(loaded["model.weight"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(loaded["model.half"], torch.ones(5, dtype=torch.bfloat16))
    assert loaded["optimizer.weight.step"].item() == 7.0


def test_a_pickle_as_table_of_contents_runs_nothing(checkpoint, tmp_path):
    proof = tmp_path / "ran"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Hostile(proof)))

    with pytest.raises(UnreadableFile, match=r"names posix\.mkdir"):
        SafeReader(checkpoint).read_metadata()
    assert not proof.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())  # torch's own reader would have
    assert proof.exists()


def test_a_pickle_inside_a_good_table_of_contents_runs_nothing(checkpoint, tmp_path):
    metadata = SafeReader(checkpoint).read_metadata()
    metadata.planner_data = Hostile(tmp_path / "ran")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(UnreadableFile):
        SafeReader(checkpoint).read_metadata()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_what_is_no_table_of_contents_is_refused(checkpoint, what):
    (checkpoint / ".metadata").write_bytes(what)

    with pytest.raises(UnreadableFile):
        SafeReader(checkpoint).read_metadata()


def test_a_pickle_in_place_of_tensors_runs_nothing(checkpoint, tmp_path):
    proof = tmp_path / "ran"
    [data] = checkpoint.glob("*.distcp")
    size = data.stat().st_size
    torch.save({"x": Hostile(proof)}, tmp_path / "bad.pt")
    bad = (tmp_path / "bad.pt").read_bytes()
    data.write_bytes(bad + b"\0" * max(0, size - len(bad)))

    with pytest.raises(BaseException, match=r"weights_only|Weights only|UnpicklingError"):
        load(checkpoint)
    assert not proof.exists()
    shutil.rmtree(checkpoint)


class Named:
    """Pickled as an attribute of something, as some versions of Python pickle enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def unpickle(value: object):
    return _TableOfContents(io.BytesIO(pickle.dumps(value))).load()


def test_members_of_enumerations_may_be_written_as_attributes():
    assert unpickle(Named(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")) is (
        _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [(_MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "__mro__"), (Path("x"), "unlink")],
)
def test_other_attributes_are_refused(owner, name):
    with pytest.raises(pickle.UnpicklingError):
        unpickle(Named(owner, name))
