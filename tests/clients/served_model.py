"""The model that foreign programs are shown: SmolLM2-135M-Instruct where SMOLLM2 says where it lies (make clients fetches it), else a tiny
one that is trained for the run."""
import atexit
import os
import shutil
import tempfile

from serving import train_talker

NAME = "smollm2" if "SMOLLM2" in os.environ else "talker"
FLAGS = ["--served-model-name", NAME, "--inference-max-seq-length", "2048", "--inference-max-requests", "32"]
made = {}


def path():
    if "SMOLLM2" in os.environ:
        return os.environ["SMOLLM2"]
    if not made:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        made["path"] = os.path.join(folder, "talker")
        train_talker(made["path"], "--seq-length", "2048", "--lr", "1e-9")
    return made["path"]
