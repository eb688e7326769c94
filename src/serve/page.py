# SPDX-License-Identifier: Apache-2.0
"""page.py PAGE.html OUT.c: the page as C, with a policy that allows its own script and style alone.

The policy names both by their SHA-256: whatever else found its way into the page would not run.
"""
import base64
import hashlib
import re
import sys


def source(page, tag):
    text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)[1]
    return "'sha256-%s'" % base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


page = open(sys.argv[1], encoding="utf-8", newline="").read()
assert page.count("<script") == page.count("<style") == 1, "one script and one style"
policy = ("default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
          f"frame-ancestors 'none'; script-src {source(page, 'script')}; style-src {source(page, 'style')}")
data = page.encode()
lines = [",".join(map(str, data[i:i + 24])) for i in range(0, len(data), 24)]
with open(sys.argv[2], "w", encoding="utf-8") as out:
    out.write('#include "serve/page_priv.h"\n\n'
              f'const char serve_page_policy[] = "{policy}";\n'
              "const unsigned char serve_page_data[] = {\n" + ",\n".join(lines) + "};\n"
              f"const size_t serve_page_size = {len(data)};\n")
