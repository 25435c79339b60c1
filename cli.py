"""`python cli.py ...` from a checkout is the same as the installed command `sluice ...`."""

from finetune.app import main

if __name__ == "__main__":
    main()
