"""The table of contents of a checkpoint, read without running anything that it names.

torch pickles it. Unpickling runs whatever a file asks for, so only the names of torch's own records
are known here.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from drystone.errors import UnreadableFile

_NAMES: Final = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    }
)


class _TableOfContents(pickle.Unpickler):
    """Knows the names above and the types of numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.0 to 3.11.3 write enums
            return _member
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"names {module[:60]}.{name[:60]}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """A member of an enumeration, and nothing else of anything."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"asks for {str(name)[:60]} of what is no enumeration")
    return kind[name]


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a folder, with a table of contents that cannot run anything."""

    def read_metadata(self, *_: Any, **given: Any) -> Metadata:
        """The table of contents."""
        path = Path(self._get_metadata_path(given.get("rank")))
        try:
            with path.open("rb") as file:
                metadata = _TableOfContents(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise UnreadableFile(
                f"is no table of contents of a checkpoint: {error}",
                where=str(path),
                hint="Load only checkpoints that you or your jobs have written",
            ) from None
        if not isinstance(metadata, Metadata):
            raise UnreadableFile("is no table of contents of a checkpoint", where=str(path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
