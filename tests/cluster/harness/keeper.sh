#!/bin/bash
# Starts the cluster in namespaces of its own, waits for its end, however it comes, and removes the only thing that
# outlives the namespaces: empty cgroups. File descriptor 3, when given, is a lifeline: the cluster ends when it closes.
set -u
trap '' HUP INT
setpriv --pdeathsig KILL unshare --mount --net --pid --fork --kill-child --mount-proc --propagation private \
  bash "$HARNESS/inner.sh" 3>&- &
cluster=$!
echo "$cluster" > "$STATE/unshare.pid"
exec 4>&-
if { true <&3; } 2> /dev/null; then
  { read -r -u 3; kill -KILL "$cluster"; } &
  reader=$!
  exec 3>&-
fi
wait "$cluster"
if [ -n "${reader-}" ]; then kill "$reader" 2> /dev/null; fi
rm -f "$STATE/unshare.pid"
find /sys/fs/cgroup/*/"$CGROUP" -depth -type d -exec rmdir {} \; 2> /dev/null
exit 0
