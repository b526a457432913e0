#!/usr/bin/env bash
# Installs the Debian packages of scripts/packages.txt that are missing. As root it installs; else it
# prints the one command to run and stops. Nothing to do takes under a second.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t wanted < <(grep -v '^#' scripts/packages.txt | sed '/^$/d; s/ *#.*//')
have=$(dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' 2>/dev/null | awk '$1=="ii"{print $2}' | sed 's/:.*//' | sort -u)
missing=()
for p in "${wanted[@]}"; do
  grep -qxF "$p" <<<"$have" || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "Missing packages. Run this, then run the script again:" >&2
  echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 69
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
