#!/usr/bin/env bash
# Train on all workers of a Cloud TPU pod slice, one process a worker.
#
#   launch/tpu_pod.sh NAME ZONE --install                      copy this repository to all workers and install it there
#   launch/tpu_pod.sh NAME ZONE CONFIG.yaml --run-dir /mnt/shared/runs/NAME [key=value ...]
#
#   DRY_RUN=1 launch/tpu_pod.sh my-v5p-64 us-east5-a configs/quickstart.yaml --run-dir /mnt/shared/runs/first
#
# Needs    gcloud, logged in; a running TPU VM; a directory that all workers share (Filestore, or gcsfuse at one path) for
#          the data and the run directory. Configs are read from the copy on the workers.
# Edit     nothing; DRY_RUN=1 prints the commands. Extra words for gcloud go into GCLOUD_FLAGS (e.g. --project=P).
# Meets    by jax's own detection of the pod.
# Failure  when a worker fails, the others notice (launch/README.md says how soon) and end. This script starts all workers
#          again, at most MAX_RESTARTS (5) times, but not after wrong input (exit code 2) or a plan that does not fit (3).
# Stop     on Ctrl-C or SIGTERM all workers save and end. A preempted slice loses the steps since the last checkpoint:
#          create the slice again, --install, and give the same command; the run resumes, on a slice of any size.
set -u

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
(($# >= 3)) || usage
name=$1 zone=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
read -r -a flags <<<"${GCLOUD_FLAGS:-}"

gcloud_tpu() { # on all workers at once
  local words=(gcloud compute tpus tpu-vm "$1" "${@:2}" --zone="$zone" --worker=all "${flags[@]}")
  if [[ ${DRY_RUN:-} ]]; then
    printf '%q ' "${words[@]}"
    echo
  else
    "${words[@]}"
  fi
}
on_all() { gcloud_tpu ssh "$name" --command="$1"; }

if [[ $1 == --install ]]; then
  on_all 'rm -rf ~/sppo_jax && mkdir ~/sppo_jax' &&
    gcloud_tpu scp --recurse "$here"/{pyproject.toml,README.md,LICENSE,sppo_jax,configs} "$name:sppo_jax/" &&
    on_all 'python3 -m venv ~/sppo_env && ~/sppo_env/bin/pip install --quiet ~/sppo_jax "jax[tpu]"'
  exit $?
fi
[[ " $*" =~ " --run-dir "[^-\ ] || " $*" =~ " --run-dir="[^\ ] ]] || {
  echo "a run on a pod must name its run directory, got: $*; add --run-dir DIR, a directory that all workers share" >&2
  exit 2
}

# What a worker runs: end a process of an earlier start, which would hold the TPU; then start sppo.
# shellcheck disable=SC2016  # expanded by the workers
end='if [ -f ~/.sppo.pid ]; then kill -TERM $(cat ~/.sppo.pid) 2>/dev/null; fi; true'
# shellcheck disable=SC2016
clear='if [ -f ~/.sppo.pid ]; then p=$(cat ~/.sppo.pid); kill -TERM $p 2>/dev/null; for i in $(seq 60); do kill -0 $p 2>/dev/null || break; sleep 1; done; kill -KILL $p 2>/dev/null; fi'
part="$clear; cd ~/sppo_jax && echo \$\$ > ~/.sppo.pid && exec env PYTHONUNBUFFERED=1 ~/sppo_env/bin/sppo train$(printf ' %q' "$@")"
if [[ ${DRY_RUN:-} ]]; then
  on_all "$part"
  exit 0
fi

told=''
tell() {
  told=1
  echo "tpu_pod.sh: told all workers to save and end" >&2
  on_all "$end" &
}
trap tell TERM INT

for ((restart = 0; ; restart++)); do
  on_all "$part" & # in the background, so that a terminal's Ctrl-C does not cut the connections before the save
  pid=$!
  until
    wait "$pid"
    code=$?
    ! kill -0 "$pid" 2>/dev/null
  do :; done
  case $code in 0 | 2 | 3) break ;; esac
  if [[ $told ]] || ((restart >= ${MAX_RESTARTS:-5})); then break; fi
  echo "tpu_pod.sh: ended with exit code $code; starting all workers again (restart $((restart + 1)))" >&2
  sleep 10
done
[[ ! $told ]] || wait
exit "$code"
