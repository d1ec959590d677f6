#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up a trace of the virtual NPU, or shows in what two traces differ.

    python utils/virtual_npu/trace.py FILE [OTHER] [--rank N] [--json]

A trace has one JSON object a line, of one of these kinds: `op` (an operator launched), `internal_copy` (a copy that
CANN makes inside an operator, because it does not take the layout of a tensor as it is), `copy` (between host and
device, or devices), `collective`, and `sync` (the host waits for the device).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]
KINDS = ("op", "internal_copy", "collective", "copy", "sync")


class TraceError(ValueError):
    """A file is not a trace; the message is for a person."""


@dataclass
class Total:
    """What all the records of one kind and name come to."""

    count: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def add(self, record: dict[str, Any]) -> None:
        self.count += 1
        self.bytes_read += record.get("bytes_read", record.get("bytes", 0))
        self.bytes_written += record.get("bytes_written", record.get("bytes", 0))


def read(path: str | Path, rank: int | None = None) -> Records:
    """The records of a trace, in the order in which each process made them; those of one rank where it is given."""
    records = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise TraceError(f"{path}:{number}: not a line of a trace: {error}") from None
            if not isinstance(record, dict) or record.get("kind") not in KINDS:
                raise TraceError(f"{path}:{number}: not a record of a trace: {line.strip()[:80]}")
            if rank is None or record["rank"] == rank:
                records.append(record)
    return sorted(records, key=lambda record: (record["pid"], record["order"]))


def name_of(record: dict[str, Any]) -> str:
    """What a record is added up under, within its kind."""
    if record["kind"] == "sync":
        return record["what"]
    if record["kind"] == "copy":
        return record["direction"] + (" async" if record["async"] else "")
    return record["name"]


def totals(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Total]:
    """The total for each kind and name."""
    found: defaultdict[tuple[str, str], Total] = defaultdict(Total)
    for record in records:
        found[record["kind"], name_of(record)].add(record)
    return dict(sorted(found.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])))


def summary(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    """A trace in seven numbers."""
    by_kind = defaultdict(Total)
    host = 0
    for record in records:
        by_kind[record["kind"]].add(record)
        if record["kind"] == "copy" and record["direction"] != "d2d":
            host += record["bytes"]
    return {
        "launches": by_kind["op"].count,
        "bytes_read": by_kind["op"].bytes_read,
        "bytes_written": by_kind["op"].bytes_written,
        "internal_copies": by_kind["internal_copy"].count,
        "collectives": by_kind["collective"].count,
        "host_device_bytes": host,
        "host_synchronisations": by_kind["sync"].count,
    }


def table(heading: list[str], rows: list[list[str | int]]) -> str:
    """Rows under a heading, text to the left and numbers to the right."""
    cells = [heading, *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heading))]
    numbers = [all(isinstance(row[column], int) for row in rows) for column in range(len(heading))]

    def line(row: list[str]) -> str:
        padded = (cell.rjust(w) if n else cell.ljust(w) for cell, w, n in zip(row, widths, numbers, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, cells))


def show(records: Records) -> str:
    """One trace as tables."""
    rows = [[*key, total.count, total.bytes_read, total.bytes_written] for key, total in totals(records).items()]
    parts = [table(["kind", "name", "count", "bytes read", "bytes written"], rows)] if rows else []
    return "\n\n".join([*parts, table(["total", ""], [[name, value] for name, value in summary(records).items()])])


def difference(first: Records, second: Records) -> dict[tuple[str, str], tuple[Total, Total]]:
    """The totals of both for each kind and name in which they differ."""
    one, other = totals(first), totals(second)
    keys = sorted({*one, *other}, key=lambda key: (KINDS.index(key[0]), key[1]))
    pairs = {key: (one.get(key, Total()), other.get(key, Total())) for key in keys}
    return {key: (mine, theirs) for key, (mine, theirs) in pairs.items() if mine != theirs}


def show_difference(first: Records, second: Records) -> str:
    """Two traces as tables: the second less the first."""
    rows = [
        [*key, a.count, b.count, b.count - a.count, b.bytes_read - a.bytes_read, b.bytes_written - a.bytes_written]
        for key, (a, b) in difference(first, second).items()
    ]
    heading = ["kind", "name", "first", "second", "difference", "bytes read", "bytes written"]
    one, other = summary(first), summary(second)
    sums = [[name, one[name], other[name], other[name] - one[name]] for name in one]
    parts = [table(heading, rows)] if rows else []
    return "\n\n".join([*parts, table(["total", "first", "second", "difference"], sums)])


def as_json(first: Records, second: Records | None) -> dict[str, Any]:
    """The same as the tables."""
    if second is None:
        rows = [{"kind": kind, "name": name, **asdict(total)} for (kind, name), total in totals(first).items()]
        return {"summary": summary(first), "rows": rows}
    rows = [
        {"kind": kind, "name": name, "first": asdict(a), "second": asdict(b)}
        for (kind, name), (a, b) in difference(first, second).items()
    ]
    return {"summary": {"first": summary(first), "second": summary(second)}, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="a file written with run.py --trace")
    parser.add_argument("other", type=Path, nargs="?", help="another one, to be compared with the first")
    parser.add_argument("--rank", type=int, help="only what this rank did")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables")
    options = parser.parse_args(arguments)
    try:
        first = read(options.file, options.rank)
        second = None if options.other is None else read(options.other, options.rank)
    except (OSError, TraceError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(as_json(first, second), indent=2))
    else:
        print(show(first) if second is None else show_difference(first, second))
    return 0


if __name__ == "__main__":
    sys.exit(main())
