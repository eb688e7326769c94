# SPDX-License-Identifier: Apache-2.0
"""What the tests in Python share: their packages, and the report of their cases.

A test that needs packages says `need(...)` before it imports them; the cases go to `main`.
"""
import importlib.util
import os
import random
import sys
import time
import traceback

AGAIN = "BATON_PYTHON_AGAIN"


class Skip(Exception):
    """Raised by a case that can't run here; its text says why. It is counted."""


def need(*packages):
    """Go on under BATON_PYTHON, which promises tests/requirements.txt, with these packages. Where one is missing the
    test ends: skipped (exit 77), or failed where BATON_PYTHON is given or BATON_REQUIRE_PYTHON is 1."""
    python = os.environ.get("BATON_PYTHON")
    if python and not os.environ.pop(AGAIN, None):
        os.environ[AGAIN] = "1"
        os.execv(python, [python] + sys.argv)  # a venv's python is a link: the paths' targets say nothing
    missing = [p for p in packages if not importlib.util.find_spec(p)]
    if missing:
        must = python or os.environ.get("BATON_REQUIRE_PYTHON") == "1"
        print(f"{'FAILED' if must else 'skipped'}: no package {', '.join(missing)}")
        sys.exit(1 if must else 77)


def seeded():
    """Random numbers of BATON_TEST_SEED, else of the clock; the seed is printed."""
    seed = int(os.environ.get("BATON_TEST_SEED") or time.time_ns() % 2**32)
    print(f"BATON_TEST_SEED={seed}", flush=True)
    return random.Random(seed)


def main(cases):
    """Run the cases, functions of a random.Random or (name, function) pairs, reported as cmocka does; ends the
    program. Each begins with the same random numbers, so that one alone repeats."""
    rng = seeded()
    start = rng.getstate()
    failed = 0
    for case in cases:
        name, run = case if isinstance(case, tuple) else (case.__name__, case)
        rng.setstate(start)
        print(f"[ RUN      ] {name}", flush=True)
        try:
            run(rng)
            print(f"[       OK ] {name}", flush=True)
        except Skip as why:
            print(why)
            print(f"[  SKIPPED ] {name}", flush=True)
        except Exception:  # a broken case must not hide the others
            traceback.print_exc(file=sys.stdout)
            print(f"[  FAILED  ] {name}", flush=True)
            failed += 1
    sys.exit(1 if failed else 0)
