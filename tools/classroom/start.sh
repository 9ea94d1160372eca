#!/bin/sh
# How a learner's server starts, under the hub and in the container: make the learner's own copy of the course, or put what
# has changed beside it, then become the command given. The data are linked, since no lab writes to them.
set -eu
course=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$HOME/course"
[ -e "$HOME/course/data" ] || ln -s "$course/data" "$HOME/course/data"
"${PYTHON:-python}" "$course/tools/working_copy.py" "$HOME/course/labs"
exec "$@"
