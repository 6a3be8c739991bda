# shellcheck shell=bash
# Prepares the environment of the calling shell. Source it, always with a requirements file:
#
#   source training_scripts/setup_env.sh requirements.txt
#
# An active virtual environment (VIRTUAL_ENV) or conda environment (CONDA_PREFIX) is used unchanged; otherwise .venv is
# created in the repository root and activated. An installed torch is kept; if there is none, 2.13.0 is installed, in the
# build for the GPU's driver, or for CPUs if there is none: uv finds it in torch's own index. If pip has an index of its
# own here, or torch's cannot be reached, it is the build of the package index. The installer is uv if it is available,
# else pip. All other packages get the versions of constraints.txt, with which the tests passed. Installation is skipped
# if the environment has a stamp with the digest of the same files: a second call takes a fraction of a second.
#
# PYTHON=python3.12     the interpreter that creates .venv (3.11 or newer)
# TRIPTYCH_OFFLINE=1    also export HF_HUB_OFFLINE=1: models and data come from local files or the cache only
# UV_TORCH_BACKEND=cpu  read by uv: torch's CPU build even where there is a GPU; or cu128, ...

_TRIPTYCH_TORCH=2.13.0 # if none is installed: the version that most tests ran on

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    echo "setup_env.sh: source it, so that the environment stays active: source $0 requirements.txt" >&2
    exit 2
fi

_triptych_fail() {
    echo "setup_env.sh: $*" >&2
    return 1
}

# Prints the first interpreter that runs and is new enough.
_triptych_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    _triptych_fail "no Python 3.11 or newer among: ${PYTHON:-python3 python3.13 python3.12 python3.11}." \
        "Install one, or name it: PYTHON=/path/to/python3.11"
}

# Activates .venv, and creates it first if it is missing or incomplete.
_triptych_activate_venv() {
    local root=$1 python
    if ! "$root/.venv/bin/python" -c "" >/dev/null 2>&1 || [[ ! -f "$root/.venv/bin/activate" ]]; then
        python=$(_triptych_find_python) || return 1
        echo "setup_env.sh: making $root/.venv with $("$python" --version)"
        "$python" -m venv --clear "$root/.venv" ||
            _triptych_fail "$python -m venv failed; on Debian and Ubuntu: apt install python3-venv" || return 1
    fi
    # shellcheck source=/dev/null
    source "$root/.venv/bin/activate"
}

# Prints the digest of the interpreter's version, constraints.txt, and a requirements file with all that it includes by -r.
_triptych_digest() {
    python - "$1" <<'PYTHON'
import hashlib, pathlib, sys
digest = hashlib.sha256(sys.version.encode())
files = [pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]).with_name("constraints.txt")]
for file in files:
    text = file.read_text()
    digest.update(text.encode())
    files += [file.parent / line.split()[1] for line in text.splitlines() if line.startswith("-r ")]
print(digest.hexdigest())
PYTHON
}

# Prints the version of an installed torch; fails with a message if it is outside the range of requirements.txt.
_triptych_find_torch() {
    python - "$1" <<'PYTHON'
import importlib.metadata, re, sys
def parts(version): return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
line = next(line for line in open(sys.argv[1]) if line.startswith("torch"))
low, high = re.match(r"torch>=([\d.]+),<([\d.]+)", line).groups()
try:
    found = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit()
print(found)
if not parts(low) <= parts(found) < parts(high):
    cure = f'pip install "torch>={low},<{high}", or take another environment'
    sys.exit(f"setup_env.sh: torch {found} is here, and {low} up to, not with, {high} was tried; {cure}")
PYTHON
}

# Prints the NVIDIA driver and its newest CUDA version; "no NVIDIA driver" if there is none.
_triptych_find_driver() {
    local header
    header=$(nvidia-smi 2>/dev/null | grep -o 'Driver Version: *[0-9.]*.*CUDA[^:]*Version: *[0-9.]*') || header=""
    [[ -n "$header" ]] && echo "$header" | sed -E 's/Driver Version: *([0-9.]+).*: *([0-9.]+)/driver \1, CUDA \2/' ||
        echo "no NVIDIA driver"
}

