"""Both launchers start, signal and end processes alike, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from colchis.components.errors import Bug
from colchis.workflows.local.launcher import CannotStart, Command, Launcher
from colchis.workflows.local.parents import TORCH, TORCH_FREE, Warm, WarmLauncher
from tests.interpreter.machine import LAUNCHERS, TOYS, alive, toy, toy_launcher, until

BOTH = pytest.mark.parametrize("kind", ["exec", "warm"])


def command(folder: Path, *argv: str) -> Command:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONPATH": str(TOYS), "PATH": os.environ["PATH"], "MARK": "here"}
    return Command(tuple(argv), environment, folder, folder / "out", folder / "err")


async def run(launcher: Launcher, folder: Path, *argv: str) -> tuple[int, str, str]:
    given = command(folder, *argv)
    process = await launcher.start(given)
    code = await asyncio.wait_for(process.wait(), 30)
    return code, given.stdout.read_text(), given.stderr.read_text()


WAYS = [
    (["return", "0"], 0),
    (["return", "75"], 75),
    (["none"], 0),
    (["exit", "3"], 3),
    (["exit-text"], 1),
    (["raise"], 1),
    (["signal", "15"], 143),
    (["signal", "9"], 137),
    (["signal", "6"], 134),
    (["unflushed"], 0),
    (["thread"], 0),
]


def test_a_forked_command_ends_like_an_executed_one(tmp_path: Path) -> None:
    """Catches a warm child whose exit code, output or threads differ from those of `python -m`."""

    async def outcomes(kind: str) -> list[tuple[int, str, bool]]:
        launcher = LAUNCHERS[kind]()
        try:
            ended = [await run(launcher, tmp_path / kind / str(i), *toy(*argv)) for i, (argv, _) in enumerate(WAYS)]
        finally:
            await launcher.close()
        return [(code, out, bool(err)) for code, out, err in ended]

    executed, forked = asyncio.run(outcomes("exec")), asyncio.run(outcomes("warm"))
    assert [code for code, _, _ in executed] == [code for _, code in WAYS]
    assert forked == executed
    assert forked[-1][1] == "from a thread\n"


@BOTH
def test_a_command_sees_only_what_it_was_given(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an environment, directory, stdin or session that leaks from the machine or the parent."""
    monkeypatch.setenv("LEAK", "must not be seen")

    async def seen() -> tuple[int, str, str]:
        launcher = LAUNCHERS[kind]()
        try:
            return await run(launcher, tmp_path / "step", *toy("show", "a b", "$X"))
        finally:
            await launcher.close()

    code, out, err = asyncio.run(seen())
    shown = json.loads(out)
    assert code == 0
    assert err == "to stderr\n"
    assert shown["rest"] == ["a b", "$X"]
    assert shown["directory"] == str(tmp_path / "step")
    assert shown["environment"]["MARK"] == "here"
    assert "LEAK" not in shown["environment"]
    assert "OMP_NUM_THREADS" not in shown["environment"]
    assert shown["leader"] is True
    assert shown["stdin"] == ""


@BOTH
def test_a_large_command_arrives_whole(kind: str, tmp_path: Path) -> None:
    """Catches a request that is cut at the size of a datagram."""

    async def length() -> str:
        launcher = LAUNCHERS[kind]()
        try:
            code, out, _ = await run(launcher, tmp_path, *toy("show", *["x" * 100_000] * 4))
        finally:
            await launcher.close()
        assert code == 0
        return out

    assert [len(word) for word in json.loads(asyncio.run(length()))["rest"]] == [100_000] * 4


@BOTH
def test_what_a_command_leaves_in_its_group_ends_with_it(kind: str, tmp_path: Path) -> None:
    """Catches a grandchild that outlives its container."""

    async def go() -> int:
        launcher = LAUNCHERS[kind]()
        try:
            code, _, _ = await run(launcher, tmp_path, *toy("descend", "group"))
            assert code == 0
            pid = int((tmp_path / "pid").read_text())
            await until(lambda: not alive(pid))
        finally:
            await launcher.close()
        return pid

    assert not alive(asyncio.run(go()))


@BOTH
def test_closing_ends_even_what_has_left_its_group(kind: str, tmp_path: Path) -> None:
    """Catches a process that a stage put into a session of its own."""

    async def go() -> tuple[int, int]:
        launcher = LAUNCHERS[kind]()
        process = await launcher.start(command(tmp_path, *toy("descend", "session-stay")))
        await until((tmp_path / "ready").exists)
        await launcher.close()
        return process.pid, int((tmp_path / "pid").read_text())

    pids = asyncio.run(go())
    assert not any(map(alive, pids))


@BOTH
def test_a_signal_reaches_the_command_which_may_answer_it(kind: str, tmp_path: Path) -> None:
    """Catches a SIGTERM that is swallowed by what forks, or a handler of it that is inherited."""

    async def go() -> list[int]:
        launcher = LAUNCHERS[kind]()
        codes = []
        try:
            for how in (["trap", "7"], ["ignore"]):
                folder = tmp_path / how[0]
                process = await launcher.start(command(folder, *toy(*how)))
                await until((folder / "ready").exists)
                process.signal(signal.SIGTERM)
                if how == ["ignore"]:
                    await asyncio.sleep(0.2)
                    process.signal(signal.SIGKILL)
                codes.append(await asyncio.wait_for(process.wait(), 30))
        finally:
            await launcher.close()
        return codes

    assert asyncio.run(go()) == [7, 137]


