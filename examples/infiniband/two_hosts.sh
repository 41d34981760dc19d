#!/bin/bash
# Two hosts with one rank each, started by Open MPI: examples/infiniband/two_hosts.sh HOST1 HOST2
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 HOST1 HOST2" >&2; exit 2; }

# MPI only starts the ranks and hands the secret round (mpi4py); the arrays travel through gfkernels' own queue pairs.
exec mpirun --host "$1,$2" -n 2 --bind-to none \
    -x GFKERNELS_TRANSPORT=verbs -x GFKERNELS_LOG=info -x PYTHONPATH \
    python examples/03_mpi4py.py
