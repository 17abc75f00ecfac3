#!/usr/bin/env bash
# The published corpus of Search-R1 (21 million passages of Wikipedia, 2018) and an index over it.
#
#   bash recipes/search_r1/download_wiki18.sh [--yes] [flat|bm25|hnsw] [FOLDER]
#
# The default is flat, the E5 index of the published runs, in SEARCH_R1_DIR/wiki18 or ~/data/search_r1/wiki18. bm25 is
# for a laptop: a third of the disk, a sixth of the memory, and other passages. Without --yes it prints what it needs and
# asks. A second call continues where the first stopped. DRY_RUN=1 only prints what it needs.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
yes=0 what="" folder=""
for argument in "$@"; do
    case "$argument" in
        --yes) yes=1 ;;
        -h | --help) usage; exit 0 ;;
        bm25 | flat | hnsw) what="$argument" ;;
        -*) echo "download_wiki18.sh: unknown argument $argument" >&2; usage >&2; exit 2 ;;
        *) [[ -z "$folder" ]] || { echo "download_wiki18.sh: two folders: $folder, $argument" >&2; exit 2; }
           folder="$argument" ;;
    esac
done
what="${what:-flat}"
folder="${folder:-${SEARCH_R1_DIR:-$HOME/data/search_r1}/wiki18}"

# Computed from 21,015,324 passages, 768 numbers of 4 bytes each and, for HNSW64, 128 links of 4 bytes.
case "$what" in
    bm25) disk=45 say="built here from the corpus (the published one is Lucene's): hours on one core.
  memory to build       about 40 GB        memory to search      about 10 GB, mapped from disk" ;;
    flat) disk=130 say="PeterJinGo/wiki-18-e5-index, 65 GB to download.
  memory to search      65 GB on a CPU; 32 GB of GPU memory where faiss has GPUs.
                        Mapped from disk it runs with less, and every search reads all of it" ;;
    hnsw) disk=140 say="PeterJinGo/wiki-18-e5-index-HNSW64, about 76 GB to download.
  memory to search      76 GB for speed; mapped from disk with less, slower" ;;
esac
available=$(df -Pk "$(d="$folder"; while [[ ! -d "$d" ]]; do d="$(dirname "$d")"; done; echo "$d")" | awk 'NR == 2 {print int($4 / 1000000)}')
cat <<NEEDS
Into $folder:
  corpus                PeterJinGo/wiki-18-corpus, about 5 GB to download, 14 GB unpacked
  index ($what)          $say
  disk in all           about $disk GB while it works; $available GB are free there
NEEDS
[[ "${DRY_RUN:-0}" == 1 ]] && exit 0
if ((available < disk)); then
    echo "download_wiki18.sh: $available GB are free in $folder, about $disk are needed: name another folder" >&2
    exit 1
fi
if ((!yes)); then
    [[ -t 0 ]] || { echo "download_wiki18.sh: nothing was done; give --yes to begin" >&2; exit 1; }
    read -r -p "Begin? [y/N] " answer
    [[ "$answer" == [yY]* ]] || exit 1
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
bin="$root/.venv/bin"
[[ -x "$bin/python" ]] || bin="$(dirname "$(command -v python3)")"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
fetch() { "$bin/hf" download "$1" --repo-type dataset --local-dir "$folder" --include "$2"; }

# Joins the index's parts into one file and removes each when it has been appended, so that the disk never holds two
# copies. The note beside it (size so far, last part appended) lets a second call continue an interrupted one.
join_parts() {
    local target="$1" note="$1.joined" part size=0 last=""
    [[ -f "$note" ]] && read -r size last <"$note"
    [[ -z "$last" ]] || rm -f "$folder/$last"
    touch "$target.part"
    truncate -s "$size" "$target.part"
    for part in "$folder"/part_*; do
        [[ -f "$part" ]] || break
        cat "$part" >>"$target.part"
        echo "$(stat -c %s "$target.part") $(basename "$part")" >"$note.part"
        mv "$note.part" "$note"
        rm "$part"
    done
    mv "$target.part" "$target"
    rm "$note"
}

fetch PeterJinGo/wiki-18-corpus "wiki-18.jsonl.gz"
corpus="$folder/wiki-18.jsonl.gz"
case "$what" in
    bm25)
        "$bin/python" -m recipes.search_r1.index.cli --corpus "$corpus" --index "$folder/bm25" --backend bm25
        echo "search it: RETRIEVER_INDEX=$folder/bm25 bash recipes/search_r1/run_retriever.sh" ;;
    *)
        name=e5_Flat.index repository=PeterJinGo/wiki-18-e5-index
        [[ "$what" == hnsw ]] && name=e5_HNSW64.index repository=PeterJinGo/wiki-18-e5-index-HNSW64
        if [[ ! -f "$folder/$name" ]]; then
            [[ -f "$folder/$name.joined" ]] || fetch "$repository" "part_*"
            join_parts "$folder/$name"
        fi
        echo "search it: RETRIEVER_INDEX=$folder/$name RETRIEVER_CORPUS=$corpus" \
            "bash recipes/search_r1/run_retriever.sh" ;;
esac
