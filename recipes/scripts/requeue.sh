# For jobs of Slurm, which source it: `requeued COMMAND ...` runs COMMAND, whose ranks save when Slurm says by SIGUSR1 that
# the time ends (#SBATCH --signal=B:USR1@seconds). The job is then queued again.
requeued() {
    local told="" status=0
    trap 'told=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1 # to all processes of the job's steps
    "$@" &
    wait $! || status=$?
    if [[ $told ]]; then
        wait $! || true # the trap cut the first one short
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$status"
}
