"""What `kvferry bench` measures. Needs NumPy; `kvferry.cli.bench` reads the options and prints."""
