"""No room where something must be written: a file system of a few kilobytes (root) is filled in the middle of a run."""

from __future__ import annotations

import pytest

from tests.disks import fill, grow, small_disk
from tests.faults import Fault
from tests.run.kept import Account, Guest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_engine_without_room_for_a_version_is_named(guest: Guest, calm: Account) -> None:
    """Fault: an engine that stands idle for want of disk, and a run that tries for ever or hides where room is wanted."""
    machine = guest.services.machines[0]
    machine.kill("agent")
    with small_disk(machine.staging, "64k"):
        machine.start()
        code, said = guest.finish()
        assert code == 78, said
        assert "boundary 3" in said
        assert machine.agent_proxy.url in said
        assert str(machine.staging) in said
        grow(machine.staging, "64m")
        code, said = guest.finish()
        assert code == 0, said
        assert Account.of(guest.services.store, guest.run) == calm
        machine.kill("agent")


@pytest.mark.parametrize("left_bytes", [200_000, 0], ids=["little room", "no room"])
def test_full_disk_is_named_and_the_run_continues(guest: Guest, calm: Account, left_bytes: int) -> None:
    """Fault: half an optimiser state that is committed, or a traceback that does not say which disk is full. There is
    room for a while, or for nothing at all."""
    folder = guest.stage_folder()
    with small_disk(folder, "16m"):
        filler = folder / "filler"
        fault = guest.services.store_proxy.add(
            Fault("PUT", "000000/batch/commit.json", "delay", before=lambda: fill(filler, left_bytes))
        )
        code, said = guest.finish()
        assert fault.struck.is_set(), said
        assert code == 78, said
        assert "No space left on device" in said
        assert str(guest.project.home) in said
        assert "Traceback" not in said
        filler.unlink()
        code, said = guest.finish()
        assert code == 0, said
    assert Account.of(guest.services.store, guest.run) == calm
