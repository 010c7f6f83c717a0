"""Uploads and downloads of one large object: ours (own checksums, verified, atomic) against plain boto3.

    python benchmarks/transfers.py [--mib 1024] [--rounds 3] [--json FILE]

Both talk to one SeaweedFS on loopback, started here, and take turns in one run, so that the load of the machine hits
both. Ratio = plain seconds / our seconds, of the best turns (other load only ever adds time): 1.0 is as fast as plain
boto3, more is faster. Client and server share the cores, so MB/s say little about a real network; the ratio does.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import click
from botocore.config import Config
from rich.console import Console
from rich.table import Table

from colchis.components.store import Store, StoreSettings
from colchis.workflows.local.weed import Weed

Seconds = dict[tuple[str, str], list[float]]
"""(direction, side) -> seconds of each turn."""


@click.command()
@click.option("--mib", default=1024, show_default=True, help="Size of the object in MiB.")
@click.option("--rounds", default=3, show_default=True, help="Turns that each side takes.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the numbers to this file as well.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the data goes; needs (2 x rounds + 2) x size.")
def main(mib: int, rounds: int, json_path: Path | None, folder: Path | None) -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory(dir=folder) as name, Weed(Path(name) / "weed") as weed:
        source = Path(name) / "source"
        with source.open("wb") as file:
            for _ in range(mib):
                file.write(os.urandom(1 << 20))
        result = summarise(measure(weed.settings, source, rounds), mib)
    print_table(result)
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def plain_client(settings: StoreSettings) -> Any:
    """boto3 as it comes."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        config=Config(s3={"addressing_style": "path"}),
    )


def measure(settings: StoreSettings, source: Path, rounds: int) -> Seconds:
    """Turns of both sides, in alternating order."""
    store = Store(settings)
    plain = plain_client(settings)
    target, bucket = source.with_name("target"), settings.bucket
    seconds: Seconds = {}

    def timed(direction: str, side: str, action: Callable[[], Any]) -> Any:
        os.sync()  # nobody pays for the pages that the turn before has left to be written
        started_s = time.perf_counter()
        result = action()
        seconds.setdefault((direction, side), []).append(time.perf_counter() - started_s)
        return result

    for number in range(rounds):
        key = f"benchmark/{number}"
        sides = ("ours", "plain") if number % 2 else ("plain", "ours")
        for side in sides:
            if side == "ours":
                payload = timed("upload", side, lambda key=f"{key}/ours": store.upload(key, source))
            else:
                timed("upload", side, lambda key=f"{key}/plain": plain.upload_file(str(source), bucket, key))
        for side in sides:
            if side == "ours":
                timed("download", side, lambda payload=payload: store.download(payload, target))
            else:
                timed("download", side, lambda key=f"{key}/plain": plain.download_file(bucket, key, str(target)))
            target.unlink()
        for side in sides:
            store.delete(f"{key}/{side}")
    return seconds


def summarise(seconds: Seconds, mib: int) -> dict[str, Any]:
    """Throughput of the best turns and their ratios, ready for JSON."""
    result: dict[str, Any] = {"mib": mib, "cores": os.cpu_count(), "boto3": boto3.__version__}
    for direction in ("upload", "download"):
        best = {side: min(seconds[direction, side]) for side in ("ours", "plain")}
        result[direction] = {
            "seconds": {side: [round(s, 3) for s in seconds[direction, side]] for side in best},
            "mb_per_s": {side: round(mib * 1.048576 / best[side], 1) for side in best},
            "ratio": round(best["plain"] / best["ours"], 3),
        }
    return result


def print_table(result: dict[str, Any]) -> None:
    """One row per direction."""
    table = Table(title=f"{result['mib']} MiB, {result['cores']} cores, boto3 {result['boto3']}")
    for column in ("direction", "ours MB/s", "plain MB/s", "ratio"):
        table.add_column(column, justify="left" if column == "direction" else "right")
    for direction in ("upload", "download"):
        row = result[direction]
        speeds = row["mb_per_s"]
        table.add_row(direction, f"{speeds['ours']:.1f}", f"{speeds['plain']:.1f}", f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
