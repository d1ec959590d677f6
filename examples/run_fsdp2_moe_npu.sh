#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a Mixture-of-Experts model with examples/fsdp2_moe.py on all NPUs of this machine; where there is none, the
# tiny model on two CPU processes.
#
#   bash examples/run_fsdp2_moe_npu.sh [ARGUMENTS OF fsdp2_moe.py]    --help lists them
#
# NPROC_PER_NODE    processes on this machine (default: one an NPU, two without NPU)
# NNODES            machines (default 1); with more, start this on each of them with
#                   NODE_RANK (0 ... NNODES-1), MASTER_ADDR (the machine with rank 0), MASTER_PORT (default 29500)
# NPU_MOE_PATCH=0   trains without the patch
# VIRTUAL_NPU=1     uses the virtual NPU, VIRTUAL_NPU_DEVICES of them (default 2)
# PYTHON            the Python to use (default: python)
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
train="$here/fsdp2_moe.py"
python=${PYTHON:-python}
command -v "$python" >/dev/null || fail "no such Python: $python (set PYTHON)"

model_is_given=0
for argument in "$@"; do
    case $argument in
    -h | --help)
        sed -n '3,/^set -/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        # Without the autoload, torch can be imported where torch_npu is installed and CANN is missing.
        TORCH_DEVICE_BACKEND_AUTOLOAD=0 exec "$python" "$train" --help
        ;;
    --model | --model=*) model_is_given=1 ;;
    esac
done

case ${VIRTUAL_NPU:-0} in
0) ;;
1)
    # This script once more, in an environment that has NPUs. They compute on the CPU: the tiny model.
    export VIRTUAL_NPU=0
    exec "$python" "$root/utils/virtual_npu/run.py" --devices "${VIRTUAL_NPU_DEVICES:-2}" -- \
        bash "${BASH_SOURCE[0]}" --model tiny "$@"
    ;;
*) fail "VIRTUAL_NPU must be 0 or 1, got $VIRTUAL_NPU" ;;
esac

# Where are we? The gate's status: 0 an NPU, 1 none, 2 torch_npu is installed but broken.
status=0
found=$("$python" "$root/utils/npu.py" --require) || status=$?
[[ -n $found ]] || exit 2 # npu_moe is not installed, and the gate said so
[[ $status -lt 2 ]] || fail "${found% devices=0}"
echo "$found"

if [[ $status -eq 0 ]]; then
    device=npu
    devices=${found##*devices=}
    # Widths and experts of the real model, as many layers as 64 GB a device hold with float32 master weights and Adam.
    defaults=(--model qwen3-30b-a3b --num-layers "$((devices > 1 ? 4 : 2))" --seq-len 1024 --batch-size 1)
else
    device=cpu
    devices=2
    defaults=(--model tiny)
fi
[[ $model_is_given -eq 0 ]] || defaults=()

nproc=${NPROC_PER_NODE:-$devices}
nnodes=${NNODES:-1}
node_rank=${NODE_RANK:-0}
for name in nproc nnodes node_rank; do
    [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name must be a number, got '${!name}' (NPROC_PER_NODE, NNODES, NODE_RANK)"
done
[[ $nproc -ge 1 && $nnodes -ge 1 ]] || fail "NPROC_PER_NODE and NNODES must be at least 1, got $nproc and $nnodes"
[[ $node_rank -lt $nnodes ]] || fail "NODE_RANK must be less than NNODES=$nnodes, got $node_rank"

if [[ $nnodes -gt 1 ]]; then
    [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] || fail "NNODES=$nnodes needs NODE_RANK and MASTER_ADDR"
    rendezvous=(--nnodes "$nnodes" --node-rank "$node_rank"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
elif [[ -n ${MASTER_PORT:-} ]]; then
    rendezvous=(--master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "$MASTER_PORT")
else
    rendezvous=(--standalone) # any free port
fi

# One thread a process, unless asked for more: what torchrun does too, but it warns.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ $device == npu ]]; then
    # Launch kernels from a second thread, with the operators' preparation moved there too (torch_npu's default is 1).
    export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-2}
    # Against fragmentation: FSDP2 allocates and frees a whole layer again and again. torch_npu accepts only one of the
    # two names of this variable.
    [[ -n ${PYTORCH_ALLOC_CONF:-} ]] || export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
    # Keep each process on the cores next to its NPU.
    export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}
    # Machines do not start in the same two minutes, the default.
    [[ $nnodes -eq 1 ]] || export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1200}
fi

arguments=(--device "$device" ${defaults[@]+"${defaults[@]}"} "$@")
# Once in one process: what is wrong with the arguments or the data is said in one line, before torchrun starts.
RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((nnodes * nproc)) LOCAL_WORLD_SIZE=$nproc \
    "$python" "$train" "${arguments[@]}" --check || exit
# This is torchrun, of this Python; -m would warn where torch_npu has imported it already.
# exec: signals go to torchrun, which ends the processes it started.
exec "$python" -c 'from torch.distributed.run import main; main()' \
    "${rendezvous[@]}" --nproc-per-node "$nproc" "$train" "${arguments[@]}"
