#!/usr/bin/env bash
# Train on a slice of TPUs in a GKE cluster that xpk made, one process a host.
#
#   launch/xpk.sh CLUSTER NAME TPU_TYPE IMAGE CONFIG.yaml --run-dir /shared/runs/NAME [key=value ...]
#
#   DRY_RUN=1 launch/xpk.sh pod first v5p-64 gcr.io/p/sppo:tpu quickstart.yaml --run-dir /shared/runs/first
#
# Needs    xpk and gcloud, logged in; a cluster with that type of TPU; an image of the Dockerfile, built with EXTRA=tpu; a folder
#          that all hosts share (`xpk storage attach`) for the data and the run directory.
# Edit     nothing; DRY_RUN=1 prints the command. Extra words for xpk go into XPK_FLAGS (e.g. --project=P --zone=Z).
# Meets    by jax's own detection of the pod.
# Failure  xpk starts all hosts again, at most MAX_RESTARTS (5) times, but not after wrong input (exit code 2) or a plan that
#          does not fit (3). The run resumes from the run directory.
# Stop     `xpk workload delete` tells all hosts to save and end, and gives them 600 s for that. The same command resumes.
set -u

usage() { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
(($# >= 5)) || usage
cluster=$1 name=$2 tpu_type=$3 image=$4
shift 4
[[ " $*" =~ " --run-dir "[^-\ ] || " $*" =~ " --run-dir="[^\ ] ]] || {
  echo "a run on a slice must name its run directory, got: $*; add --run-dir DIR, a directory that all hosts share" >&2
  exit 2
}
read -r -a flags <<<"${XPK_FLAGS:-}"

# One failed host ends the others, which would wait for it; exec, so that the signal to stop reaches sppo.
command="exec env PYTHONUNBUFFERED=1 sppo train$(printf ' %q' "$@")"
words=(xpk workload create "--cluster=$cluster" "--workload=$name" "--tpu-type=$tpu_type" "--docker-image=$image")
words+=(--num-slices=1 "--max-restarts=${MAX_RESTARTS:-5}" --restart-on-exit-codes=1)
words+=(--termination-grace-period-seconds=600 "--command=$command" "${flags[@]}")
if [[ ${DRY_RUN:-} ]]; then
  printf '%q ' "${words[@]}"
  echo
  exit 0
fi
exec "${words[@]}"
