# shellcheck shell=bash
# Reads the words before the first flag by position, as DeepSpeed-Chat's scripts do. Source it without arguments:
# it then shares the caller's "$@", and leaves the flags there. A position is a variable, or a flag that overrides the
# script's; an empty word keeps the default. A folder that exists where the script was called is meant, wherever the
# script has gone since.
#
#   POSITIONS=(OUTPUT_DIR --zero_stage)
#   source training_scripts/positions.sh     # bash SCRIPT OUTPUT_DIR ZERO_STAGE [FLAGS]

_triptych_flags=()
for _triptych_position in "${POSITIONS[@]}"; do
    if [[ $# -eq 0 || "$1" == -* ]]; then break; fi
    if [[ -z "$1" ]]; then
        : # the default
    elif [[ "$_triptych_position" == --* ]]; then
        _triptych_flags+=("$_triptych_position" "$1")
    elif [[ "$1" != /* && -e "$OLDPWD/$1" ]]; then
        printf -v "$_triptych_position" '%s' "$OLDPWD/$1"
    else
        printf -v "$_triptych_position" '%s' "$1"
    fi
    shift
done
set -- "${_triptych_flags[@]}" "$@"