@BOTH
def test_a_program_that_does_not_exist_is_named(kind: str, tmp_path: Path) -> None:
    async def go() -> None:
        launcher = LAUNCHERS[kind]()
        try:
            await launcher.start(command(tmp_path, "/no/such/program"))
        finally:
            await launcher.close()

    with pytest.raises(CannotStart, match="/no/such/program"):
        asyncio.run(go())


def test_a_parent_that_dies_fails_its_commands_and_is_replaced(tmp_path: Path) -> None:
    """Catches a wait that never ends when the parent process is killed (out of memory, say), and a dead launcher."""

    async def go() -> tuple[int, int]:
        launcher = toy_launcher()
        try:
            process = await launcher.start(command(tmp_path / "a", *toy("sleep", "60")))
            parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(parent, signal.SIGKILL)
            first = await asyncio.wait_for(process.wait(), 30)
            await until(lambda: not alive(process.pid))
            second, _, _ = await run(launcher, tmp_path / "b", *toy("return", "5"))
        finally:
            await launcher.close()
        return first, second

    assert asyncio.run(go()) == (137, 5)


def test_a_spare_child_that_dies_is_replaced(tmp_path: Path) -> None:
    """Catches a command handed to a process that was killed while it waited (out of memory, say)."""

    async def go() -> list[int]:
        launcher = toy_launcher()
        codes, before = list[int](), set[int]()
        try:
            for i in range(3):
                process = await launcher.start(command(tmp_path / str(i), *toy("sleep", "60")))
                parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
                children = Path(f"/proc/{parent}/task/{parent}/children")
                known = {process.pid, *before}  # a command that has just ended may still be a child
                await until(lambda path=children, known=known: bool(set(map(int, path.read_text().split())) - known))
                (spare,) = set(map(int, children.read_text().split())) - known
                before = {*known, spare}
                os.kill(spare, signal.SIGKILL)
                process.signal(signal.SIGKILL)
                codes.append(await asyncio.wait_for(process.wait(), 30))
                await until(lambda pid=spare: not alive(pid))
                after = await launcher.start(command(tmp_path / f"after-{i}", *toy("return", "5")))
                before.add(after.pid)
                codes.append(await asyncio.wait_for(after.wait(), 30))
        finally:
            await launcher.close()
        return codes

    assert asyncio.run(go()) == [137, 5] * 3


def test_a_parent_that_cannot_import_says_so(tmp_path: Path) -> None:
    """Catches a start that waits for its deadline when the imports have failed."""

    async def go() -> None:
        launcher = WarmLauncher(default=Warm("broken", ("no_such_module",)), stages={}, module="toystage", roots=[TOYS])
        try:
            await launcher.start(command(tmp_path, *toy("return", "0")))
        finally:
            await launcher.close()

    with pytest.raises(Bug, match="broken parent process ended"):
        asyncio.run(go())


def test_each_stage_is_forked_from_its_own_imports(tmp_path: Path) -> None:
    """Catches a stage that starts with the imports of another one's parent."""

    async def go() -> list[str]:
        launcher = toy_launcher()
        try:
            plain = await run(launcher, tmp_path / "a", *toy("modules", "fractions"))
            other = await run(launcher, tmp_path / "b", *toy("modules-other", "fractions"))
            warm = launcher.warm_for(toy("modules-other")), launcher.warm_for(toy("modules"))
            executed = launcher.warm_for(["python", "-c", "print()"])
        finally:
            await launcher.close()
        assert warm[0] != warm[1]
        assert executed is None
        return [plain[1], str(other[0])]

    assert asyncio.run(go()) == ["[]\n", "0"]


def test_the_parent_of_the_stages_has_their_imports_but_neither_torch_nor_threads(tmp_path: Path) -> None:
    """Catches an import of torch in a stage that does without, and a thread that would make forking unsafe."""
    launcher = WarmLauncher(
        default=Warm("stages", (*TORCH_FREE.modules, "toystage.__main__")), stages={}, module="toystage", roots=[TOYS]
    )

    async def go() -> tuple[str, int]:
        try:
            _, out, err = await run(launcher, tmp_path, *toy("modules", "torch", "boto3", "pyarrow.parquet"))
            process = await launcher.start(command(tmp_path / "b", *toy("sleep", "60")))
            parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
            return out + err, len(os.listdir(f"/proc/{parent}/task"))
        finally:
            await launcher.close()

    out, threads = asyncio.run(go())
    assert json.loads(out) == ["boto3", "pyarrow.parquet"]
    assert threads == 1


def test_only_stages_that_train_wait_for_torch() -> None:
    launcher = WarmLauncher()
    argv = ["python", "-m", "colchis.components"]
    assert launcher.warm_for([*argv, "train", "--run", "r"]) == TORCH
    assert launcher.warm_for([*argv, "rollout", "--run", "r"]) == TORCH_FREE
    assert "torch" in TORCH.modules
    assert "torch" not in TORCH_FREE.modules
