#!/bin/bash
#SBATCH --job-name=nepserve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@60
#
# One server a node, on all its GPUs, and a file of their addresses for clients: file:$ADDRESSES. A server is listed once
# it is ready, and until it ends. The key is made once, in a file that nobody else can read.
#
#   MODEL=/shared/nep.txt ADDRESSES=/shared/nepserve.txt sbatch deploy/slurm.sh
set -eu

MODEL=${MODEL:?the path of a nep.txt}
ADDRESSES=${ADDRESSES:?a file on a disk that all nodes share}
KEYS=${KEYS:-$HOME/.nepserve-keys}
PORT=${PORT:-8000}
DEVICES=${DEVICES:-all}
NEPSERVE=${NEPSERVE:-nepserve}
export MODEL ADDRESSES KEYS PORT DEVICES NEPSERVE

# Write the addresses of all servers that are there, in one piece: readers never see half of it.
publish() {
  (
    flock 9
    cat "$ADDRESSES".d/* >"$ADDRESSES.new" 2>/dev/null || : >"$ADDRESSES.new"
    mv "$ADDRESSES.new" "$ADDRESSES"
  ) 9>"$ADDRESSES.lock"
}

serve() {
  mine="$ADDRESSES.d/$(hostname)-$PORT"
  NEPSERVE_HOST=0.0.0.0 NEPSERVE_PORT=$PORT NEPSERVE_API_KEY_FILE=$KEYS "$NEPSERVE" serve "$MODEL" --devices "$DEVICES" &
  server=$!
  trap 'rm -f "$mine"; publish; kill -TERM "$server" 2>/dev/null || true' TERM INT
  while kill -0 "$server" 2>/dev/null; do
    if python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$PORT/readyz', timeout=5)" 2>/dev/null; then
      echo "http://$(hostname):$PORT" >"$mine"
      publish
      break
    fi
    sleep 1
  done
  code=0
  wait "$server" || code=$?
  # A signal ends the first wait; what is in flight is finished before the second does.
  if kill -0 "$server" 2>/dev/null; then
    code=0
    wait "$server" || code=$?
  fi
  rm -f "$mine"
  publish
  return "$code"
}

if [ "${1:-}" = serve ]; then
  serve
  exit
fi
mkdir -p "$ADDRESSES.d"
rm -f "$ADDRESSES".d/*
if [ ! -e "$KEYS" ]; then
  (umask 077 && printf 'slurm %s\n' "$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')" >"$KEYS")
fi
exec srun --kill-on-bad-exit=0 "$0" serve
