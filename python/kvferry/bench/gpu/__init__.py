"""What `kvferry bench transfer` measures on GPUs. torch, CuPy and LMCache are looked up, never required."""
