"""Starts and ends the test cluster, and runs commands inside it.

Everything lives in one private mount, network and pid namespace under one process (keeper.sh, inner.sh): ending that
process ends all of it. What stays is in the cache folder: the built parts, containerd's images and the last run's logs.
Clusters of different COLCHIS_CLUSTER_NAME run side by side.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.harness import build

NAME = os.environ.get("COLCHIS_CLUSTER_NAME") or "test"
STATE = build.CACHE / "clusters" / NAME
CGROUP = f"colchis-{NAME}"
REPOSITORY = build.HERE.parents[2]
HOST = "10.244.0.1"
STAGE_NAMES = ("stage", "trainer", "engine-embedded")
"""The images that the manifests name; here all are one."""
START_S = 300.0


class CannotStart(RuntimeError):
    """The cluster did not come up; the message carries the end of its log."""


def is_up() -> bool:
    """Whether the cluster of this name is running."""
    return _process_one() is not None


def up(*, lifeline: int | None = None) -> bool:
    """Builds what is missing and starts the cluster; returns when it is ready. False: it was up already.

    lifeline: read end of a pipe; the cluster ends when its write end closes. Without it, it lives until `down`.
    """
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_up():
            checkout = (STATE / "checkout").read_text()
            if checkout != str(REPOSITORY):
                raise CannotStart(
                    f"the cluster '{NAME}' that is up runs the code of {checkout}, not of {REPOSITORY}; "
                    "end it there (`make cluster-down`), or set COLCHIS_CLUSTER_NAME to another name"
                )
            return False
        _start(lifeline)
        return True


def obstacle() -> str | None:
    """Why this machine cannot have the cluster, or None."""
    if os.geteuid() != 0:
        return "the harness must run as root: it makes namespaces, mounts and network devices"
    if not Path("/sys/fs/cgroup/cpu").is_dir():
        return "this machine has no cgroup v1 hierarchy, which the harness is written for"
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "true"]
    made = subprocess.run(namespaces, capture_output=True, text=True, check=False)
    return None if made.returncode == 0 else f"namespaces cannot be made here ({made.stderr.strip()})"


def _start(lifeline: int | None) -> None:
    if (lacking := obstacle()) is not None:
        raise CannotStart(f"{lacking}; use a cluster of your own: COLCHIS_KUBECONFIG=... make test-cluster")
    environment = {**os.environ, **_inner_environment()}
    for folder in ("store", "logs", "podlogs", "kubelet", "pki"):
        shutil.rmtree(STATE / folder, ignore_errors=True)
    (STATE / "pki").mkdir(parents=True)
    (STATE / "checkout").write_text(str(REPOSITORY))
    _make_certificates(STATE / "pki")
    secret = {
        "endpoint": f"http://{HOST}:8333",
        "bucket": "colchis",
        "region": "us-east-1",
        "accessKey": environment["ACCESS_KEY"],
        "secretKey": environment["SECRET_KEY"],
        "agentToken": secrets.token_hex(16),
    }
    _write_private(STATE / "store.env", "".join(f"{k}={v}\n" for k, v in secret.items()))

    ready, ready_write = os.pipe()
    command = ["bash", "-c", f'exec 4>&{ready_write} 3<&{lifeline or "-"}; exec bash "$HARNESS/keeper.sh"']
    started = time.monotonic()
    with (STATE / "up.log").open("wb") as log:
        keeper = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[ready_write, *([lifeline] if lifeline else [])],
            start_new_session=True,
        )
    os.close(ready_write)
    readable, _, _ = select.select([ready], [], [], START_S)
    word = os.read(ready, 16) if readable else b""
    os.close(ready)
    if word != b"ready\n":
        down()
        keeper.wait()
        raise CannotStart(
            f"the cluster was not ready {time.monotonic() - started:.0f} s after its start; "
            f"logs: {STATE}/logs\n{(STATE / 'up.log').read_text()[-3000:]}"
        )


def down() -> None:
    """Ends the cluster and waits until its last process is gone."""
    pid = _unshare_pid()
    if pid is None:
        return
    keeper = os.pidfd_open(_parent(pid))
    try:
        os.kill(pid, signal.SIGKILL)
        if not select.select([keeper], [], [], 30.0)[0]:
            raise CannotStart(f"the cluster's keeper still runs 30 s after SIGKILL of process {pid}")
    finally:
        os.close(keeper)


def run(command: Sequence[str]) -> int:
    """Runs `command` inside the cluster, on this terminal; starts a cluster for it when none is up, and ends that one.

    The exit code is the command's. A cluster started here also ends when this process is killed. With COLCHIS_KUBECONFIG
    it runs on this machine, against the cluster which that names.
    """
    if own := os.environ.get("COLCHIS_KUBECONFIG"):
        environment = {**os.environ, "KUBECONFIG": own, "COLCHIS_TEST_CLUSTER": "yes"}
        return subprocess.run(command, env=environment).returncode
    with _cluster_for_a_command():
        return subprocess.run(inside(command), env=_command_environment()).returncode


def inside(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in the namespaces of the cluster that is up."""
    pid = _process_one()
    if pid is None:
        raise CannotStart("no cluster is up: python -m tests.cluster.harness up")
    return ["nsenter", "-t", str(pid), "-m", "-n", "-p", f"--wdns={os.getcwd()}", *command]


