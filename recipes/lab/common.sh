# shellcheck shell=bash
# Sourced by the lab's scripts: the Python, and a check of what was typed before anything is made.

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

# settle RECIPE SETTING ... -- TYPED ...: sets train and arguments. Ends the script with DRY_RUN=1, --help or a wrong key.
settle() {
    train=("$python" -m "recipes.$1.main_$1")
    shift
    arguments=(trainer.backend=ray "$@")
    if is_dry_run "$@"; then exec "${train[@]}" "${arguments[@]}"; fi
    DRY_RUN=1 "${train[@]}" "${arguments[@]}" > /dev/null # reports a wrong key now, not after a minute
    if [[ " $* " != *" trainer.backend="* ]] && ! "$python" -c "import ray" 2> /dev/null; then
        echo "ray cannot be imported: the run is in one process, trainer.backend=local" >&2
        arguments[0]=trainer.backend=local
    fi
}
