#!/usr/bin/env bash
# Builds the image from the Dockerfile without a registry, and proves what it promises.
#
#   deploy/prove_image.sh [--base BASE.tar] [--keep] [--report FILE] [-- OPTIONS OF BUILDAH BUD …]
#
# The base is a debootstrap of Debian with Python in place of the public image, built with buildah under chroot
# isolation, so that neither a container engine nor a registry is needed: root, buildah, debootstrap, python3 and a
# Debian mirror are. The service then starts from the result as an orchestrator would start it: the image's user,
# command and environment, a read-only root file system, a tmpfs at /tmp, a volume at the cache, no capability, and
# no network but loopback. It must become ready, compile a kernel, hand out its bytes, pass the image's own health
# check, and end with 0 on SIGTERM.
#
# SUITE and MIRROR choose the Debian; EXTRAS is the Dockerfile's. Behind "--" goes what this network needs, such as
# `--volume /etc/pip.conf:/etc/pip.conf:ro`. Everything is made below one directory of TMPDIR and removed at the end.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SUITE=${SUITE:-bookworm}
MIRROR=${MIRROR:-}
EXTRAS=${EXTRAS:-service,cuda12,redis}
KERNEL=/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl
base='' keep='' report=''

while (($#)); do
    case $1 in
        --base) base=$(realpath "$2"); shift 2 ;;
        --keep) keep=1; shift ;;
        --report) report=$(realpath "$2"); shift 2 ;;
        --) shift; break ;;
        *) sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
    esac
done

[[ $(id -u) == 0 ]] || { echo "prove_image.sh needs root" >&2; exit 3; }
for program in buildah python3 unshare setpriv $([[ $base ]] || echo debootstrap); do
    command -v "$program" >/dev/null || { echo "prove_image.sh needs $program" >&2; exit 3; }
done

work=$(mktemp -d "${TMPDIR:-/tmp}/mlaprep-image.XXXXXX")
buildah() { command buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"; }
cleanup() {
    local code=$?
    buildah umount --all >/dev/null 2>&1 || true
    if [[ $keep ]]; then echo "kept: $work"; else rm -rf "$work"; fi
    exit "$code"
}
trap cleanup EXIT

facts=()
fact() { facts+=("$1"); printf '%s\n' "$1"; }
timed() { # WHAT COMMAND…: runs it, its output kept for a failure
    local what=$1 began=$EPOCHREALTIME; shift
    "$@" >"$work/log" 2>&1 || { tail -n 60 "$work/log" >&2; echo "failed: $what" >&2; exit 1; }
    fact "$(printf '%s: %.1f s' "$what" "$(python3 -c "print($EPOCHREALTIME - $began)")")"
}
megabytes() { du -sm --apparent-size "$1" | cut -f1; }

if [[ ! $base ]]; then
    # What the public base has: Python by the name `python`, venv and pip to install with, and nothing to compile with.
    bootstrap() {
        debootstrap --variant=minbase --include=python3,python3-venv,python-is-python3,ca-certificates \
            "$SUITE" "$work/base" ${MIRROR:+"$MIRROR"}
        rm -rf "$work"/base/var/cache/apt/archives/*.deb "$work"/base/var/lib/apt/lists/*
        tar -C "$work/base" -cf "$work/base.tar" .
        rm -rf "$work/base"
    }
    timed "base ($SUITE)" bootstrap
    base=$work/base.tar
fi

import_base() {
    local container
    container=$(buildah from scratch)
    buildah add "$container" "$base" /
    buildah commit --rm "$container" mlaprep-base
}
timed "base imported" import_base
timed "image built (extras $EXTRAS)" buildah bud --isolation chroot --format docker --pull-never --network host \
    --build-arg BASE=localhost/mlaprep-base --build-arg EXTRAS="$EXTRAS" --tag mlaprep-proof "$@" "$ROOT"

buildah inspect --type image mlaprep-proof >"$work/image.json"
container=$(buildah from --pull-never mlaprep-proof)
rootfs=$(buildah mount "$container")
base_rootfs=$(buildah mount "$(buildah from --pull-never localhost/mlaprep-base)")
fact "image: $(megabytes "$rootfs") MB, of it the base $(megabytes "$base_rootfs") MB and mlaprep's own $(megabytes "$rootfs/opt/mlaprep") MB"
fact "largest: $(cd "$rootfs"/opt/mlaprep/lib/python3.*/site-packages && du -sm --apparent-size -- */ | sort -rn | head -n 6 | awk '{printf "%s %s MB  ", $2, $1}')"

# Tools that compile for a host, and pip, are not in the image.
for program in cc gcc g++ c++ clang ld as make nvcc ptxas; do
    for folder in bin usr/bin usr/local/bin opt/mlaprep/bin; do
        [[ ! -e $rootfs/$folder/$program ]] || { echo "the image has /$folder/$program" >&2; exit 1; }
    done
done
[[ ! -e $rootfs/opt/mlaprep/bin/pip ]] || { echo "the image has pip in /opt/mlaprep" >&2; exit 1; }
fact "no host compiler, linker, nvcc or pip beside the service"

# A copy is not needed: the root is bound read-only, as `docker run --read-only` does.
mkdir "$work/volume" && chown 10001:10001 "$work/volume" && chmod 0700 "$work/volume"
cat >"$work/inside.sh" <<'INSIDE'
set -euo pipefail
rootfs=$1 work=$2 kernel=$3 here=$4
mount --make-rprivate /
mount --bind "$rootfs" "$rootfs"
mount -t proc proc "$rootfs/proc"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$rootfs/tmp"
mount -t tmpfs -o mode=0755,size=1m tmpfs "$rootfs/dev"
for device in null zero random urandom; do
    touch "$rootfs/dev/$device" && mount --bind "/dev/$device" "$rootfs/dev/$device"
done
mount --bind "$work/volume" "$rootfs/var/cache/mlaprep"
mount -o remount,bind,ro "$rootfs"
exec python3 "$here/prove_image.py" "$rootfs" "$work/image.json" "$kernel"
INSIDE
unshare --mount --pid --net --ipc --uts --fork bash "$work/inside.sh" "$rootfs" "$work" "$KERNEL" "$ROOT/deploy" |
    tee "$work/proof"
while IFS= read -r line; do facts+=("$line"); done <"$work/proof"
[[ -s $work/proof ]]
if [[ $report ]]; then printf '%s\n' "${facts[@]}" >"$report"; fi
echo "proved"
