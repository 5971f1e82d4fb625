"""Messages of real incidents, as people reported them, and whose fault each is."""

import pytest

from drystone.run.control.failures import FaultKind, is_hopeless, judge
from drystone.run.control.hardware import find_hardware_sign

# (where it was reported, what the log said, what follows)
INCIDENTS = [
    (
        "github.com/huggingface/trl/issues/4149",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        FaultKind.HARDWARE,
    ),
    (
        "github.com/NVIDIA/semantic-segmentation/issues/33",
        "RuntimeError: cuda runtime error (39) : uncorrectable ECC error encountered",
        FaultKind.HARDWARE,
    ),
    (
        "github.com/nagadit/DeepFaceLab_Linux/issues/89",
        "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        FaultKind.HARDWARE,
    ),
    (
        "github.com/rwth-i6/returnn/issues/1486",
        "Unable to determine the device handle for GPU0000:03:00.0: Unknown Error",
        FaultKind.HARDWARE,
    ),
    (
        "docs.nvidia.com/deploy/xid-errors",
        "NVRM: Xid (PCI:0000:65:00): 79, pid=0, GPU has fallen off the bus.",
        FaultKind.HARDWARE,
    ),
    (
        "docs.nvidia.com/deploy/xid-errors",
        "NVRM: Xid (PCI:0000:b7:00): 95, pid=812, Uncontained ECC error",
        FaultKind.HARDWARE,
    ),
    (
        "github.com/pytorch/pytorch/issues/35710",
        "RuntimeError: cuda runtime error (802) : system not yet initialized",
        FaultKind.HARDWARE,
    ),
    (
        "github.com/huggingface/huggingface_hub/issues/4134",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet "
        "initialized",
        FaultKind.HARDWARE,
    ),
    (
        "github.com/intel/llvm/issues/17614",
        "Failed to initialize NVML: Driver/library version mismatch",
        FaultKind.HARDWARE,
    ),
    (
        "github.com/NVIDIA/nvidia-docker/issues/1256",
        "CUDA: Check failed: e == cudaSuccess (803 vs. 0) : system has unsupported display driver "
        "/ cuda driver combination",
        FaultKind.DEVICE,
    ),
    (
        "github.com/Lightning-AI/lit-llama/issues/380",
        "transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error",
        FaultKind.NETWORK,
    ),
    (
        "github.com/NVIDIA/nccl/issues/1919",
        "NCCL WARN NET/IB : mlx5_1:1 async fatal event on QP (0x7309dc3bb338): invalid request",
        FaultKind.NETWORK,
    ),
    (
        "github.com/moosefs/moosefs/issues/274",
        "OSError: [Errno 107] Transport endpoint is not connected",
        FaultKind.DISK,
    ),
    (
        "github.com/pytorch/pytorch/issues/108861",
        "RuntimeError: DataLoader worker (pid 11011) is killed by signal: Bus error. It is "
        "possible that dataloader's workers are out of shared memory.",
        FaultKind.CRASH,
    ),
    (
        "github.com/pytorch/pytorch/issues/74235",
        "RuntimeError: CUDA error: unspecified launch failure",
        FaultKind.DEVICE,
    ),
    (
        "github.com/swz30/Restormer/issues/75",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        FaultKind.DEVICE,
    ),
    (
        "github.com/pytorch/pytorch/issues/134542",
        "RuntimeError: No CUDA GPUs are available",
        FaultKind.DEVICE,
    ),
    (
        "github.com/QwenLM/Qwen3/issues/873",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        FaultKind.OUT_OF_MEMORY,
    ),
    (
        "github.com/hiyouga/LlamaFactory/issues/7396",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        FaultKind.NETWORK,
    ),
    (
        "github.com/NVIDIA/nccl/issues/1814",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<55921> with status=12 opcode=1",
        FaultKind.NETWORK,
    ),
    (
        "github.com/MIC-DKFZ/nnUNet/issues/1254",
        "OSError: [Errno 5] Input/output error",
        FaultKind.DISK,
    ),
]


@pytest.mark.parametrize(("source", "log", "kind"), INCIDENTS)
def test_a_fault_of_the_machine_is_not_called_an_error_of_the_user(source, log, kind):
    fault = judge({0: 1}, {0: f"Traceback (most recent call last):\n{log}\n"})

    assert fault.kind is kind, source
    assert not is_hopeless(fault.kind, 1)
    assert log in fault.reason


def test_the_rank_with_the_broken_gpu_is_blamed_not_those_that_waited_for_it():
    waiting = "Watchdog caught collective operation timeout: WorkNCCL ran for 600001 milliseconds"
    fault = judge(
        {0: -6, 1: -6, 2: 1, 3: -6},
        {0: waiting, 1: waiting, 2: "CUDA error: uncorrectable ECC error", 3: waiting},
    )

    assert (fault.kind, fault.rank) == (FaultKind.HARDWARE, 2)
    assert "uncorrectable memory error of the GPU" in fault.reason


def test_a_watchdog_that_aborts_is_a_fault_of_the_network_and_any_other_abort_a_crash():
    timed_out = "Watchdog caught collective operation timeout"
    assert judge({0: -6}, {0: timed_out}).kind is FaultKind.NETWORK
    assert judge({0: -6}, {0: "double free or corruption"}).kind is FaultKind.CRASH
    assert judge({0: -11}, {0: timed_out}).kind is FaultKind.CRASH


@pytest.mark.parametrize(
    "log",
    [
        "NVRM: Xid (PCI:0000:65:00): 31, pid=77, MMU Fault",  # a program's page fault
        "NVRM: Xid (PCI:0000:65:00): 13, pid=77, Graphics Exception",
        "CUDA error: device-side assert triggered",  # an index out of range
        "ValueError: 79 is not a valid label",
    ],
)
def test_a_fault_of_the_program_is_not_blamed_on_the_machine(log):
    assert find_hardware_sign(log) is None
    assert judge({0: 1}, {0: log}).kind is FaultKind.USER_ERROR
