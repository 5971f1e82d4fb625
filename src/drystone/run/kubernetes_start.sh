# Starts the ranks of one pod, one process each. A rank that fails asks the others to leave, for they
# wait for it; so does the end of the pod. A signal ends `wait` and not the process, which is why
# waiting is repeated. POSIX shell: images need not have another one.
set -eu
index="${JOB_COMPLETION_INDEX:-0}"
ranks="$(echo "$DRYSTONE_RANKS" | cut -d ';' -f $((index + 1)))"
export LOCAL_WORLD_SIZE="$(echo $ranks | wc -w | tr -d ' ')"
export GROUP_RANK=$((DRYSTONE_FIRST_GROUP + index))
await() {
  code=0
  wait "$1" || code=$?
  while kill -0 "$1" 2>/dev/null; do code=0; wait "$1" || code=$?; done
}
run_rank() {
  "$@" &
  child=$!
  trap 'kill -TERM "$child" 2>/dev/null || true' TERM
  await "$child"
  if [ "$code" -ne 0 ]; then kill -USR1 $$ 2>/dev/null || true; fi
  exit "$code"
}
pids=""
leave() { for pid in $pids; do kill -TERM "$pid" 2>/dev/null || true; done; }
trap leave TERM INT USR1
local_rank=0
for rank in $ranks; do
  (
    export RANK="$rank" LOCAL_RANK="$local_rank"
    run_rank "$@"
  ) &
  pids="$pids $!"
  local_rank=$((local_rank + 1))
done
status=0
for pid in $pids; do
  await "$pid"
  if [ "$status" -eq 0 ]; then status="$code"; fi
done
exit "$status"