@contextmanager
def _cluster_for_a_command() -> Iterator[None]:
    lifeline, held = os.pipe()
    started = False
    try:
        started = up(lifeline=lifeline)
        yield
    finally:
        if started:
            down()
        os.close(lifeline)
        os.close(held)


def _inner_environment() -> Mapping[str, str]:
    """Builds the parts; what keeper.sh and inner.sh read."""
    build.machine_packages()
    packages = REPOSITORY / ".venv/lib/python3.11/site-packages"
    if not packages.is_dir():
        raise CannotStart(f"{packages} does not exist: the pods run Debian's python3.11 with the packages of .venv")
    return {
        "STATE": str(STATE),
        "CGROUP": CGROUP,
        "HARNESS": str(build.HERE),
        "REPOSITORY": str(REPOSITORY),
        "PACKAGES": str(packages),
        "CRDS": str(build.crds()),
        "IMAGES": str(build.images()),
        "PAUSE_IMAGE": build.PAUSE_IMAGE,
        "ARGOEXEC_IMAGE": build.ARGOEXEC_IMAGE,
        "STAGE_IMAGE": build.STAGE_IMAGE,
        "BUILT_STAGE_IMAGE": build.BUILT_STAGE_IMAGE,
        "BUILT_STAGE": str(build.stage_archive() / "stage.tar") if os.environ.get("COLCHIS_BUILT_STAGE") else "",
        "VERSION": _version(),
        "STAGE_NAMES": " ".join(f"docker.io/colchis/{name}:{_version()}" for name in STAGE_NAMES),
        "ACCESS_KEY": secrets.token_hex(10),
        "SECRET_KEY": secrets.token_hex(20),
        "PATH": _path(),
    }


def _command_environment() -> dict[str, str]:
    """What a command in the cluster gets: kubectl and argo on PATH, a kubeconfig, and the store's address and keys."""
    secret = dict(line.split("=", 1) for line in (STATE / "store.env").read_text().splitlines())
    return {
        **os.environ,
        "PATH": _path(),
        "KUBECONFIG": str(STATE / "pki/admin.conf"),
        "COLCHIS_TEST_CLUSTER": "harness",
        "COLCHIS_S3_ENDPOINT": secret["endpoint"],
        "COLCHIS_S3_BUCKET": secret["bucket"],
        "COLCHIS_S3_REGION": secret["region"],
        "AWS_ACCESS_KEY_ID": secret["accessKey"],
        "AWS_SECRET_ACCESS_KEY": secret["secretKey"],
        "COLCHIS_AGENT_TOKEN": secret["agentToken"],
    }


def _path() -> str:
    parts = [build.kube(), build.argo(), build.flux(), build.etcd(), build.kubectl(), REPOSITORY / ".venv/bin"]
    return ":".join([*map(str, parts), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"])


def _version() -> str:
    text = (REPOSITORY / "src/colchis/__init__.py").read_text()
    found = re.search(r'__version__ = "(.+?)"', text)
    if not found:
        raise CannotStart(f"no __version__ in {REPOSITORY}/src/colchis/__init__.py, which names the image tags")
    return found[1]


def _unshare_pid() -> int | None:
    """The process whose end ends the cluster, or None."""
    try:
        pid = int((STATE / "unshare.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ValueError):
        return None
    return pid if command[0] == b"unshare" else None


def _process_one() -> int | None:
    pid = _unshare_pid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if pid else []
    return int(children[0]) if children else None


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)


def _make_certificates(folder: Path) -> None:
    """A certificate authority, one server certificate for all, and a kubeconfig for each client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

    def certificate(name: str, subject: str, names: str = "") -> None:
        extensions = folder / f"{name}.ext"
        extensions.write_text(
            "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"
            + (f"subjectAltName={names}\n" if names else "")
        )
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", *authority, "-days", "30", "-out", f"{name}.crt"),
            *("-extfile", extensions.name),
        )

    usage = "keyUsage=critical,keyCertSign,cRLSign"
    authority = ("-days", "30", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=colchis-test", "-addext", usage)
    openssl("req", "-x509", *key, *authority)
    openssl("genrsa", "-out", "accounts.key", "2048")
    openssl("rsa", "-in", "accounts.key", "-pubout", "-out", "accounts.pub")
    hosts = f"IP:127.0.0.1,IP:10.96.0.1,IP:{HOST},DNS:localhost,DNS:node,DNS:kubernetes.default.svc"
    certificate("server", "/O=system:masters/CN=kube-apiserver", hosts)
    clients = {
        "admin": "/O=system:masters/CN=admin",
        "controller-manager": "/CN=system:kube-controller-manager",
        "scheduler": "/CN=system:kube-scheduler",
        "proxy": "/CN=system:kube-proxy",
        "node": "/O=system:nodes/CN=system:node:node",
        "argo-controller": "/CN=argo-controller",
    }
    for name, subject in clients.items():
        certificate(name, subject)
        _write_private(
            folder / f"{name}.conf",
            f"""\
apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: "https://{HOST}:6443", certificate-authority: {folder}/ca.crt}}}}]
users: [{{name: {name}, user: {{client-certificate: {folder}/{name}.crt, client-key: {folder}/{name}.key}}}}]
contexts: [{{name: test, context: {{cluster: test, user: {name}, namespace: colchis}}}}]
current-context: test
""",
        )
