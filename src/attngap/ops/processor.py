"""Who made the processor: what is quicker by one maker's is slower by another's.

A choice by measurement would be finer, and would change the order of sums from run to run with the load of the machine;
runs are resumed and compared to the bit.
"""

import functools
import platform
from pathlib import Path

INTEL = "GenuineIntel"


@functools.cache
def maker() -> str:
    """As the processor itself says it, such as GenuineIntel or AuthenticAMD; empty where that cannot be known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return next((name for name in platform.processor().replace(",", " ").split() if name.startswith("Genuine")), "")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
