"""`python -m torchelastic.launch`."""

from torchelastic.launch.main import console

if __name__ == "__main__":
    console()
