"""Variables of the environment that jobs get from the machine they run on.

What `drystone serve` was started with may hold passwords and keys of a cloud: none of it is for
jobs. They get what programs need to run and to find devices, caches and networks; anything else
comes from the job file, or from the owner of the service (`serve --job-env`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_PROGRAMS: Final = """
HOME HOSTNAME LANG LANGUAGE LOGNAME PATH PWD SHELL TEMP TERM TMP TMPDIR TZ USER
LD_LIBRARY_PATH LIBRARY_PATH CPATH MANPATH MODULEPATH
PYTHONHASHSEED PYTHONPATH PYTHONUNBUFFERED PYTHONUTF8
VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV
"""
_CACHES_AND_DEVICES: Final = """
DRYSTONE_CACHE XDG_CACHE_HOME XDG_DATA_HOME XDG_RUNTIME_DIR
HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE HF_ENDPOINT
TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE
TORCH_HOME TORCH_EXTENSIONS_DIR TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR
CUDA_HOME CUDA_PATH CUDA_CACHE_PATH CUDA_DEVICE_ORDER
SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NO_PROXY no_proxy
"""
_NAMES: Final = frozenset((_PROGRAMS + _CACHES_AND_DEVICES).split())
_PREFIXES: Final = (
    "FI_",
    "GLOO_",
    "GOMP_",
    "HIP_",
    "HSA_",
    "KMP_",
    "LC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "RCCL_",
    "ROCM_",
    "SLURM_",
    "UCX_",
)
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_SECRETS: Final = frozenset({"SLURM_JWT"})


def job_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Of these variables, those that a job may see."""
    return {name: value for name, value in variables.items() if _is_for_jobs(name, value)}


def _is_for_jobs(name: str, value: str) -> bool:
    if name.lower() in _PROXIES:
        return "@" not in value  # else it holds a password
    return name in _NAMES or (name.startswith(_PREFIXES) and name not in _SECRETS)
