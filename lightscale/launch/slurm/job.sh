#!/bin/bash
# One job of the run {{run}}: `lightscale submit` made this script; logs, records and checkpoints are in that directory.
{{options}}

{{setup}}
# For the ranks. What is exported where `lightscale submit` is called has precedence over [launch.environment].
export PYTHONSAFEPATH=1
{{environment}}

newest_checkpoint() {
  find {{run}}/checkpoints -maxdepth 1 -regex '.*/step-[0-9]+' 2> /dev/null | sort | tail -n 1
}
before=$(newest_checkpoint)
requeue_is() {
  scontrol show job "$SLURM_JOB_ID" | grep -q "Requeue=$1"
}
# Not where launch.options has --no-requeue.
requeue_is 1 && may_requeue=yes

queue_again() {
  # A controller that is started again is away for a minute or two; any other answer stays what it is. The requeue kills
  # this script, which must not end by itself before that.
  local said
  for _ in $(seq 60); do
    said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && sleep 60
    echo "$said" >&2
    [[ $said == *"Unable to contact"* ]] || return
    sleep 5
  done
}

leave() {
  # Where slurmstepd was killed nobody tells SLURM that this script has ended: the job would stay until its time limit.
  local parent
  read -r _ _ _ parent _ < "/proc/$$/stat" || parent=$PPID
  [ "$parent" = "$PPID" ] || scancel "$SLURM_JOB_ID"
  exit "$1"
}

# On the first node: the launcher. It starts one agent on every node by srun, and the ranks again after failures.
{{command}} &
launcher=$!

# SLURM signals this shell {{signal_s}} s before the time limit, and when the job is cancelled: the launcher saves and exits.
trap 'signalled=yes; kill -USR1 "$launcher"' USR1
trap 'signalled=yes; kill -TERM "$launcher"' TERM
while :; do
  signalled=no
  wait "$launcher"
  code=$?
  # A signal ends the wait, not the launcher.
  [ "$signalled" = yes ] || break
done
trap - USR1 TERM

case $code in
  75) # saved in time, with steps left to do
    # `lightscale cancel` takes this mark away: the job has done what it was asked to.
    if [ "${may_requeue-}" = yes ] && requeue_is 0; then
      leave 0
    fi
    {{again}}
    ;;
  134 | 137 | 139) # the launcher itself was killed, as when memory is short: again, if this job brought a checkpoint
    if [ "$(newest_checkpoint)" != "$before" ]; then
      {{again}}
    fi
    ;;
  0 | 70 | 74 | 78) # finished, or needs attention: jobs of the chain that wait would only repeat it
    # A job that was refused, as where another one holds the run, has no word in that.
    if grep -qE '"status": *"(finished|stopped)"' {{run}}/status.json; then
      {{command_name}} cancel {{run}} --waiting
    fi
    ;;
esac
leave "$code"
