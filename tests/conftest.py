"""Every test starts from the same place: no hub, one thread, silent libraries, kernels that run anywhere."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from hypothesis import settings

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Without a GPU the kernels run in Triton's interpreter, which must be chosen before they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# Examples are derived from the test's name: the same on every machine and every run.
settings.register_profile("adaponder", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("adaponder")
