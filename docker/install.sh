#!/bin/sh
# Install the project's dependencies, and those of the extras named as arguments, into /opt/rankmesh.
#
# locked/ has versions and hashes for no extra (core), and for some extras alone. Other choices, and a base image that
# brings its own wheels (pip's no-index, in a file of its configuration or in the environment), are installed by the
# names in pyproject.toml.
set -eu
locked="locked/${*:-core}.txt"
if [ -f "$locked" ] && ! pip config list | grep -Eiq "no-index='(y|yes|t|true|on|1)'"; then
    set -- --require-hashes -r "$locked"
else
    python requirements.py "$@" >requirements.txt
    set -- -r requirements.txt
fi
pip --python /opt/rankmesh/bin/python install --disable-pip-version-check "$@"
find /opt/rankmesh -type d -name tests -prune -exec rm -rf {} +
