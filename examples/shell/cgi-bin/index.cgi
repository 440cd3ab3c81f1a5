#!/bin/sh
# A tool for Bascule as a CGI script, with openssl and jq. This starts busybox's web server, which runs it:
# TOOL_SECRET=whsec_… sh examples/shell/cgi-bin/index.cgi
set -euf

key=$(printf %s "${TOOL_SECRET-}" | sed s/^whsec_// | base64 -d 2>/dev/null | od -An -v -tx1)
set -- $key
if [ $# -lt 24 ]; then
  echo "usage: TOOL_SECRET=whsec_… sh examples/shell/cgi-bin/index.cgi   (the signing_secret of the tool)" >&2
  exit 1
fi
[ "${GATEWAY_INTERFACE-}" ] || exec busybox httpd -f -p "127.0.0.1:${PORT:-9000}" -h "$(dirname "$0")/.."

# HMAC-SHA256 by its definition: `openssl dgst -macopt` would show the key to everybody who can run ps.
while [ $# -lt 64 ]; do set -- "$@" 00; done
key=$*
xored() { for byte in $key; do printf '\\%03o' $((0x$byte ^ $1)); done; }
inner=$(xored 0x36) outer=$(xored 0x5c)
sha256() { openssl dgst -sha256 -binary; }
hmac() { { printf "$outer"; { printf "$inner"; cat; } | sha256; } | sha256 | base64; }

is_signed() {
  sent_at=${HTTP_WEBHOOK_TIMESTAMP-}
  expected="v1,$({ printf %s.%s. "${HTTP_WEBHOOK_ID-}" "$sent_at"; cat "$body"; } | hmac)"
  for entry in ${HTTP_WEBHOOK_SIGNATURE-}; do
    # What is compared is hashed once more, so the time it takes tells nothing about the signature.
    if [ "$(printf %s "$entry" | hmac)" = "$(printf %s "$expected" | hmac)" ]; then
      age=$(($(date +%s) - sent_at))
      [ "${age#-}" -lt 300 ] && return
    fi
  done
  return 1
}

body=$(mktemp)
trap 'rm -f "$body"' EXIT
head -c "${CONTENT_LENGTH:-0}" >"$body"
if ! is_signed; then
  printf 'Status: 401 Unauthorized\r\nContent-Type: text/plain\r\n\r\n'
  echo "bad signature: is TOOL_SECRET the signing_secret of this tool?"
  exit
fi
printf 'Content-Type: application/json\r\n\r\n'
jq '(.data.input.order_id? | strings | {content: "order \(.) has shipped"})
  // {content: "order_id must be a text such as A-1042", is_error: true}' "$body"
