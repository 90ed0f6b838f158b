#!/usr/bin/env bash
# Makes sure that C++ headers are there: installs the Debian packages of the
# missing ones where that is possible, else says what to do.
# Usage: debian_packages.sh HEADER=PACKAGE...   (CPPFLAGS are honoured)
set -euo pipefail

missing=()
for pair in "$@"; do
  # shellcheck disable=SC2086
  if ! echo "#include <${pair%%=*}>" |
      ${CXX:-c++} ${CPPFLAGS:-} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
    missing+=("${pair##*=}")
  fi
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
  echo "installing Debian packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq >/dev/null &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq "${missing[@]}" >/dev/null && exit 0
fi
cat >&2 <<MSG
Missing, and could not be installed from here: ${missing[*]}
On Debian or Ubuntu:   sudo apt-get install ${missing[*]}
MSG
exit 1
