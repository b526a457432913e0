# covered.sh TARE DIR: "is this point covered?" is answered pass inside a recorded scope only.
set -eu
. "$(dirname "$0")/status.sh"
tare=$1
cd "$2"
status 0 "$tare" init task >/dev/null
echo kernel > kernel
status 0 "$tare" record --task task --step C3 --kind E5 --conclude exit-status --config-key none \
  --input code:kernel=kernel --scope 'shape=b1|b64;topology=1;dtype=bf16;model=m;path=decode' \
  -- sh -c 'echo "{\"value\":1}" > "$TARE_OUT/raw.json"'
ask() { "$tare" status task --step "$1" --kind "$2" --covered "$3"; }
status 0 ask C3 E5 'shape=b64;topology=1;dtype=bf16;model=m;path=decode'
status 5 ask C3 E5 'shape=b2;topology=1;dtype=bf16;model=m;path=decode'
status 5 ask C3 E6 'shape=b64;topology=1;dtype=bf16;model=m;path=decode'
status 5 ask C4 E5 'shape=b64;topology=1;dtype=bf16;model=m;path=decode'
status 64 ask C3 E5 'shape=b1|b64;topology=1;dtype=bf16;model=m;path=decode'
status 64 ask C3 E5 'shape=b1'
status 64 ask C30 E5 'shape=b64;topology=1;dtype=bf16;model=m;path=decode'
# An input that changed takes the cover away.
echo other > kernel
status 0 "$tare" record --task task --observe code:kernel=kernel
status 5 ask C3 E5 'shape=b64;topology=1;dtype=bf16;model=m;path=decode'
# So does a configuration that no event holds.
echo '# edited' >> task/task.toml
status 2 ask C3 E5 'shape=b64;topology=1;dtype=bf16;model=m;path=decode'
echo done
