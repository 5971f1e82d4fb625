"""What has been measured so far, in a file: one benchmark can be run again by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import Record

FOLDER = Path(__file__).resolve().parents[1] / "results"
STORE = FOLDER / "figures.json"


@dataclass(slots=True)
class Results:
    """The last record of each benchmark, all from one machine."""

    machine: dict[str, str]
    records: dict[str, Record] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """The newest counts, but what was not run does not push out what was measured.

        It is kept as the file will hold it, so that tables of a run and of its file are the same.
        """
        known = self.records.get(record.name)
        if record.skipped and known is not None and not known.skipped:
            return
        self.records[record.name] = Record.from_json(_rounded(record))


def load_results(machine: dict[str, str], path: Path = STORE) -> Results:
    """What the file holds; figures of another machine are not mixed in.

    Those of other versions are kept until they are measured again: each says its own.
    """
    if not path.is_file():
        return Results(machine)
    table = json.loads(path.read_text(encoding="utf-8"))
    kept_packages = table["machine"].get("packages", "")
    if table["machine"] | {"packages": ""} != machine | {"packages": ""}:
        return Results(machine)
    records = [
        Record.from_json(row | {"packages": row.get("packages") or kept_packages})
        for row in table["records"]
    ]
    return Results(machine, {record.name: record for record in records})


def save_results(results: Results, path: Path = STORE) -> None:
    """Write the file; numbers with six digits are enough for tables and pictures."""
    path.parent.mkdir(exist_ok=True)
    records = [_rounded(one) for _, one in sorted(results.records.items())]
    text = json.dumps({"machine": results.machine, "records": records}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def _rounded(record: Record) -> dict[str, object]:
    def short(value: float) -> float:
        return float(f"{value:.6g}")

    table = record.to_json()
    table["seconds"] = short(record.seconds)
    table["figures"] = {
        name: short(value) if isinstance(value, float) else [short(one) for one in value]
        for name, value in record.figures.items()
    }
    return table
