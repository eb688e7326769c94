# SPDX-License-Identifier: Apache-2.0
"""deploy.py: what deploy/ says to `baton serve` is what that understands. BATON_BINARY, BATON_SOURCE_ROOT.

Flags and paths of probes must stand in --help, ports must be the ones that are listened on, and
systemd, where it is there, must take the units. PyYAML comes with tests/requirements.txt (BATON_PYTHON).
"""
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.environ["BATON_SOURCE_ROOT"], "tests"))
from cases import Skip, main, need

need("yaml")
import yaml

BATON = os.environ["BATON_BINARY"]
HELP = subprocess.run([BATON, "serve", "--help"], capture_output=True, text=True, check=True).stdout
FLAGS = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", HELP))
PATHS = set(re.findall(r"/[a-z0-9/_]+", HELP))
os.chdir(os.path.join(os.environ["BATON_SOURCE_ROOT"], "deploy"))


def serve(args, where):
    """The command line's flags and their values."""
    assert args[0] == "serve", where
    given = {}
    for flag, value in zip(args[1:], args[2:]):
        if re.match("--?[a-z]", flag):
            assert flag in FLAGS, f"{where}: `baton serve` has no {flag}"
            given[flag] = value
    return given


def deployment(doc, where):
    spec = doc["spec"]["template"]["spec"]
    engine = next(c for c in spec["containers"] if c["name"] == "engine")
    given = serve(engine["args"], where)
    ports = {p["name"]: p["containerPort"] for p in engine["ports"]}
    assert int(given["--port"]) == ports["engine"], f"{where}: --port and the engine's port"
    if "--kv-port" in given:
        assert int(given["--kv-port"]) == ports["kv"], f"{where}: --kv-port and the port kv"
        assert given["--kv-advertise"].endswith(":" + given["--kv-port"]), f"{where}: --kv-advertise"
    mounts = [m["mountPath"] for m in engine["volumeMounts"]]
    assert given["-m"] in mounts and os.path.dirname(given["--kv-key-file"]) in mounts, where
    assert {m["name"] for m in engine["volumeMounts"]} == {v["name"] for v in spec["volumes"]}, where
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = engine[probe]["httpGet"]
        assert get["path"] in PATHS and get["port"] in ports, f"{where}: {probe}"
    labels = doc["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/role"] == given["--role"], f"{where}: role"
    assert doc["spec"]["selector"]["matchLabels"].items() <= labels.items(), f"{where}: selector"
    every = {p["name"]: p["containerPort"] for c in spec["containers"] for p in c["ports"]}
    assert len(set(every.values())) == len(every), f"{where}: a port twice"
    return labels, every


def kubernetes(rng):
    docs = list(yaml.safe_load_all(open("kubernetes.yaml", encoding="utf-8")))
    kind = lambda k: [d for d in docs if d["kind"] == k]
    pods = [deployment(d, d["metadata"]["name"]) for d in kind("Deployment")]
    assert len(pods) == 2
    for d in kind("Service"):
        s = d["spec"]
        fits = [ports for labels, ports in pods if s["selector"].items() <= labels.items()]
        assert len(fits) == 1 and all(p["targetPort"] in fits[0] for p in s["ports"]), d["metadata"]
    for labels, ports in pods:
        for d in kind("PodMonitor"):
            assert d["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert all(e["port"] in ports and e["path"] in PATHS for e in d["spec"]["podMetricsEndpoints"])
        for d in kind("InferencePool"):
            assert d["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert all(p["number"] in ports.values() for p in d["spec"]["targetPorts"])
    picker = yaml.safe_load(open("picker.yaml", encoding="utf-8"))
    names = {p.get("name", p["type"]) for p in picker["plugins"]}
    for profile in picker["schedulingProfiles"]:
        assert all(p["pluginRef"] in names for p in profile["plugins"]), profile


def units(rng):
    found = sorted(glob.glob("*.service"))
    assert len(found) == 2
    with tempfile.TemporaryDirectory() as folder:
        for name in found:
            text = open(name, encoding="utf-8").read()
            line = shlex.split(re.search("^ExecStart=(.*)$", text, re.M)[1])
            assert line[0] == "/usr/local/bin/baton", name
            serve(line[1:], name)
            with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
                f.write(text.replace(line[0], BATON))
        if not shutil.which("systemd-analyze"):
            raise Skip("systemd-analyze, which checks units, is not there; their flags were checked")
        r = subprocess.run(["systemd-analyze", "verify", "--man=no", *(os.path.join(folder, n) for n in found)],
                           capture_output=True, text=True)
        ours = [l for l in r.stderr.splitlines() if "baton-" in l]
        assert not ours, "\n".join(ours)


main([kubernetes, units])
