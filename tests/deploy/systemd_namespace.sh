#!/usr/bin/env bash
# A systemd of its own, with namespaces of its own for all that it could change; it runs packhorse.service as a
# machine would. For tests, as root:
#
#   systemd_namespace.sh FOLDER PYTHON-PREFIX SITE-PACKAGES CLIENT SERVICE
#
# FOLDER holds units/, etc/ (becomes /etc/packhorse) and data/ (becomes /srv/data); its host's process id appears in
# FOLDER/pid. Killing that process ends everything.
set -euo pipefail
folder=$1

if [[ ${INSIDE:-} != yes ]]; then
  mount --make-rprivate / # a mount namespace came before
  if [[ ! -e /etc/packhorse ]]; then # something must be there to mount on, until the end
    mkdir /etc/packhorse
    trap 'rmdir /etc/packhorse' EXIT
  fi
  mkdir "$folder/cgroup"
  mount -t cgroup2 cgroup2 "$folder/cgroup"
  group=$folder/cgroup/packhorse-test-$$
  mkdir "$group"
  (
    echo "$BASHPID" >"$group/cgroup.procs"
    INSIDE=yes exec unshare --pid --fork --kill-child --mount --uts --ipc --net --cgroup bash "$0" "$@"
  ) || true
  find "$group" -depth -type d -exec rmdir {} + # empty by now
  exit 0
fi

read -r pid _ </proc/self/stat # /proc is still the host's
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /opt
mount -t tmpfs tmpfs /srv
mkdir -p /srv/data /run/units /opt/packhorse/{bin,python,site,client,service}
mount --bind "$folder/etc" /etc/packhorse
mount --bind "$folder/data" /srv/data
mount --bind "$folder/units" /run/units
mount --bind "$2" /opt/packhorse/python
mount --bind "$3" /opt/packhorse/site
mount --bind "$4" /opt/packhorse/client
mount --bind "$5" /opt/packhorse/service
cat >/opt/packhorse/bin/packhorse <<'SCRIPT'
#!/bin/sh
export LD_LIBRARY_PATH=/opt/packhorse/python/lib
export PYTHONPATH=/opt/packhorse/client:/opt/packhorse/service:/opt/packhorse/site
exec /opt/packhorse/python/bin/python3 -m packhorse_service "$@"
SCRIPT
chmod 755 /opt/packhorse/bin/packhorse
ip link set lo up
mount --make-rshared /
echo "$pid" >"$folder/pid.part"
mv "$folder/pid.part" "$folder/pid"
exec env -i PATH="$PATH" SYSTEMD_UNIT_PATH=/run/units container=test \
  /lib/systemd/systemd --system --unit=test.target --log-target=null --show-status=no
