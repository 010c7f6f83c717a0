#!/bin/bash
# Process 1 of the test cluster, in new mount, network and pid namespaces: one node, the control plane, Argo, a store.
# Everything it starts dies with it. From cluster.py: STATE, CGROUP, HARNESS, CRDS, IMAGES, REPOSITORY, PACKAGES, PATH, and
# file descriptor 4, to which it writes "ready" once.
set -u
host=10.244.0.1 pki=$STATE/pki run=/run/colchis
export KUBECONFIG=$pki/admin.conf
deadline=$((SECONDS + 180))

mount --make-rshared /
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/netns $run/{cni,names,pids,held} $STATE/{logs,kubelet,podlogs,containerd,store}
mkdir -p $run/environment/{code/colchis,packages} # overlays/test/environment.yaml has this path
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1

# A part that ends stays ended, except while a file of its name lies in $run/held: it starts again when that is removed.
# So tests/cluster/faults.py takes it away for a while.
start() { # NAME COMMAND...
  local name=$1
  shift
  (
    while :; do
      "$@" >> "$STATE/logs/$name.log" 2>&1 < /dev/null &
      echo $! > "$run/pids/$name"
      wait $!
      [ -e "$run/held/$name" ] || break
      : > "$run/pids/$name" # its end was seen: whoever holds it may let go
      while [ -e "$run/held/$name" ]; do sleep 0.1; done
    done
  ) 4>&- &
}
until_true() { # WHAT COMMAND...: asked again until it succeeds; these services have no readiness event to wait for
  local what=$1
  shift
  until "$@" > /dev/null 2>&1; do
    if ((SECONDS > deadline)); then
      echo "$what is not ready after 180 s" >&2
      exit 1
    fi
    sleep 0.1
  done
}

# What pods see at /opt/colchis: the checkout and the packages of its virtual environment, live, without a 6 GB image.
for part in components workflows; do
  mkdir -p "$run/environment/code/colchis/$part"
  mount --bind "$REPOSITORY/$part" "$run/environment/code/colchis/$part"
done
cp "$REPOSITORY/src/colchis/__init__.py" "$run/environment/code/colchis/"
mount --bind "$PACKAGES" "$run/environment/packages"

# The pods' network.
ip link add pods type bridge
ip addr add $host/24 dev pods
ip link set pods up
ip route add 10.96.0.0/16 dev pods src $host # there is no default route here, and Service addresses need one
cat > $run/cni/10-pods.conflist << T
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "isGateway": true,
 "hairpinMode": true, "ipam": {"type": "host-local", "dataDir": "$run/ipam", "ranges": [[{"subnet": "10.244.0.0/24"}]],
 "routes": [{"dst": "0.0.0.0/0"}]}}]}
T
start dnsmasq dnsmasq --keep-in-foreground --no-resolv --no-hosts --hostsdir=$run/names --local=/cluster.local/ \
  --listen-address=$host --bind-interfaces --user=root --pid-file=

start etcd etcd --data-dir $run/etcd --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 \
  --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
# Its servers meet at sockets in /tmp that are named by port. They stay in a layer of their own over it, or two clusters
# would mix their stores; what is there already, perhaps the checkout, is seen through it.
mkdir -p $run/store $run/tmp/{upper,work}
mount --bind "$STATE/store" $run/store
# shellcheck disable=SC2016
start store env AWS_ACCESS_KEY_ID="$ACCESS_KEY" AWS_SECRET_ACCESS_KEY="$SECRET_KEY" unshare --mount \
  sh -c "mount -t overlay overlay -o lowerdir=/tmp,upperdir=$run/tmp/upper,workdir=$run/tmp/work /tmp && "'exec "$@"' \
  sh weed mini -dir=$run/store \
  -ip=$host -ip.bind=$host -master.telemetry=false -webdav=false -admin.ui=false -s3.port.iceberg=0 -s3.port.lance=0 \
  -s3.autoCreateBucket=false \
  -bucket=colchis

# oom scores and open files: what a root without CAP_SYS_RESOURCE may have
cat > $run/containerd.toml << T
version = 2
root = "$STATE/containerd"
state = "$run/containerd"
[grpc]
  address = "$run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$PAUSE_IMAGE"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$run/cni"
T
start containerd containerd -c $run/containerd.toml
ctr() { command ctr -a $run/containerd.sock -n k8s.io "$@"; }

start apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=$host --advertise-address=$host \
  --service-cluster-ip-range=10.96.0.0/16 --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
  --allow-privileged=true --client-ca-file="$pki/ca.crt" --tls-cert-file="$pki/server.crt" \
  --tls-private-key-file="$pki/server.key" --service-account-issuer=https://kubernetes.default.svc.cluster.local \
  --service-account-key-file="$pki/accounts.pub" --service-account-signing-key-file="$pki/accounts.key" \
  --kubelet-preferred-address-types=InternalIP --kubelet-client-certificate="$pki/server.crt" \
  --kubelet-client-key="$pki/server.key"

