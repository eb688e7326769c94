#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# test-layout.sh SOURCE BUILD: the tree keeps the rules, and a tree that breaks them is told so.
set -eu
source=$1 build=$2
python3 "$source/scripts/check-layout" "$build"

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp/scripts" "$tmp/src/base" "$tmp/src/kv" "$tmp/src/model"
cp "$source/scripts/check-layout" "$tmp/scripts/"
spdx='/* SPDX-License-Identifier: Apache-2.0 */'

# the small tree has exactly one fault, and it says $1
write() { printf '%s\n%s\n' "$spdx" "$2" >"$tmp/src/$1"; }
must_say() {
    out=$(python3 "$tmp/scripts/check-layout" || true)
    case $out in
    *"$1"*"layout: 1 faults"*) ;;
    *) echo "wanted one fault with '$1', got: $out" >&2 && exit 1 ;;
    esac
}

write base/base.h ''
write kv/kv.h '#include "base/base.h"'
write kv/kv_priv.h '#include <stdio.h>'
write model/model.h '#include <baton/device.h>'
python3 "$tmp/scripts/check-layout" >/dev/null

write base/a.c '#include "kv/kv.h"'
must_say 'src/base/a.c:2: base may not include "kv/kv.h"'
write base/a.c '#include <baton/device.h>'
must_say 'base may not include <baton/device.h>'
write base/a.c '#include "base.h"'
must_say 'write "room/file.h"'
write base/a.c ''
write model/a.c '  #  include "kv/kv_priv.h"'
must_say 'is private to kv'
write model/a.c '#include "model/none.h"'
must_say 'does not exist'
echo '#include "base/base.h"' >"$tmp/src/model/a.c"
must_say 'no SPDX line'
write model/a.c 'int kv_open(void) { return 0; }
int model_open(void) { return 1; }
static int hidden(void) { return 2; }
int (*model_use)(void) = hidden;'
cc -c "$tmp/src/model/a.c" -o "$tmp/a.o"
printf '[{"directory": "%s", "file": "src/model/a.c", "output": "a.o"}]' "$tmp" \
    >"$tmp/compile_commands.json"
out=$(python3 "$tmp/scripts/check-layout" "$tmp" || true)
case $out in
*'src/model/a.c: symbol kv_open does not start with model_'*'layout: 1 faults, 1 objects'*) ;;
*) echo "symbols: $out" >&2 && exit 1 ;;
esac
