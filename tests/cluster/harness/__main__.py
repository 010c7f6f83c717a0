"""python -m tests.cluster.harness check | build | up | down | run COMMAND..."""

from __future__ import annotations

import sys

from tests.cluster.harness import build, cluster


def main(arguments: list[str]) -> int:
    match arguments:
        case ["check"]:
            if (lacking := cluster.obstacle()) is not None:
                raise cluster.CannotStart(lacking)
        case ["build"]:
            build.everything()
        case ["up"]:
            cluster.up()
            print(f"up; logs: {cluster.STATE}/logs; try: python -m tests.cluster.harness run kubectl get pods")
        case ["down"]:
            cluster.down()
        case ["run", *command] if command:
            return cluster.run(command)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (build.CannotBuild, cluster.CannotStart) as error:
        sys.exit(f"error: {error}")
