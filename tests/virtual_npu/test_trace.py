# SPDX-License-Identifier: Apache-2.0
"""utils/virtual_npu/trace.py, on traces written here."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "utils" / "virtual_npu" / "trace.py"
spec = importlib.util.spec_from_file_location("virtual_npu_trace", SCRIPT)
trace = sys.modules["virtual_npu_trace"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trace)


def write(path: Path, *records: dict) -> Path:
    common = {"pid": 7, "rank": 0, "device": 0}
    lines = [json.dumps({"order": i, **common, **record}) for i, record in enumerate(records)]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def op(name: str, read: int, written: int, **more) -> dict:
    return {"kind": "op", "name": name, "bytes_read": read, "bytes_written": written, **more}


H2D = {"kind": "copy", "direction": "h2d", "bytes": 16, "async": True}
D2H = {"kind": "copy", "direction": "d2h", "bytes": 4, "async": False}
D2D = {"kind": "copy", "direction": "d2d", "bytes": 1000, "async": True}
SYNC = {"kind": "sync", "what": "aclrtSynchronizeStream"}


@pytest.fixture
def looped(tmp_path):
    return write(tmp_path / "looped", H2D, op("aclnnMm", 10, 5), op("aclnnMm", 30, 7), SYNC, SYNC, D2H, D2D)


@pytest.fixture
def grouped(tmp_path):
    return write(tmp_path / "grouped", H2D, op("aclnnGroupedMatmulV5", 40, 12), SYNC, D2H, D2D)


def test_totals_per_operator_and_summary(looped):
    records = trace.read(looped)
    assert trace.totals(records)["op", "aclnnMm"] == trace.Total(2, 40, 12)
    assert trace.totals(records)["copy", "h2d async"] == trace.Total(1, 16, 16)
    assert trace.summary(records) == {
        "launches": 2,
        "bytes_read": 40,
        "bytes_written": 12,
        "internal_copies": 0,
        "collectives": 0,
        "host_device_bytes": 20,  # the copy between devices is not one with the host
        "host_synchronisations": 2,
    }


def test_difference_has_what_differs_and_nothing_else(looped, grouped):
    found = trace.difference(trace.read(looped), trace.read(grouped))
    assert {key: (a.count, b.count) for key, (a, b) in found.items()} == {
        ("op", "aclnnGroupedMatmulV5"): (0, 1),
        ("op", "aclnnMm"): (2, 0),
        ("sync", "aclrtSynchronizeStream"): (2, 1),
    }


def test_tables(looped, grouped, capsys):
    assert trace.main([str(looped)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "aclnnMm" in line).split() == ["op", "aclnnMm", "2", "40", "12"]
    assert trace.main([str(looped), str(grouped)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "aclnnMm" in line).split() == ["op", "aclnnMm", "2", "0", "-2", "-40", "-12"]
    assert next(line for line in lines if "host_synch" in line).split() == ["host_synchronisations", "2", "1", "-1"]


def test_json(looped, grouped, capsys):
    assert trace.main([str(looped), str(grouped), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["summary"]["second"]["host_synchronisations"] == 1
    row = next(row for row in result["rows"] if row["name"] == "aclnnMm")
    assert row["first"] == {"count": 2, "bytes_read": 40, "bytes_written": 12} and row["second"]["count"] == 0
    assert trace.main([str(looped), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["launches"] == 2


def test_one_rank_and_order_within_a_process(tmp_path):
    late, early = op("late", 1, 1, order=5, rank=1), op("early", 1, 1, order=2, rank=1)
    path = write(tmp_path / "ranks", late, op("other", 1, 1, rank=0), early)
    assert [record["name"] for record in trace.read(path, rank=1)] == ["early", "late"]


@pytest.mark.parametrize("line", ["{", "[]", '{"kind":"what"}'])
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, capsys, line):
    path = tmp_path / "bad"
    path.write_text(f"{json.dumps({'pid': 1, 'rank': 0, 'order': 0, **SYNC})}\n{line}\n")
    assert trace.main([str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"{path}:2: not a ")


def test_no_file(tmp_path, capsys):
    assert trace.main([str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_an_empty_trace_has_totals_of_zero(tmp_path):
    assert trace.summary(trace.read(write(tmp_path / "empty")))["launches"] == 0
    assert "launches" in trace.show([])
