"""`python -m torchelastic` is the `torchelastic` command."""

from torchelastic.launch.main import console

if __name__ == "__main__":
    console()
