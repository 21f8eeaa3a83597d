"""torchrun on a machine without CUDA's libraries. scripts/setup.sh installs it as .venv/bin/torchrun.

torch's Python part is linked with libtorch_cuda, which names cuBLAS, cuDNN, NCCL and others: 1.7 GB to download, of which torchrun
calls nothing. Here empty libraries of those names, made by setup.sh in .venv/lib/torchrun, satisfy the loader in this process
alone; functions are looked up when they are called, which they never are. The programs that torchrun starts do not see any of it.
A script in Python that imports torch itself needs the real libraries (MEGATRON_GPU=1 make setup).
"""
import ctypes
import glob
import os
import sys
import warnings

for library in sorted(glob.glob(os.path.join(sys.prefix, "lib", "torchrun", "lib*.so.*"))):
    ctypes.CDLL(library, mode=os.RTLD_LAZY | os.RTLD_GLOBAL)
    sys.setdlopenflags(os.RTLD_LAZY)
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from torch.distributed.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
