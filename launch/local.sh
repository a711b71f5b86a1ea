#!/usr/bin/env bash
# Train with N processes on this machine: what runs here runs on N hosts. With GPUs, N is their number.
#
#   launch/local.sh N CONFIG.yaml [key=value ...] [--run-dir DIR]   sppo train, as N processes
#   launch/local.sh N -- COMMAND ...                                any command that reads SPPO_* (launch/README.md)
#
#   launch/local.sh 2 configs/quickstart.yaml --run-dir runs/two    two processes share the simulated devices
#
# Needs    bash 4 and sppo on the path (SPPO=... names another).
# Hosts    on each of several hosts: HOSTS=their number, HOST_ID=number of this one, from 0, and SPPO_COORDINATOR.
# Shares   GPUs evenly, in order, and cores, by XLA's number of threads. PORT=... sets the port where the processes meet.
# Prints   every line after the number of its process, "[0] ..."; with DRY_RUN=1 only the commands.
# Failure  when a process fails, this script ends the others and exits with the exit code of the first that failed.
# Stop     Ctrl-C, SIGTERM or a connection that drops goes to all processes, which save; this script waits for them. A
#          second signal ends them at once. The same command (with the same --run-dir) resumes, with any N. The exit code is
#          0 if all processes have saved, and 130 if there was nothing to save yet.
# Output   lines without a reader, or on a full disk, are dropped, and the processes continue.
set -u
signals=(TERM INT HUP USR1 USR2 XCPU)
trap 'echo "local.sh: stopped" >&2; exit 130' "${signals[@]}"
trap : PIPE # not ignored: the processes would inherit an ignored signal

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
fail() { echo "$1" >&2; exit 2; }
[[ ${1:-} =~ ^[1-9][0-9]*$ && $# -ge 2 ]] || usage
num=$1
shift
if [[ $1 == -- ]]; then
  shift
  (($# > 0)) || usage
  command=("$@")
else
  [[ -f $1 ]] || fail "a config must be a readable file, got $1: give the path of a config after the number of processes"
  command=("${SPPO:-sppo}" train "$@")
fi
type -P "${command[0]}" >/dev/null || fail "${command[0]} must be on the path, got none: install sppo_jax, or set SPPO"

free_port() {
  local port
  for _ in {1..100}; do
    port=$((20000 + RANDOM % 12000)) # below those that the system gives to outgoing connections
    (: </dev/tcp/127.0.0.1/$port) 2>/dev/null || { echo $port; return; }
  done
  fail "a port from 20000 to 32000 must be free, got none: set PORT to a free port"
}
hosts=${HOSTS:-1} host=${HOST_ID:-0}
[[ $hosts =~ ^[1-9][0-9]*$ && $host =~ ^[0-9]+$ ]] && ((host < hosts)) ||
  fail "HOST_ID must be from 0 to HOSTS - 1, got HOST_ID=$host and HOSTS=$hosts: number the hosts from 0"
if ((hosts > 1)); then
  [[ ${SPPO_COORDINATOR:-} ]] || fail "several hosts must meet at SPPO_COORDINATOR, got none: set HOST:PORT of host 0"
  coordinator=$SPPO_COORDINATOR
else
  port=${PORT:-$(free_port)} || exit 2
  coordinator=127.0.0.1:$port
fi

share() { # process $2's part of the comma-separated list $1
  local IFS=, items per
  read -r -a items <<<"$1"
  per=$((${#items[@]} / num))
  echo "${items[*]:$(($2 * per)):$per}"
}
gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -)}

cores=$(nproc 2>/dev/null || echo 1)

prepare() { # sets `words`, the whole command line of process $1
  words=(env "SPPO_COORDINATOR=$coordinator" "SPPO_NUM_PROCESSES=$((hosts * num))")
  words+=("SPPO_PROCESS_ID=$((host * num + $1))" PYTHONUNBUFFERED=1)
  local own threads=$((cores / num))
  own=$(share "$gpus" "$1") && [[ $own ]] && words+=("CUDA_VISIBLE_DEVICES=$own")
  words+=("NPROC=$((threads > 0 ? threads : 1))") # threads of XLA; pinning to cores made steps slower
  # In a session of its own a process gets a terminal's Ctrl-C only from this script; a SIGTERM if this script is killed.
  type -P setsid >/dev/null && words+=(setsid)
  type -P setpriv >/dev/null && words+=(setpriv --pdeathsig TERM)
  words+=("${command[@]}")
}

if [[ ${DRY_RUN:-} ]]; then
  for ((k = 0; k < num; k++)); do
    prepare $k
    printf '%q ' "${words[@]}"
    echo
  done
  exit 0
fi

pids=() readers=() stops=0 told_us=0 warned=0
signal_all() {
  local pid
  for pid in "${pids[@]}"; do
    [[ $1 == KILL ]] && kill -KILL -- "-$pid" 2>/dev/null # with its children
    kill -s "$1" "$pid" 2>/dev/null
  done
}
stop() { # on the signal $1; two signals within 0.2 s count as one; only TERM and INT count twice, and not a warning before them
  local now_us=${EPOCHREALTIME:-$SECONDS.000000}
  now_us=${now_us/[.,]/}
  ((stops > 0)) && [[ $1 != TERM && $1 != INT || $((now_us - told_us)) -lt 200000 ]] && return
  if ((warned)); then # a batch system warns of a job's end, and ends the job with TERM
    warned=0 told_us=$now_us
    return
  fi
  [[ $1 == USR[12] || $1 == XCPU ]] && warned=1
  stops=$((stops + 1)) told_us=$now_us
  if ((stops == 1)); then
    echo "local.sh: told all processes to save and end; a second signal ends them at once" >&2
    signal_all TERM
  else
    signal_all KILL
  fi
}
for signal in "${signals[@]}"; do
  trap "stop $signal" $signal
done

# Gloo prints greetings on standard output, from several threads at once: drop these lines, mixed with each other or not.
gloo='^(\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : |[0-9]+)*$'
owed=0 # line ends that are still to come, of greetings that have begun
greeting() { # whether all of $1 is gloo's
  local rest=${1//"[Gloo] Rank "/}
  owed=$((owed + (${#1} - ${#rest}) / 12))
  ((owed > 0)) && [[ $1 =~ $gloo ]] && owed=$((owed - 1))
}

pipes=$(mktemp -d) || exit 2
trap 'rm -rf "$pipes"' EXIT
for ((k = 0; k < num; k++)); do
  mkfifo "$pipes/$k" || exit 2
  {
    trap '' "${signals[@]}" # so that the last lines are printed
    trap : PIPE             # without a reader of ours, read on, or the process would wait
    while IFS= read -r line || [[ $line ]]; do
      greeting "$line" || printf '[%d] %s\n' $((host * num + k)) "$line"
    done 2>/dev/null
  } <"$pipes/$k" &
  readers+=($!)
  prepare $k
  "${words[@]}" >"$pipes/$k" 2>&1 &
  pids+=($!)
done

code=0 deadline='' left=("${!pids[@]}")
while ((${#left[@]} > 0)); do
  sleep 0.2
  for k in "${left[@]}"; do
    kill -0 "${pids[k]}" 2>/dev/null && continue
    wait "${pids[k]}"
    status=$?
    # Our SIGTERM ended a process that had not begun to take signals, so there was nothing to save.
    ((stops > 0 && status == 143)) && status=130
    unset "left[k]"
    ((status == 0 || code != 0)) && continue
    code=$status
    if ((stops == 0)); then
      echo "local.sh: process $((host * num + k)) ended with exit code $status; ending the other processes" >&2
      signal_all TERM
      deadline=$((SECONDS + 10))
    fi
  done
  [[ $deadline ]] && ((SECONDS > deadline)) && signal_all KILL
done
wait "${readers[@]}"
exit $code
