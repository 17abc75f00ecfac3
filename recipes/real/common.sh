# shellcheck shell=bash disable=SC2034 # the variables are those of the scripts that source it
# Sourced by the scripts of the real model with their arguments: the Python, and what the words before the keys choose.
#
#   [passages|arithmetic|search]   the task, instructions by default      -> task, model_sft, files
#   [naive]                        a preset of its own                    -> preset
#   [random|shuffled]              a control (recipes/real/controls.py)   -> control
#   [key=value ...]                                                       -> keys

source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
# Memory that goes back to the system after every operation is cleared page by page when it is needed again: an eighth
# of an update.
keep=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=67108864
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1:$keep}"
export REAL_DEVICE="${REAL_DEVICE:-cpu}" # REAL_DEVICE=cuda takes a GPU
# Without instructions for it, a processor multiplies bfloat16 up to a hundred times slower than float32.
if [[ -z "${REAL_DTYPE:-}" ]]; then
    REAL_DTYPE=float32
    if [[ "$REAL_DEVICE" == cuda ]] || grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then REAL_DTYPE=bfloat16; fi
fi
export REAL_DTYPE
model="${REAL_MODEL:-./outputs/real/model}"
# The name of scores of instructions, and the key that makes them so where the run had another reward.
guarded=(guarded reward_model.reward_kwargs.instructions.method=guarded)

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
