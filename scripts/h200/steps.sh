# Sourced by the scripts of this folder, which run from the repository's root: paths, and steps of which none ends the rest.
# PY: which Python. SITE: a folder with packages that it lacks. OUT: for what must be kept. SMOKE=1: tiny, on a CPU.
set -u
PY=${PY:-python3}
HERE=scripts/h200
export PYTHONPATH="$PWD/src${SITE:+:$SITE}${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export BEGIN=${BEGIN:-$(date +%s.%N)} SMOKE=${SMOKE:-} OUT=${OUT:-$(mktemp -d)}
LOGS=$(mktemp -d)

seconds() { awk -v begin="$BEGIN" -v now="$(date +%s.%N)" 'BEGIN { printf "%6.1f", now - begin }'; }

say() { echo "$(seconds) $*"; }

# step NAME SECONDS COMMAND...: its lines as they come; of what it says on standard error the end, if it fails
step() {
    local name=$1 limit=$2
    shift 2
    timeout -s INT -k 15 "$limit" "$@" 2>"$LOGS/$name.err" && return
    say "FAILED $name (status $?)"
    grep -v '^ *$' "$LOGS/$name.err" | tail -n 4 | cut -c1-160
}

# wanted PART...: whether one of these parts was asked for, or none at all
wanted() {
    [ ${#PARTS[@]} -eq 0 ] && return
    local part name
    for part in "${PARTS[@]}"; do
        for name in "$@"; do [ "$part" = "$name" ] && return; done
    done
    return 1
}
