#!/bin/sh
# Builds images with docker (or what BUILDER names: podman, buildah bud): sh images/build.sh [stage trainer engine-embedded]
# BASE, when set, stands in for debian:bookworm-slim; REGISTRY goes in front of the names,
# as in REGISTRY=registry.example.com sh images/build.sh
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/colchis/__init__.py)
commit=$(git rev-parse HEAD)
test -z "$(git status --porcelain -- components src images)" || commit=$commit-dirty
test $# -gt 0 || set -- stage trainer engine-embedded
for image; do
  # shellcheck disable=SC2086
  ${BUILDER:-docker build} -f "images/$image/Dockerfile" -t "${REGISTRY:+${REGISTRY%/}/}colchis/$image:$version" \
    ${BASE:+--build-arg BASE="$BASE"} --build-arg VERSION="$version" --build-arg COMMIT="$commit" ${BUILD_OPTIONS:-} .
done
