#!/bin/sh
# Runs the two commands of README as a newcomer would: in a fresh clone of the current commit, with an empty HOME, no
# environment variables but PATH and LANG, and no settings of pip. `make check-fresh NAME=VALUE ...` passes variables on.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d "${TMPDIR:-/tmp}/fastgen-fresh.XXXXXX")
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
git clone -q . "$folder/fastgen"
mkdir "$folder/home"

# How this machine reaches the network says nothing about what is installed, so these stay.
stay=""
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY SSL_CERT_FILE PIP_CERT PIP_CACHE_DIR; do
  if printenv "$name" > /dev/null; then stay="$stay $name=$(printenv "$name")"; fi
done
for target in demo test; do
  echo "== make $target"
  # shellcheck disable=SC2086  # one word per variable
  env -i HOME="$folder/home" PATH="$PATH" LANG=C.UTF-8 PIP_CONFIG_FILE=/dev/null $stay \
    make -C "$folder/fastgen" --no-print-directory "$target" "$@"
done
echo "== both commands work in a fresh clone of $(git rev-parse --short HEAD)"