# Installs torch, in the build for the driver if uv and torch's own index can be reached.
_triptych_install_torch() {
    local prefix=$1 uv
    if ! uv=$(command -v uv) && ! python -m pip config list 2>/dev/null | grep -Eq 'index-url|find-links'; then
        uv=$prefix/.triptych-uv/bin/uv
        python -m pip install --quiet --target "$prefix/.triptych-uv" uv 2>/dev/null || true
    fi
    if [[ -x "$uv" ]] && UV_TORCH_BACKEND=${UV_TORCH_BACKEND:-auto} \
        "$uv" pip install --quiet --python "$prefix/bin/python" "torch==$_TRIPTYCH_TORCH" 2>/dev/null; then
        rm -rf "$prefix/.triptych-uv"
    else
        rm -rf "$prefix/.triptych-uv"
        "${install[@]}" "torch==$_TRIPTYCH_TORCH" || return 1
    fi
    echo "setup_env.sh: torch $(_triptych_find_torch "$2"); $(_triptych_find_driver)"
}

# Installs a requirements file. Runs in a subshell, so that the caller's traps are unchanged.
_triptych_install() (
    requirements=$1 begun=$2 prefix=$(dirname "$2") with=pip
    install=(python -m pip install --quiet --retries 2)
    trap 'echo "setup_env.sh: stopped; the same command goes on from here" >&2; exit 130' INT
    if command -v uv >/dev/null; then
        with=uv install=(uv pip install --quiet --python "$prefix/bin/python")
    else
        python -m pip --version >/dev/null 2>&1 || python -m ensurepip >/dev/null || exit 1
    fi
    # A package whose installation was killed has no INSTALLER yet, but may look installed: its metadata is removed.
    if [[ -f "$begun" ]]; then
        find "$prefix"/lib/python3*/site-packages -maxdepth 1 -name '*.dist-info' -newer "$begun" \
            ! -exec test -e '{}/INSTALLER' ';' -exec rm -r '{}' +
    else
        touch "$begun"
    fi
    torch=$(_triptych_find_torch "$(dirname "$requirements")/requirements.txt") || exit 1
    needed=1 size="about 200 MB" kept=${torch:+, keeps torch $torch}
    [[ -n "$torch" ]] || needed=3 size+=" and torch $_TRIPTYCH_TORCH: 200 MB for CPUs, 3 GB for GPUs"
    echo "setup_env.sh: $with installs ${requirements##*/} into $prefix$kept; downloads $size"
    free=$(df -Pk "$prefix" | awk 'NR == 2 {print int($4 / 2^20)}')
    ((free >= needed)) || _triptych_fail "$prefix has $free GB free, $needed are needed; free some and call again" || exit 1
    # torch separately and first: later packages find it installed and cannot replace its build.
    { [[ -n "$torch" ]] || _triptych_install_torch "$prefix" "$(dirname "$requirements")/requirements.txt"; } &&
        "${install[@]}" -r "$requirements" -c "$(dirname "$requirements")/constraints.txt" ||
        _triptych_fail "installing ${requirements##*/} failed, by the message above (no version found: mostly no" \
            "network or a proxy). Call again: it goes on from here" || exit 1
    rm "$begun"
)

_triptych_setup() {
    local root requirements prefix stamp digest started=$SECONDS
    root=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")") || return 1
    requirements="$root/${1:-}"
    [[ "${1:-}" == *.txt && -f "$requirements" ]] ||
        _triptych_fail "name a requirements file of the repository: source setup_env.sh requirements.txt" || return 1

    if [[ -n "${VIRTUAL_ENV:-}" ]]; then
        [[ -x "$VIRTUAL_ENV/bin/python" ]] ||
            _triptych_fail "VIRTUAL_ENV=$VIRTUAL_ENV is no environment; unset it, or make it" || return 1
        # A shell that inherited the variable but not the PATH would install somewhere else.
        [[ ":$PATH:" == *":$VIRTUAL_ENV/bin:"* ]] || export PATH="$VIRTUAL_ENV/bin:$PATH"
    elif [[ -z "${CONDA_PREFIX:-}" ]]; then
        _triptych_activate_venv "$root" || return 1
    fi
    python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        _triptych_fail "the active environment ${VIRTUAL_ENV:-${CONDA_PREFIX:-}} has no Python 3.11 or newer;" \
            "deactivate it, or make another" || return 1

    prefix=$(python -c 'import sys; print(sys.prefix)') && digest=$(_triptych_digest "$requirements") || return 1
    stamp="$prefix/.triptych-$1.sha256"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$digest" ]]; then
        echo "setup_env.sh: $1 is installed already ($((SECONDS - started)) s)"
    else
        _triptych_install "$requirements" "$prefix/.triptych-begun" || return 1
        echo "$digest" >"$stamp"
        echo "setup_env.sh: installed $1 in $((SECONDS - started)) s"
    fi

    if [[ "${TRIPTYCH_OFFLINE:-0}" == 1 ]]; then
        export HF_HUB_OFFLINE=1
    fi
}

_triptych_setup "${1:-}"
