"""What the modules for torch have in common."""

import torch

#: The stored formats that keep a type of torch as it is.
FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
