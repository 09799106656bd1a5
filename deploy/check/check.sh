#!/usr/bin/env bash
# Checks deploy/kubernetes against the schemas of Kubernetes, and deploy/systemd with systemd's own tools. Says what it cannot check
# for want of a tool. VALIDATOR names a kubernetes-validate that is installed already; else it is installed for this run.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly VERSION=1.37.0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

validator=${VALIDATOR:-}
if [ -z "$validator" ]; then
    python3 -m venv "$scratch/venv"
    "$scratch/venv/bin/pip" install --quiet --disable-pip-version-check "kubernetes-validate==$VERSION"
    validator=$scratch/venv/bin/kubernetes-validate
fi

# As `kubectl apply --kustomize` would send it. Without kubectl the files as they are, which misses what the kustomization adds.
if command -v kubectl >/dev/null; then
    kubectl kustomize deploy/kubernetes >"$scratch/rendered.yaml"
elif command -v kustomize >/dev/null; then
    kustomize build deploy/kubernetes >"$scratch/rendered.yaml"
else
    echo "neither kubectl nor kustomize is here: the StatefulSet, which gets its labels from the kustomization, is not checked"
    for file in namespace service poddisruptionbudget networkpolicy; do
        printf -- '---\n'
        cat "deploy/kubernetes/$file.yaml"
    done >"$scratch/rendered.yaml"
fi
"$validator" --strict "$scratch/rendered.yaml"

# The kind of the sandbox's template is an extension's, but what it holds is a pod.
{
    printf 'apiVersion: v1\nkind: Pod\nmetadata:\n  name: of-the-sandbox-template\n'
    sed -n '/^  podTemplate:/,$p' deploy/kubernetes/sandbox-template.yaml | sed -n '/^    spec:/,$p' | sed 's/^    //'
} >"$scratch/sandbox.yaml"
"$validator" --strict "$scratch/sandbox.yaml"

if "$validator" --strict deploy/check/broken.yaml >"$scratch/refused" 2>&1; then
    echo "deploy/check/broken.yaml passed: the check checks nothing" >&2
    exit 1
fi
grep -q replica "$scratch/refused"
echo "deploy/check/broken.yaml is refused, as it has to be"

if ! command -v systemd-analyze >/dev/null; then
    echo "systemd-analyze is not here: deploy/systemd is not checked"
    exit 0
fi
# It looks for the program that is started, which need not be installed here.
sed "s#^ExecStart=/usr/local/bin/executor-daemon#ExecStart=/bin/true#" deploy/systemd/executor-daemon.service >"$scratch/executor-daemon.service"
# It complains on stderr also where it ends with 0.
systemd-analyze verify "$scratch/executor-daemon.service" 2>&1 | tee "$scratch/complaints"
test ! -s "$scratch/complaints"
# The score is printed; above 4.0 something was opened by accident.
systemd-analyze security --offline=true --threshold=40 "$scratch/executor-daemon.service" | tail -1
