# Sourced by the scripts of this folder with their arguments: the Python, and what the words before the keys choose.
#
#   [passages|arithmetic|search]   the task, instructions by default      -> task, model_sft, files
#   [naive]                        a preset of its own                    -> preset
#   [random|shuffled]              a control (recipes/real/controls.py)   -> control
#   [key=value ...]                                                       -> keys

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}" # OpenMP threads that spin longer block each other beside another process
model="${REAL_MODEL:-./outputs/real/model}"

task=instructions naive="" control=""
while (($#)); do
    case "$1" in
    passages | arithmetic | search) task="$1" ;;
    naive) naive=_naive ;;
    random | shuffled) control="$1" ;;
    *) break ;;
    esac
    shift
done
keys=("$@")
of_task="_$task"
[[ "$task" != instructions ]] || of_task=""
preset="smollm2_135m$of_task$naive"
model_sft="./outputs/real/sft$of_task"
files="./outputs/real/$task"

is_dry_run() {
    case "${DRY_RUN:-}" in
    "" | 0 | false | no) return 1 ;;
    esac
}
