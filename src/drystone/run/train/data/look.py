"""`python -m drystone.run.train.data.look REQUEST`: can this data be trained on, how much is it?

The request is a `DataRequest` as JSON. One JSON object is written: what an epoch has, or the error.
Data of up to a limit is tokenised whole, and kept; of more, only the first records are.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final

from drystone.errors import RequestError
from drystone.run.train.data.encode import load_encoder, record_encoder
from drystone.run.train.data.records import Container, find_files, read_records
from drystone.run.train.data.rows import DocumentRows
from drystone.run.train.data.source import DataRequest, look_at_records, open_source

_FIRST_RECORDS: Final = 64


def look(request: DataRequest, *, limit_bytes: int) -> dict[str, Any]:
    """What an epoch has; `num_samples` is 0 where the data is too large to be counted here."""
    container, files = find_files(Path(request.name))
    num_bytes = sum(file.stat().st_size for file in files)
    if container is Container.TOKENS or num_bytes <= limit_bytes:
        source = open_source(request)
        source.read(range(min(source.num_samples, _FIRST_RECORDS)))
        told: dict[str, Any] = {"num_samples": source.num_samples, "num_bytes": num_bytes}
        if isinstance(source, DocumentRows):
            told |= asdict(source.store.facts) | {"num_cut": source.num_cut}
        return told
    tokenizer = request.tokenizer_path()
    encoder = None
    if tokenizer is not None:
        encoder = load_encoder(tokenizer, vocab_size=request.vocab_size)
    if container is not Container.TEXT:
        name, column = look_at_records(request, container, files)
        some = list(islice(read_records(container, files[0]), _FIRST_RECORDS))
        record_encoder(name, column, encoder, str(files[0]))(some)
    return {"num_samples": 0, "num_bytes": num_bytes}


def main() -> int:
    """Read the request, answer on standard output."""
    table = json.loads(sys.argv[1])
    limit_bytes = int(table.pop("limit_bytes"))
    try:
        answer = look(DataRequest(**table), limit_bytes=limit_bytes)
    except RequestError as error:
        told = {"message": error.message, "where": error.where, "hint": error.hint}
        answer = {"error": told}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
