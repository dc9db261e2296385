"""The report of a verification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from samestep.verify.differences import Difference
from samestep.verify.report import write_report
from samestep.verify.suspect import Suspect
from tests.unit.verify.test_compare import verified

BAD = "<script>alert(1)</script>"


def test_every_value_is_escaped(tmp_path: Path) -> None:
    result = verified(tmp_path, "bits", curve=(2.0, 1.0), losses=(2.0, 1.1))
    worlds = tuple(
        replace(world, label=BAD, note=BAD, record=replace(world.record, state_hash=BAD)) for world in result.worlds
    )
    differs = Difference(BAD)
    suspect = Suspect(1, None, BAD, BAD, BAD, 0, BAD, BAD)
    given = replace(result, worlds=worlds, against_difference=differs, suspect=suspect)
    write_report(given, BAD, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("alert(1)") > 8
    assert "<script>alert" not in text


def test_the_certificate_counts_tensors_and_draws_lanes_on_ranks(tmp_path: Path) -> None:
    write_report(verified(tmp_path / "same", "bits"), "mine", tmp_path / "same.html", lanes=4)
    same = (tmp_path / "same.html").read_text(encoding="utf-8")
    assert "<strong>IDENTICAL</strong>" in same
    assert "0 of 1 tensor differ after 2 steps, in 2 runs" in same
    assert same.count(">rank 1<") == 1, "of the runs on two ranks"
    write_report(verified(tmp_path / "other", "bits", weight=1.5), "mine", tmp_path / "other.html", lanes=64)
    other = (tmp_path / "other.html").read_text(encoding="utf-8")
    assert "<strong>DIFFERENT</strong>" in other
    assert "1 of 1 tensor differ after 2 steps, in 2 runs" in other
    assert "Lanes on ranks" not in other, "too many to see"
