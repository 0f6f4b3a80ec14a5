"""What the last bits of a run depend on besides its job: recorded with every shard, so that a mixed run says so."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

import torch

import harvest
from harvest.settings.model import ModelSettings


def allow_open_files() -> None:
    """Raises this process's soft limit on open files to its hard one: a shard holds a file open for every name."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def environment(device: str, threads: int, model: ModelSettings) -> dict[str, str]:
    """What the last bits depend on besides the job: hardware, threads, libraries, and of these the ones it asks for."""
    asked = {"accelerate": model.device_map, "bitsandbytes": model.quantization, "peft": model.adapter}
    return {
        "harvest": harvest.__version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "threads": str(threads),
        **{library: importlib.metadata.version(library) for library, setting in asked.items() if setting is not None},
    }


@functools.cache
def cpu_name() -> str:
    """Model and instruction set of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{model or platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
