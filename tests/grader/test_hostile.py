"""Graders that hang, crash, lie or leave children: one verdict each, and the pool goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colchis.components.errors import BadConfig
from colchis.components.grader import Grader, grade
from colchis.components.records.verdicts import Reason
from tests.grader.test_faces import config, rows, said


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder in which the hostile grader is installed."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile_grader.py").write_text((Path(__file__).parent / "hostile.py").read_text())
    info = folder / "hostile_grader-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile-grader\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(
        "[colchis.graders]\nhostile = hostile_grader:Hostile\nempty = hostile_grader:Path\nabsent = hostile_grader:Nobody\n"
    )
    return folder


@pytest.fixture(autouse=True)
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))


def hostile(**fields):
    return config(**{"face": "own", "name": "hostile", "timeout_s": 3.0} | fields)


def outcomes(texts, **fields):
    verdicts = grade(hostile(**fields), [said(t, sample=i) for i, t in enumerate(texts)], rows("x"))
    return [(v.score, v.reason) for v in verdicts], verdicts


def gone(pid: int) -> bool:
    """True once the process has ended (a dead one that nobody has waited for counts)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_what_is_a_number_and_what_is_not():
    expected = {
        "int": (2.0, None),
        "bool": (1.0, None),
        "numpy": (0.5, None),
        "numpy bool": (1.0, None),
        "fraction": (0.25, None),
        "text": (None, Reason.NOT_A_NUMBER),
        "none": (None, Reason.NOT_A_NUMBER),
        "complex": (None, Reason.NOT_A_NUMBER),
        "list": (None, Reason.NOT_A_NUMBER),
        "decimal": (None, Reason.NOT_A_NUMBER),
        "nan": (None, Reason.NOT_FINITE),
        "inf": (None, Reason.NOT_FINITE),
        "numpy nan": (None, Reason.NOT_FINITE),
        "huge": (None, Reason.NOT_FINITE),
        "nan in score": (None, Reason.NOT_FINITE),
        "none in score": (None, Reason.NOT_A_NUMBER),
        "remark": (0.5, None),
    }
    found, verdicts = outcomes([f"number:{name}" for name in expected])
    assert dict(zip(expected, found, strict=True)) == expected
    assert (verdicts[-1].detail, verdicts[-1].cost) == ("two lines ?", 0.25)
    assert {(v.grader, v.grader_version) for v in verdicts} == {("own:hostile", "hostile-grader 2.5")}


def test_crashes_are_reasons_and_the_pool_goes_on():
    texts = ["fail:broken", "no_score:busy", "exit:", "vanish:", "segfault:", "nothing_like_it:", "number:int"]
    found, verdicts = outcomes(texts)
    assert [reason for _, reason in found] == [
        Reason.GRADER_ERROR,
        Reason.RATE_LIMITED,
        Reason.GRADER_ERROR,
        Reason.GRADER_ERROR,
        Reason.GRADER_ERROR,
        Reason.GRADER_ERROR,
        None,
    ]
    details = [v.detail for v in verdicts]
    assert details[:2] == ["ValueError: broken second line ?", "busy"]
    assert "exit status 3" in details[2]
    assert "exit status 9" in details[3]
    assert "signal 11" in details[4]
    assert "AttributeError" in details[5]


def test_a_native_hang_is_killed_and_the_others_are_graded():
    found, verdicts = outcomes(["number:int", "native_hang:", "number:int", "sleep:60", "number:bool"], timeout_s=3.0)
    timeout = (None, Reason.TIMEOUT)
    assert found == [(2.0, None), timeout, (2.0, None), timeout, (1.0, None)]
    assert verdicts[1].detail == "no verdict within 3 s"
    assert 3.0 <= verdicts[1].seconds < 20


def test_catastrophic_backtracking_is_a_timeout():
    rule = config(face="rule", pattern=r"^(a+)+$", timeout_s=3.0)
    verdicts = grade(rule, [said("a" * 60 + "b"), said("aa", sample=1)], rows("aa"))
    assert [(v.score, v.reason) for v in verdicts] == [(None, Reason.TIMEOUT), (1.0, None)]


def test_what_a_grader_started_is_killed_with_it(tmp_path):
    found, _ = outcomes([f"children:{tmp_path / 'pids'}", "number:int"], timeout_s=3.0)
    assert found == [(None, Reason.TIMEOUT), (2.0, None)]
    for pid in (tmp_path / "pids").read_text().split():
        assert gone(int(pid)), f"process {pid} of the grader lives on"


