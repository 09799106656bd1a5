#!/usr/bin/env bash
# Makes sure that the engine has the image that the Dockerfile starts from. Where a registry can be reached it is pulled;
# elsewhere it is made from the Debian packages that this machine is set up to install, which takes about 40 s.
set -euo pipefail

image=debian:bookworm-slim
suite=bookworm

if docker image inspect "$image" >/dev/null 2>&1; then
    exit 0
fi
if timeout 60 docker pull --quiet "$image" >/dev/null 2>&1; then
    exit 0
fi

echo "making $image with mmdebstrap" >&2
if ! command -v mmdebstrap >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "base-image.sh: $image is missing, cannot be pulled, and mmdebstrap is not installed to make it" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The machine's own apt sources for that suite, as apt itself resolves them; without any, mmdebstrap's default mirror.
apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
    grep -E "^deb [^ ]+ $suite(-updates|-security)? main\$" | sort -u >"$scratch/sources.list" || true
mirrors=()
if grep -qE " $suite main\$" "$scratch/sources.list"; then
    mirrors=("$scratch/sources.list")
fi

# Without manuals and translations, as the official slim image is: every megabyte is unpacked and hashed again.
mmdebstrap --quiet --variant=minbase \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$suite" "$scratch/root.tar" "${mirrors[@]}"
docker import \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --change 'CMD ["bash"]' \
    "$scratch/root.tar" "$image" >/dev/null
