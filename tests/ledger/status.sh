# status WANT COMMAND...: stops the script when COMMAND does not end with WANT.
status() {
  want=$1
  shift
  got=0
  "$@" || got=$?
  if [ "$got" != "$want" ]; then
    echo "$* ended with $got, not $want"
    exit 91
  fi
}
