"""What `kvferry bench all2all` measures, one process a rank. Only workers look for torch and CuPy."""
