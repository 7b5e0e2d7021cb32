#!/bin/sh
# Create the environment of one peer: install.sh NAME DIRECTORY [PYTHON]. Nothing is done when it is already complete.
set -eu
name=$1 dir=$2 python=${3:-python3}
case $name in
gptqmodel) packages="gptqmodel==7.6.0 bitsandbytes==0.50.2" ;;
llmcompressor) packages="llmcompressor==0.14.0.1" ;;
*) echo "unknown peer $name: gptqmodel or llmcompressor" >&2; exit 2 ;;
esac
[ -e "$dir/complete" ] && exit 0
"$python" -m venv "$dir"
# They build against the torch they find, so it comes first; both want other numpy and transformers than we do.
"$dir/bin/pip" install -q torch==2.13.0
# shellcheck disable=SC2086
"$dir/bin/pip" install -q $packages
touch "$dir/complete"
