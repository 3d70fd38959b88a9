"""Whether this machine can run a benchmark: the doctor's checks, of what benchmarks need."""

from vllm_santa.doctor.finding import Finding, error
from vllm_santa.doctor.gpus import CHECK, DriverError, check_gpus, find_gpus
from vllm_santa.doctor.packages import check_flashinfer, check_torch, check_vllm


def missing(vllm: bool = False) -> list[Finding]:
    """What keeps benchmarks from running here; empty if nothing does. vllm: whether they serve a model.

    Without a GPU nothing else is looked at.
    """
    try:
        gpus = find_gpus()
    except DriverError as reason:
        return [check_gpus([], str(reason))]
    if not gpus:
        return [error(CHECK, "none: nothing can be measured here", "Run it on a machine with an NVIDIA GPU and its driver (nvidia-smi).")]
    findings = [check_gpus(gpus), check_torch(True)[0], check_flashinfer(True)]
    if vllm:
        findings.append(check_vllm(True))
    return [finding for finding in findings if finding.level == "error"]
