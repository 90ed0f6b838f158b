#!/usr/bin/env bash
# Makes sure that the few Debian packages which the C++ tests and benchmarks
# need are there: installs them where that is possible, else says what to do.
set -euo pipefail

packages=(libgtest-dev librapidcheck-dev libbenchmark-dev nlohmann-json3-dev)
headers=(gtest/gtest.h rapidcheck.h benchmark/benchmark.h nlohmann/json.hpp)

missing=()
for i in "${!packages[@]}"; do
  if ! echo "#include <${headers[$i]}>" |
      ${CXX:-g++} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
    missing+=("${packages[$i]}")
  fi
done
[ ${#missing[@]} -eq 0 ] && exit 0

install() { "$@" apt-get update -qq && "$@" apt-get install -y -qq "${missing[@]}"; }

if command -v apt-get >/dev/null; then
  echo "installing Debian packages: ${missing[*]}"
  if [ "$(id -u)" -eq 0 ]; then
    DEBIAN_FRONTEND=noninteractive install env >/dev/null && exit 0
  elif sudo -n true 2>/dev/null; then
    DEBIAN_FRONTEND=noninteractive install sudo >/dev/null && exit 0
  fi
fi
cat >&2 <<MSG
These are missing and could not be installed from here: ${missing[*]}
On Debian or Ubuntu:   sudo apt-get install ${missing[*]}
Elsewhere: GoogleTest, RapidCheck, google-benchmark and nlohmann-json, with headers.
MSG
exit 1
