#!/bin/sh
# Prints the content of Secret colchis-store with fresh keys, for a store that an overlay brings itself:
#   sh manifests/overlays/store-env.sh http://seaweedfs:8333 > manifests/overlays/dev/store.env
# The file is read by the overlay's secretGenerator, and git ignores it.
set -eu
umask 077
key() { od -An -N "$1" -tx1 /dev/urandom | tr -d ' \n'; }
cat << T
endpoint=${1:?address of the store, such as http://seaweedfs:8333}
bucket=colchis
region=us-east-1
accessKey=$(key 10)
secretKey=$(key 20)
agentToken=$(key 16)
engineKey=$(key 16)
engineAdminKey=$(key 16)
T
