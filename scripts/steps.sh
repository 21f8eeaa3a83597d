# What the scripts that show a whole run print and ask; they read this file with `source`.

say() { printf '\n== %s\n' "$*"; }
show() { echo "\$ $*"; "$@"; }
# Whether a folder of checkpoints ends with this iteration.
trained() { [ "$(cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)" = "$2" ]; }
