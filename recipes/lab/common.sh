# shellcheck shell=bash
# Sourced by the lab's scripts: the Python, and a check of what was typed before anything is made.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# settle RECIPE SETTING ... -- TYPED ...: sets train and arguments. Ends the script with DRY_RUN=1, --help or a wrong key.
settle() {
    train=("$python" -m "recipes.$1.main_$1")
    shift
    arguments=(trainer.backend=ray "$@")
    case " $* " in *" --help "*) exec "${train[@]}" "${arguments[@]}" ;; esac # it needs neither data nor model
    case "${DRY_RUN:-}" in
    "" | 0 | false | no) ;;
    *) exec "${train[@]}" "${arguments[@]}" ;;
    esac
    DRY_RUN=1 "${train[@]}" "${arguments[@]}" > /dev/null # reports a wrong key now, not after a minute
    if [[ " $* " != *" trainer.backend="* ]] && ! "$python" -c "import ray" 2> /dev/null; then
        echo "ray cannot be imported: the run is in one process, trainer.backend=local" >&2
        arguments[0]=trainer.backend=local
    fi
}