def test_a_death_is_noticed_although_a_child_holds_the_connection(tmp_path):
    """Waiting for the end of the connection alone would wait for the time limit and call it a time-out."""
    found, verdicts = outcomes([f"die_with_children:{tmp_path / 'pid'}"], timeout_s=20.0)
    assert found == [(None, Reason.GRADER_ERROR)]
    assert verdicts[0].seconds < 15
    assert gone(int((tmp_path / "pid").read_text()))


def test_printed_verdicts_are_no_verdicts(site):
    """Neither for us nor for whoever reads the stage's standard output."""
    code = (
        "from tests.grader.test_faces import config, rows, said\n"
        "from colchis.components.grader import grade\n"
        "(v,) = grade(config(face='own', name='hostile', timeout_s=30.0), [said('print_score:')], rows('x'))\n"
        "assert v.score == 0.0, v\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=_environment(site), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert '"score": 1.0' in done.stderr


def test_a_long_temporary_folder_does_not_matter(site, tmp_path):
    """A stage's scratch folder may lie deep; the fork server's socket cannot."""
    folder = tmp_path / ("deep" * 20)
    folder.mkdir()
    code = (
        "from tests.grader.test_faces import config, rows, said\n"
        "from colchis.components.grader import grade\n"
        "(v,) = grade(config(face='own', name='hostile', timeout_s=30.0), [said('number:int')], rows('x'))\n"
        "assert v.score == 2.0, v\n"
    )
    environment = _environment(site) | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _environment(site: Path) -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(root), str(root / "src")])}


def test_graders_that_use_threads_and_alarms_work():
    assert outcomes(["thread:", "alarm:"])[0] == [(0.75, None), (0.25, None)]


def test_processes_are_kept_between_lots_and_limited_in_number():
    with Grader(hostile(workers=1)) as grader:
        first = grader.grade([said("sentence:", sample=i) for i in range(3)], rows("x"))
        second = grader.grade([said("sentence:", sample=3)], rows("x"))
    assert [v.score for v in first + second] == [1.0, 2.0, 3.0, 4.0]


def test_two_workers_grade_beside_each_other():
    """While one hangs, the other grades all the rest."""
    texts = ["sleep:60", *["number:int"] * 6]
    found, _ = outcomes(texts, workers=2, timeout_s=4.0)
    assert found == [(None, Reason.TIMEOUT)] + [(2.0, None)] * 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"start": "raise"}}, r"grader 'hostile' cannot be constructed \(RuntimeError: no licence\)"),
        ({"options": {"start": "exit"}}, r"dies before it has a task \(exit status 7\)"),
        ({"options": {"unknown": 1}}, "cannot be constructed .*unknown"),
        ({"name": "absent"}, "grader 'absent' cannot be constructed .*Nobody"),
        ({"name": "empty"}, "grader 'empty' has no method grade"),
        ({"name": "nowhere"}, "no entry point 'nowhere'.*installed: absent, empty, hostile"),
    ],
)
def test_a_grader_that_cannot_be_made_is_bad_configuration(fields, message):
    """Not a reason on every trajectory: the run would go on with empty batches."""
    with pytest.raises(BadConfig, match=message):
        grade(hostile(**fields), [said("number:int")], rows("x"))


def test_no_process_survives_a_stage_that_is_killed(site, tmp_path):
    code = (
        "from tests.grader.test_faces import config, rows, said\n"
        "from colchis.components.grader import grade\n"
        "if __name__ == '__main__':\n"
        f"    grade(config(face='own', name='hostile', timeout_s=60.0), [said('children:{tmp_path / 'pids'}')], rows('x'))\n"
    )
    (tmp_path / "stage.py").write_text(code)
    stage = subprocess.Popen([sys.executable, str(tmp_path / "stage.py")], env=_environment(site))
    deadline = time.monotonic() + 60
    pids: list[str] = []
    while len(pids) < 3:
        assert time.monotonic() < deadline, "the grader did not start"
        assert stage.poll() is None
        time.sleep(0.05)
        if (tmp_path / "pids").exists():
            pids = (tmp_path / "pids").read_text().split()
    stage.kill()
    stage.wait()
    for pid in pids:
        assert gone(int(pid)), f"process {pid} of the hung grader outlives its stage"
