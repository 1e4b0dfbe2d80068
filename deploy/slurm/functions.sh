# What the batch scripts beside this file share: a server in a job step of its own, and an end within bounds.
#
# They are set by whoever submits, or are as here:
#   FEED               the server's configuration, on a file system that all nodes see
#   RUN                a folder for this job on that file system, for the server's endpoint, monitor and log
#   PACKHORSE_LISTEN   where the server listens, as tcp://ib0:*; left out: loopback, or the address of its node
#   RENDEZVOUS         where torchrun's agents meet, HOST:PORT; left out: the first of their nodes
#   ENDPOINT_WAIT_S    how long the ranks wait for the server to listen
#   SAVE_S             how long the ranks may take to save after SIGTERM; less than --signal gives

FEED=${FEED:-feed.yaml}
RUN=${RUN:-run-$SLURM_JOB_ID}
ENDPOINT_WAIT_S=${ENDPOINT_WAIT_S:-300}
SAVE_S=${SAVE_S:-90}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$SAVE_S # else torchrun kills after 30 s
server=''   # the srun of the server
ranks=''    # the srun of the ranks
stopping='' # whether SIGTERM came while there were ranks

# Where to listen: on loopback where all ranks are on one node. Elsewhere the server demands keys, so the feed says
# curve: {key_file: keys/server.key, clients: keys/clients.toml}; they are made where there are none.
choose_address() { # NODES
  mkdir -p "$RUN"
  local host=127.0.0.1 keys
  if (( $1 > 1 )); then
    host=$(hostname -I | awk '{print $1}') # the first that is not loopback; PACKHORSE_LISTEN names a better one
  fi
  PACKHORSE_LISTEN=${PACKHORSE_LISTEN:-tcp://$host:*}
  if grep -q '^curve:' "$FEED"; then
    keys=$(dirname "$FEED")/keys
    [[ -e $keys/server.key ]] || packhorse keygen "$keys"
    export PACKHORSE_KEY_FILE=$keys/trainers.key # a path: the key itself is in no environment
  fi
}

# Start the server in a step of its own, with further options for srun.
start_server() { # SRUN-OPTION...
  rm -f "$RUN/endpoint" # of an earlier start of this job
  srun --nodes=1 --ntasks=1 --job-name=packhorse --output="$RUN/packhorse.log" --open-mode=append "$@" \
    packhorse serve "$FEED" --listen "$PACKHORSE_LISTEN" --endpoint-file "$RUN/endpoint" --monitor-file "$RUN/monitor" &
  server=$!
}

# Until the server listens. It writes the file in one step: it is not there, or all of it is.
await_endpoint() {
  local end=$((SECONDS + ENDPOINT_WAIT_S))
  until [[ -s $RUN/endpoint ]]; do
    if ! kill -0 "$server" 2>/dev/null; then
      echo "the server has ended before it listened:" >&2
      tail -n 5 "$RUN/packhorse.log" >&2
      return 1
    fi
    if (( SECONDS >= end )); then
      echo "no endpoint in $RUN within ENDPOINT_WAIT_S=$ENDPOINT_WAIT_S s; see $RUN/packhorse.log" >&2
      return 1
    fi
    sleep 0.2
    ls "$RUN" >/dev/null # a network file system looks again
  done
  PACKHORSE_ENDPOINT=$(<"$RUN/endpoint")
  export PACKHORSE_ENDPOINT
}

# SIGTERM for the tasks of a step. Its srun is no way to them: told to end, it has them killed at once.
tell_to_stop() { # NAME
  local step jobs=$SLURM_JOB_ID${SLURM_JOB_ID_HET_GROUP_1:+,$SLURM_JOB_ID_HET_GROUP_1}
  step=$(squeue --noheader --steps --jobs="$jobs" --format='%i %j' | awk -v name="$1" '$2 == name {print $1}')
  [[ -z $step ]] || scancel --signal=TERM "$step"
}

# Whether a process in the background ends within so many seconds.
ends_within() { # SECONDS PID
  local end=$((SECONDS + $1))
  while kill -0 "$2" 2>/dev/null; do
    (( SECONDS < end )) || return 1
    sleep 0.2
  done
}

# The server leaves when its readers have. Where they did not, it is told to, and killed if that does not help.
end_server() { # SECONDS
  ends_within "$1" "$server" && return
  echo "the server is told to stop; see $RUN/packhorse.log" >&2
  tell_to_stop packhorse
  ends_within 20 "$server" || kill -KILL "$server"
}

# The time limit is near: the ranks stop behind their step and save. Where there are none yet, there is nothing to save.
on_term() {
  echo 'SIGTERM: the job is told to stop' >&2
  if [[ -z $ranks ]]; then
    [[ -z $server ]] || end_server 0
    exit 0
  fi
  stopping=yes
  tell_to_stop ranks
}

# Wait for the ranks, and then for the server. Exits as the ranks did; told to stop, with 0 where they ended in time.
finish() {
  local code=0
  wait "$ranks" || code=$?
  if [[ -n $stopping ]]; then # the signal ended that wait, and torchrun fails whenever it was told to stop
    code=0
    ends_within "$SAVE_S" "$ranks" || code=1
  fi
  end_server 20
  exit "$code"
}
