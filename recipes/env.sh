# shellcheck shell=bash disable=SC2034 # the variables are for the scripts that source this file
# Sourced by the scripts: the folder of the repository, its Python, and whether something shall run.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# OpenMP threads that spin at a barrier block each other beside other work on the same cores
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

is_dry_run() { # is_dry_run WORD ...: true with DRY_RUN=1, and where --help is one of the words
    case " $* " in *" --help "*) return 0 ;; esac
    case "${DRY_RUN:-}" in "" | 0 | false | no) return 1 ;; esac
}