# Images, once for each set of them; containers of an earlier cluster have no pods any more.
until_true containerd ctr version
ctr containers ls -q | xargs -r -n 1 ctr -a $run/containerd.sock -n k8s.io containers rm
if [ "$(cat "$STATE/containerd/imported" 2> /dev/null)" != "$IMAGES" ]; then
  for archive in "$IMAGES"/*.tar; do ctr image import --no-unpack=false "$archive"; done > "$STATE/logs/import.log" 2>&1
  echo "$IMAGES" > "$STATE/containerd/imported"
fi
for name in $STAGE_NAMES; do ctr image tag --force "$STAGE_IMAGE" "$name" > /dev/null; done
if [ -n "$BUILT_STAGE" ]; then # the image of images/stage itself, for stages and agents
  ctr image import --no-unpack=false "$BUILT_STAGE" >> "$STATE/logs/import.log" 2>&1 || exit 1
  ctr image tag --force "$BUILT_STAGE_IMAGE" "docker.io/colchis/stage:$VERSION" > /dev/null || exit 1
fi

for group in cpu cpuacct cpuset memory devices freezer blkio pids systemd; do mkdir -p /sys/fs/cgroup/$group/$CGROUP; done
for file in cpus mems; do
  cat /sys/fs/cgroup/cpuset/cpuset.$file > /sys/fs/cgroup/cpuset/$CGROUP/cpuset.$file
done
cat > $run/kubelet.yaml << T
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $host
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $pki/server.crt
tlsPrivateKeyFile: $pki/server.key
containerRuntimeEndpoint: unix://$run/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /$CGROUP
failCgroupV1: false
failSwapOn: false
featureGates: {KubeletInUserNamespace: true}
maxOpenFiles: 16384
clusterDomain: cluster.local
clusterDNS: [$host]
podLogsDir: $STATE/podlogs
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
T
cat > $run/proxy.yaml << T
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
bindAddress: 127.0.0.1
mode: iptables
clusterCIDR: 10.244.0.0/16
clientConnection: {kubeconfig: $pki/proxy.conf}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
T

# Not before the API is ready: the controller manager ends when the bootstrap of RBAC is not done.
until_true "the API server" kubectl get --raw /readyz
as() {
  echo "--kubeconfig=$pki/$1.conf --authentication-kubeconfig=$pki/$1.conf --authorization-kubeconfig=$pki/$1.conf" \
    "--bind-address=127.0.0.1 --leader-elect=false"
}
# shellcheck disable=SC2046
start controller-manager kube-controller-manager $(as controller-manager) --use-service-account-credentials=true \
  --service-account-private-key-file="$pki/accounts.key" --root-ca-file="$pki/ca.crt"
# shellcheck disable=SC2046
start scheduler kube-scheduler $(as scheduler)
rm -rf "$STATE/kubelet/pods"
start kubelet kubelet --config=$run/kubelet.yaml --kubeconfig="$pki/node.conf" --hostname-override=node --node-ip=$host \
  --root-dir="$STATE/kubelet" --cert-dir=$run/kubelet-pki
start proxy kube-proxy --config=$run/proxy.yaml --hostname-override=node

for crd in "$CRDS"/*.json; do
  kubectl create --raw /apis/apiextensions.k8s.io/v1/customresourcedefinitions -f "$crd" || exit 1
done > "$STATE/logs/crds.log"
kubectl wait --for=condition=Established --timeout=90s crd --all > /dev/null || exit 1

# The same manifests as everywhere, with this store's keys. First the volume that stands in for images: no pod may start
# before the API server mounts it.
cp -r "$REPOSITORY/manifests" $run/manifests
cp "$STATE/store.env" $run/manifests/overlays/test/
start names python -P "$HARNESS/names.py" "$KUBECONFIG" $run/names/services
apply() { kubectl apply --server-side "$@" >> "$STATE/logs/install.log" 2>&1 || exit 1; }
apply -k $run/manifests/cluster-scoped
apply -n colchis -f $run/manifests/overlays/test/environment.yaml
until_true "the default service account" kubectl -n colchis get serviceaccount default
is_mounted() {
  kubectl -n colchis create --dry-run=server -o json -f "$HARNESS/probe.yaml" | grep -q colchis-environment
}
until_true "the policy that mounts the environment" is_mounted
apply -k $run/manifests/overlays/test

start argo env KUBECONFIG="$pki/argo-controller.conf" LEADER_ELECTION_DISABLE=true DEFAULT_REQUEUE_TIME=200ms \
  workflow-controller --kubeconfig "$pki/argo-controller.conf" --namespaced -n colchis --qps 100 --burst 200 \
  --executor-image "$ARGOEXEC_IMAGE" --executor-image-pull-policy IfNotPresent --loglevel warn
until_true "the node" kubectl get node node
kubectl wait --for=condition=Ready --timeout=90s node/node > /dev/null || exit 1
echo ready >&4
exec 4>&-
while :; do
  sleep infinity &
  wait $!
done
