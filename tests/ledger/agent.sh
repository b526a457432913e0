# agent.sh TARE DIR: sign-off with the real ssh-keygen, and what an ssh-agent changes when nobody sits
# at a terminal.
set -eu
. "$(dirname "$0")/status.sh"
tare=$1
cd "$2"
ssh-keygen -q -t ed25519 -N '' -C bob -f bob
ssh-keygen -q -t ed25519 -N '' -C ann -f ann
cat > from.toml <<END
schema = "tare-task-1"
[requester]
person = "ann"
keys = ["$(cat ann.pub)"]
[[reviewer]]
person = "bob"
key = "$(cat bob.pub)"
steps = ["task", "C1"]
END
status 0 "$tare" init task --from from.toml >/dev/null
# ask STEP KEY: a request, and a statement for bob signed with KEY.
ask() {
  status 4 "$tare" approve "$1" --task task >/dev/null
  rm -f statement.json statement.json.sig
  status 0 "$tare" approve "$1" --task task --statement --person bob > statement.json
  ssh-keygen -q -Y sign -f "$2" -n tare-review statement.json 2>/dev/null
}
accept() { "$tare" approve "$1" --task task --accept statement.json; }

ask task bob
status 0 accept task
eval "$(ssh-agent -a "$PWD/agent.sock")" >/dev/null
trap 'kill $SSH_AGENT_PID' EXIT
ssh-add -q bob
ask C1 bob
status 3 accept C1 2>said
cat said
grep -q agent-unattended said
# The agent holds another key only: taken.
ssh-add -q -D
ssh-add -q ann
ask C1 bob
status 0 accept C1
# The requester's own key is refused whoever holds it.
ask C1 ann
status 3 accept C1 2>said
cat said
grep -q reviewer-not-allowed said
status 0 "$tare" verify task
echo done
