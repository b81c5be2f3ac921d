#!/bin/sh
# What the images have in common. Runs as root while an image is built:
#
#   install.sh packages    what must be there when the server runs: Python, and the compiler that Triton and
#                          torch.compile call; then the user that it runs as and the folder of its caches
#   install.sh torch       the virtual environment with torch: the one of the base image if that has one, else a wheel
#   install.sh nepserve    the server from the sources in the current folder, without touching torch
set -eu

VENV=/opt/nepserve
CACHE=/var/cache/nepserve
KEEP=/tmp/keep.txt

has_torch() { command -v python3 >/dev/null && python3 -c 'import torch' 2>/dev/null; }

has_headers() {
  python3 -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())'
}

packages() {
  export DEBIAN_FRONTEND=noninteractive
  apt-get update
  # The base image's own Python, where it has one, is the one that fits its torch.
  if ! command -v python3 >/dev/null; then
    apt-get install --yes --no-install-recommends python3 python3-venv python3-dev
  elif ! has_headers; then
    apt-get install --yes --no-install-recommends python3-dev
  fi
  apt-get install --yes --no-install-recommends gcc libc6-dev
  rm -rf /var/lib/apt/lists/*
  useradd --system --user-group --uid 10001 --no-create-home --home-dir "$CACHE" --shell /usr/sbin/nologin nepserve
  # Whatever user id the container gets, it can write here.
  mkdir -p "$CACHE"
  chmod 1777 "$CACHE"
}

pip_install() { "$VENV/bin/python" -m pip install --no-cache-dir --disable-pip-version-check "$@"; }

torch() {
  : >"$KEEP"
  if has_torch; then
    # A venv made by the Python of another venv does not see that one's packages: name their folders, behind its own.
    python3 -m venv "$VENV"
    python3 -c 'import site, sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
      >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base-image.pth"
  elif [ -n "${TORCH:-}" ]; then
    python3 -m venv "$VENV"
    pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH"
  else
    echo "the base image has no torch that its python3 can import, and the build argument TORCH names none" >&2
    exit 1
  fi
  "$VENV/bin/python" - >"$KEEP" <<'END'
import importlib.metadata

print(f"torch=={importlib.metadata.version('torch')}")
END
  cat "$KEEP"
}

nepserve() {
  pip_install --constraint "$KEEP" ${CONSTRAINTS:+--constraint "$CONSTRAINTS"} '.[server]'
  "$VENV/bin/python" - "$(sed 's/torch==//' "$KEEP")" <<'END'
import importlib.metadata
import sys

import torch

import nepserve.server

found = importlib.metadata.version("torch")
if found != sys.argv[1]:
    sys.exit(f"torch {sys.argv[1]} was replaced by {found}")
print(f"nepserve {nepserve.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
END
}

case "${1:-}" in
  packages | torch | nepserve) "$1" ;;
  *) echo "usage: $0 packages|torch|nepserve" >&2; exit 2 ;;
esac
