#!/usr/bin/env bash
# Slurm and munge from Debian's packages, for the tests of the Slurm engine. Quick where they are there; where they
# cannot be had (no root, no Debian, no network) it says so and is content: the tests then skip, with the reason.
set -u
for tool in slurmctld slurmd sbatch munged; do
    command -v "$tool" >/dev/null || PATH="$PATH:/usr/sbin" command -v "$tool" >/dev/null || missing=yes
done
[ -n "${missing:-}" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "Slurm is not installed, and only root on Debian installs it: the tests of the Slurm engine will be skipped" >&2
    exit 0
fi
# The packages would start system-wide daemons, which the tests have no use for: they run their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
install() {
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge
}
log=$(mktemp)
echo "Installing Slurm and munge for the tests" >&2
install >"$log" 2>&1 || { apt-get update -qq && install; } >>"$log" 2>&1 || {
    tail -5 "$log" >&2
    echo "Slurm could not be installed: the tests of the Slurm engine will be skipped" >&2
}
rm -f "$log"
