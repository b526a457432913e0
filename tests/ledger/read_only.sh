# read_only.sh TARE DIR: the life of a task in DIR/task with every other place read-only. Runs in a
# mount namespace of its own.
set -eu
. "$(dirname "$0")/status.sh"
tare=$1 outside=$2 task=$2/task
mount --make-rprivate /
mount --bind "$task" "$task"
cut -d' ' -f2 /proc/self/mounts | while read -r at; do
  case $at in
    "$task" | /proc* | /sys* | /dev | /dev/pts) ;;
    *) mount -o remount,ro,bind "$at" 2>/dev/null || true ;;
  esac
done
# The control: elsewhere nothing can be written, here it can.
for place in "$outside" /tmp "$HOME" .; do
  if touch "$place/x" 2>/dev/null; then
    echo "$place is not read-only"
    exit 90
  fi
done
touch "$task/x"
rm "$task/x"

scope='shape=b1;topology=1;dtype=bf16;model=m;path=decode'
status 0 "$tare" init "$task" --set 'requester.person="ann"' >/dev/null
status 0 "$tare" record --task "$task" --step C3 --kind E5 --conclude exit-status --scope "$scope" \
  -- sh -c 'echo "{\"value\":1}" > "$TARE_OUT/raw.json"; echo said'
status 1 "$tare" record --task "$task" --step C3 --kind E5 --conclude exit-status --scope "$scope" \
  -- sh -c 'echo "{\"value\":1}" > "$TARE_OUT/raw.json"; exit 1'
status 4 "$tare" approve C3 --task "$task"
status 2 "$tare" status "$task"
status 0 "$tare" verify "$task"
echo done
