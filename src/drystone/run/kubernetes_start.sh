# Starts the ranks of one pod, one process each. A rank that fails asks the others to leave, for they
# wait for it; so does the end of the pod. POSIX shell: images need not have another one.
# A process that was just started still has the traps of this shell for a moment, and a signal then
# is lost on it: so no trap is set before all are started. A signal that comes just before `wait` is
# heard by some shells only when it is over: so who waits looks once a second, and hears signals in
# between.
set -eu
index="${JOB_COMPLETION_INDEX:-0}"
ranks="$(echo "$DRYSTONE_RANKS" | cut -d ';' -f $((index + 1)))"
export LOCAL_WORLD_SIZE="$(echo $ranks | wc -w | tr -d ' ')"
export GROUP_RANK=$((DRYSTONE_FIRST_GROUP + index))
pids="" local_rank=0
for rank in $ranks; do
  RANK="$rank" LOCAL_RANK="$local_rank" "$@" &
  pids="$pids $!"
  local_rank=$((local_rank + 1))
done
leave() { for pid in $pids; do kill -TERM "$pid" 2>/dev/null || true; done; }
trap leave TERM INT
status=0
while [ -n "$pids" ]; do
  running="" code=0
  for pid in $pids; do
    if kill -0 "$pid" 2>/dev/null; then
      running="$running $pid"
    else
      wait "$pid" || code=$?
    fi
  done
  pids="$running"
  if [ "$status" -eq 0 ] && [ "$code" -ne 0 ]; then
    status="$code"
    leave
  fi
  if [ -n "$pids" ]; then sleep 1; fi
done
exit "$status"
